"""The figures of docs/performance.md are those that the benchmark has written."""

from tests.docs.markdown import ROOT, table_rows


def test_the_figures_are_those_of_the_last_benchmark():
    shown, measured = (
        table_rows((ROOT / folder / "performance.md").read_text("utf-8"), "alpaca_ppo's step is")
        for folder in ("docs", "examples")
    )
    assert shown
    assert [row for row in shown if row not in measured] == []
