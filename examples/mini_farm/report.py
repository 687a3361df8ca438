"""RESULTS.md: one section for each command that adds to it, and the figures beside it."""

import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

from alpaca_ppo.atomic_io import write_text_atomically

REPORT = Path(__file__).with_name("RESULTS.md")
TITLE = "# Results of the laptop laboratory"
SECTIONS = ("Three seeds", "Over-optimisation", "Algorithms compared", "LoRA")
"""In the order in which they stand in the report."""


def write_section(report: Path, title: str, text: str, figure: Path | None = None) -> None:
    """Puts `text` and `figure`, copied beside `report`, under the heading `title` of `SECTIONS`; others stay."""
    sections = dict.fromkeys(SECTIONS, "") | _read(report)
    sections[title] = text.strip()
    if figure is not None:
        beside = report.with_name(figure.name)
        if beside.resolve() != figure.resolve():
            shutil.copyfile(figure, beside)
        sections[title] += f"\n\n![{title}]({figure.name})"
    parts = [f"## {name}\n\n{body.strip()}\n" for name, body in sections.items() if body]
    write_text_atomically(report, "\n".join([f"{TITLE}\n", *parts]))


def machine() -> str:
    """What the numbers depend on besides the code."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, {packages}"


def _read(report: Path) -> dict[str, str]:
    if not report.is_file():
        return {}
    _, *parts = report.read_text(encoding="utf-8").split("\n## ")
    return {title: body for title, _, body in (part.partition("\n") for part in parts)}
