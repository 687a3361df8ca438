"""What a killed process leaves in a folder that it was writing to."""

from pathlib import Path


def work_folder(parent: Path, name: str, *parts: str) -> Path:
    """The working folder of `parent/name`, with folders such as `new` and `old`, named as `atomic_io` names them."""
    work = parent / f".{name}.alpaca_ppo-tmp"
    work.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (work / f"{part}.alpaca_ppo").mkdir()
        (work / f"{part}.alpaca_ppo" / "half").write_text("written")
    return work
