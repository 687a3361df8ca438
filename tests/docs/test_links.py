"""Every relative link leads to a file and heading, every file that a page names is there."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, all_blocks, anchor, code_spans, headings, named, pages, prose

OF_USERS = {"run.yaml", "my_rewards.py", "my_file.py", "file.py", "my_head.py", "ppo_trainer.yaml", "my_tools.py"}
"""Files that a user, or another project, has."""


def broken_links(text: str, page: Path) -> list[str]:
    """Links of `text`, the content of `page`, that lead nowhere."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"https?://", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            found.append(f"{named(page)} links to {target}, which does not exist")
        elif fragment and fragment not in map(anchor, headings(file.read_text("utf-8") if path else text)):
            found.append(f"{named(page)} links to {target}, a heading that {path or 'the page'} does not have")
    return found


def missing_files(text: str, page: Path, shown: set[str]) -> list[str]:
    """Code spans of `text`, the content of `page`, that look like a file of this repository and are none; `shown` are
    files that the pages themselves show.
    """
    found = []
    for line, span in code_spans(text):
        # What a run leaves there; the folder is in a clone in which one was made.
        if span.startswith("outputs/"):
            continue
        bases = [base for base in (ROOT, page.parent) if (base / span.split("/")[0]).exists()]
        if re.fullmatch(r"[\w.-]+/[\w./*-]*", span) and (bases or span.startswith(("alpaca_ppo/", "examples/"))):
            exists = any(list(base.glob(span.rstrip("/"))) for base in bases)
        elif re.fullmatch(r"[\w-]+\.(py|sh|md|yaml|toml|cfg)", span) and span not in OF_USERS | shown:
            exists = any(ROOT.glob(span)) or any(path.name == span for path in repository_files())
        else:
            continue
        if not exists:
            found.append(f"{named(page)}:{line} names {span}, which does not exist")
    return found


def missing_sections(text: str) -> list[str]:
    """Pages of `docs/`, and sections of them, that `text`, such as a finding's remedy, names and that do not exist."""
    found = set(re.findall(r"\bdocs/([\w/-]+\.md(?:#[\w-]+)?)", text))
    return broken_links("".join(f"[x]({target})" for target in found), ROOT / "docs/any.md")


def repository_files() -> list[Path]:
    return [p for folder in ("alpaca_ppo", "docs", "examples", "tests") for p in (ROOT / folder).rglob("*.*")]


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_link_leads_somewhere(page):
    assert broken_links(page.read_text("utf-8"), page) == []


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_file_that_a_page_names_exists(page):
    shown = {block.file_name for block in all_blocks("python", "yaml") if block.file_name}
    assert missing_files(page.read_text("utf-8"), page, shown) == []


def test_every_section_that_the_package_names_exists():
    texts = [path.read_text("utf-8") for path in (ROOT / "alpaca_ppo").rglob("*.*") if path.suffix in (".py", ".yaml")]
    assert missing_sections("\n".join(texts)) == []


@pytest.mark.parametrize("name", ["docs/nothing.md", "docs/recipes/tools.md#no-such-heading"])
def test_a_section_that_does_not_exist_is_found(name):
    assert len(missing_sections(f"raise it; see {name}, or docs/metrics.md#evaluation")) == 1


@pytest.mark.parametrize("target", ["docs/nothing.md", "docs/design.md#no-such-heading", "#no-such-heading"])
def test_a_broken_link_is_found(target):
    assert len(broken_links(f"# A\n[x]({target})", ROOT / "README.md")) == 1


@pytest.mark.parametrize("span", ["alpaca_ppo/trainer.py", "examples/nothing/", "no_such_script.py", "tests/*.toml"])
def test_a_file_that_does_not_exist_is_found(span):
    assert len(missing_files(f"see `{span}`", ROOT / "README.md", set())) == 1


@pytest.mark.parametrize("span", ["alpaca_ppo/types.py", "examples/", "train_sft.py", "run.yaml", "objective/scores"])
def test_files_that_exist_and_other_words_are_left_alone(span):
    assert missing_files(f"see `{span}`", ROOT / "README.md", set()) == []
