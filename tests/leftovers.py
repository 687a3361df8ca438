"""What a killed process leaves in a folder that it was writing to."""

from pathlib import Path


def work_folder(parent: Path, name: str, *parts: str) -> Path:
    """The working folder of `parent/name`, marked as `atomic_io` marks it, with folders such as `new` and `old`."""
    work = parent / f".{name}.alpaca_ppo-tmp"
    work.mkdir(parents=True, exist_ok=True)
    (work / "written-by-alpaca_ppo").touch()
    for part in parts:
        (work / part).mkdir()
        (work / part / "half").write_text("written")
    return work
