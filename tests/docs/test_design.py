"""docs/design.md is the map of the package as it is: every file once, the tiers of the layout test, changes with files
that exist.
"""

import re

from tests.docs.markdown import ROOT, blocks, table_rows
from tests.test_layout import TIERS

DESIGN = (ROOT / "docs/design.md").read_text("utf-8")


def files_of_tree(text: str) -> list[str]:
    """Paths of the files in a drawn tree: two spaces a level, folders end in a slash, the rest of a line is a note."""
    folders: list[str] = []
    found = []
    for line in filter(str.strip, text.splitlines()):
        level, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[level:] = [name] if name.endswith("/") else []
        if not name.endswith("/"):
            found.append("".join(folders) + name)
    return found


def package_files() -> list[str]:
    """Python files, presets and launch configurations of the package, without `__init__`s below the root's."""
    found = [p for p in (ROOT / "alpaca_ppo").rglob("*.*") if p.suffix in (".py", ".yaml", ".json")]
    kept = [p for p in found if p.name != "__init__.py" or p.parent.name == "alpaca_ppo"]
    return sorted(p.relative_to(ROOT).as_posix() for p in kept)


def test_the_tree_names_every_file_once_with_a_note():
    (tree,) = blocks(DESIGN, "docs/design.md", "text")
    assert sorted(files_of_tree(tree.text)) == package_files()
    assert [line for line in filter(str.strip, tree.text.splitlines()) if len(line.split()) < 2] == []


def test_the_tiers_are_those_of_the_layout_test():
    rows = table_rows(DESIGN, "tier")
    drawn = [set(re.findall(r"`(\w+)`", row["holds"])) for row in rows]
    assert drawn == [set(tier) for tier in reversed(TIERS)]


def test_each_change_names_a_file_or_a_folder():
    rows = table_rows(DESIGN, "change")
    assert len(rows) >= 15
    assert [row["change"] for row in rows if not re.search(r"`alpaca_ppo/[\w/]+(\.py|/)`", row["open"])] == []
