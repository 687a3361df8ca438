"""The report RESULTS.md, with a section for each command that writes to it, and figures in the same folder."""

import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

from alpaca_ppo.atomic_io import write_text_atomically

REPORT = Path(__file__).with_name("RESULTS.md")
TITLE = "# Results of the laptop laboratory"
SECTIONS = ("Three seeds", "Over-optimisation", "Algorithms compared", "LoRA", "Against TRL")
"""In the order of the report."""
NOTES = "\n## What it means\n"


def write_section(report: Path, title: str, text: str, figure: Path | None = None) -> None:
    """Writes `text` and `figure` under the heading `title`, one of `SECTIONS`; the other sections stay.

    The figure is copied to the folder of `report`.
    """
    sections = dict.fromkeys(SECTIONS, "") | _read(report)
    sections[title] = text.strip()
    if figure is not None:
        target = report.with_name(figure.name)
        if target.resolve() != figure.resolve():
            shutil.copyfile(figure, target)
        sections[title] += f"\n\n![{title}]({figure.name})"
    parts = [f"## {name}\n\n{body.strip()}\n" for name, body in sections.items() if body]
    write_text_atomically(report, "\n".join([f"{TITLE}\n", *parts]))


def machine() -> str:
    """Returns hardware and versions, on which the numbers depend."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, {packages}"


def notes_of(report: Path) -> str:
    """Returns what is written by hand at the end of a page that a script writes: from the heading "What it means" on,
    with the blank line before it; nothing if there is no such page or heading.
    """
    text = report.read_text("utf-8") if report.is_file() else ""
    _, heading, notes = text.partition(NOTES)
    return heading + notes


def _read(report: Path) -> dict[str, str]:
    if not report.is_file():
        return {}
    _, *parts = report.read_text(encoding="utf-8").split("\n## ")
    return {title: body for title, _, body in (part.partition("\n") for part in parts)}
