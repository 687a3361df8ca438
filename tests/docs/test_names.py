"""Options, metrics and other names of the code that the pages mention exist."""

import dataclasses
import re

import pytest

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.presets import preset_names
from tests.docs.markdown import ROOT, code_spans, named, pages, table_rows

FIELDS = {field.name for cls in (PPOConfig, ScriptArguments, LoraArguments) for field in dataclasses.fields(cls)}
METRIC = r"(?:objective|ppo|eval|mismatch|time|tokens|memory)/[\w/<>]*\*?"
FOREIGN = ("TRL", "TRL's metric", "AlpacaFarm", "AlpacaFarm's method", "verl", "verl's metric")
"""First columns of tables whose names are another project's."""
OF_OTHER_PROJECTS = {"trainer_state", "log_extra", "log_metric", "low_var_kl", "norm_adv_by_std_in_grpo"}
"""Names of other projects that stand elsewhere on the page about them."""


def documented_metrics() -> dict[str, str]:
    """Every metric of docs/metrics.md, with when it is written."""
    rows = table_rows((ROOT / "docs/metrics.md").read_text("utf-8"), "metric")
    return {name: row["written"] for row in rows for name in re.findall(r"`([^`]+)`", row["metric"])}


def words_of_the_code() -> set[str]:
    files = [p for folder in ("alpaca_ppo", "examples") for p in (ROOT / folder).rglob("*.*") if p.suffix != ".md"]
    texts = [p.read_text("utf-8") for p in files if p.suffix in (".py", ".sh", ".yaml", ".json")]
    texts += [(ROOT / name).read_text("utf-8") for name in ("Makefile", "setup.cfg", "tests/test_layout.py")]
    tests = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"\w+", "\n".join(texts))) | set(re.findall(r"def (test_\w+)", tests)) | set(preset_names())


def without_foreign_tables(text: str) -> str:
    """`text` without the first column of the tables of other projects' names."""
    lines, foreign = [], False
    for line in text.splitlines():
        cells = line.split("|")
        if not line.startswith("|"):
            foreign = False
        elif not foreign:
            foreign = cells[1].strip() in FOREIGN
        lines.append("|".join(["", "", *cells[2:]]) if foreign and line.startswith("|") else line)
    return "\n".join(lines)


def unknown_names(text: str, page: str, words: set[str], metrics: set[str]) -> list[str]:
    """Code spans of `text` that look like an option with a value, a metric or an identifier and are none."""
    found = []
    for line, span in code_spans(text):
        option = re.fullmatch(r"([a-z_]+): \S.*", span)
        metric = re.fullmatch(METRIC, span)
        if option and option[1] not in FIELDS:
            found.append(f"{page}:{line} names the option {span}")
        elif metric and not any(_matches(span, known) for known in metrics):
            found.append(f"{page}:{line} names the metric {span}")
        elif re.fullmatch(r"_?[a-z]+(_[a-z0-9]+)+", span) and span not in words:
            found.append(f"{page}:{line} names {span}, which is nowhere in the code")
    return found


def _matches(span: str, known: str) -> bool:
    """Whether `span` means the metric `known`; `<any>`, `*` and nothing behind the last slash stand for many."""
    start = re.match(r"(.*/)(?:\*|<\w+>)?$", span)
    if start and known.startswith(start[1]):
        return True
    return span == known or bool(re.fullmatch(re.sub(r"<\w+>", r"\\w+", known), span))


@pytest.fixture(scope="module")
def words():
    return words_of_the_code()


@pytest.mark.parametrize("page", pages(), ids=named)
def test_the_names_on_a_page_exist(page, words):
    text = without_foreign_tables(page.read_text("utf-8"))
    others = OF_OTHER_PROJECTS if page.name == "migrating.md" else set()
    assert unknown_names(text, named(page), words | others, set(documented_metrics())) == []


@pytest.mark.parametrize(
    "span", ["no_such_option: 1", "objective/nothing", "_no_such_hook", "time/nothing", "ppo/nope/*"]
)
def test_a_name_that_does_not_exist_is_found(span, words):
    assert len(unknown_names(f"`{span}`", "page.md", words, set(documented_metrics()))) == 1


@pytest.mark.parametrize("span", ["kl_coef: 0.1", "objective/scores/my_reward", "_shape_reward", "ppo/policy/*", "b_1"])
def test_names_that_exist_are_left_alone(span):
    assert unknown_names(f"`{span}`", "page.md", {"_shape_reward", "b_1"}, set(documented_metrics())) == []
