"""Pages as the tests read them: fenced blocks, headings, tables and code spans.

Reads Markdown as this repository writes it; this is no full parser.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """Every page that a user, a contributor or a coding assistant reads."""
    fixed = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
    return [*fixed, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]


def named(path: Path) -> str:
    """The page's path from the repository's root."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    heading: str
    """The last heading before it."""
    language: str
    text: str
    line: int
    """Where its text begins, from 1."""

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The file that the block stands for, if its first line names one: `# my_file.py`."""
        found = re.match(r"# (\w+\.(?:py|yaml))\n", self.text)
        return found[1] if found else None


def blocks(text: str, page: str, *languages: str) -> list[Block]:
    """The fenced blocks of `text` in `languages`, in order."""
    found = []
    for match in _FENCE.finditer(text):
        if match[1] in languages:
            above = headings(text[: match.start()])
            line = text[: match.start()].count("\n") + 2
            found.append(Block(page, above[-1] if above else "", match[1], match[2], line))
    return found


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of every page in `languages`."""
    return [block for page in pages() for block in blocks(page.read_text("utf-8"), named(page), *languages)]


def prose(text: str) -> str:
    """`text` with its fenced blocks blanked out; line numbers stay."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def headings(text: str) -> list[str]:
    """The headings of `text`, without their marks."""
    return re.findall(r"^#+ +(.*)$", prose(text), flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """What a link to `heading` names on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def code_spans(text: str) -> list[tuple[int, str]]:
    """Line (from 1) and text of every code span outside fenced blocks."""
    lines = prose(text).splitlines()
    return [(number, span) for number, line in enumerate(lines, 1) for span in re.findall(r"`([^`]+)`", line)]


def table_rows(text: str, first_column: str) -> list[dict[str, str]]:
    """The rows of every table whose first column has that heading, as dictionaries by column."""
    rows: list[dict[str, str]] = []
    columns: list[str] | None = None
    for line in prose(text).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            columns = None
        elif columns is None:
            columns = cells
        elif columns[0] == first_column and set(cells[0]) - set("-: "):
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows
