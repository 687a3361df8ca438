"""The figures of docs/performance.md are those that the benchmark has written."""

import pytest

from tests.docs.markdown import ROOT, table_rows


@pytest.mark.parametrize("head", ["alpaca_ppo's step is", "a step"])
def test_the_figures_are_those_of_the_last_benchmark(head):
    shown, measured = (
        table_rows((ROOT / folder / "performance.md").read_text("utf-8"), head) for folder in ("docs", "examples")
    )
    assert shown
    assert [row for row in shown if row not in measured] == []
