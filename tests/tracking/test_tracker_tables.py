"""What trackers show besides the metrics."""

import pytest
from accelerate import tracking

from alpaca_ppo.tracking.tracker_tables import MAX_CHARS, MAX_ROWS, OVERVIEW, log_table, markdown_table, overview

ROW = {"prompt_id": 3, "prompt": "p", "response": "r", "score": 0.5, "tokens": [1]}


def test_a_markdown_table_shows_text_as_it_is_and_cuts_a_long_one_in_the_middle():
    long = "a" * MAX_CHARS + "b" * MAX_CHARS
    rows = [{"score": 1 / 3, "a|b": "<i>\r\n*x*"}, {"score": 2, "a|b": long}]
    half = MAX_CHARS // 2
    assert markdown_table(rows).split("\n") == [
        "| score | a\\|b |",
        "| --- | --- |",
        "| 0.3333 | &lt;i&gt;<br>\\*x\\* |",
        f"| 2 | {'a' * half} ... ({MAX_CHARS} characters) ... {'b' * half} |",
    ]


def test_the_overview_comes_first_in_tensorboard():
    stats = {"objective/scores": 1.0, "eval/scores": 2.0, "eval/hard/scores": 3.0, "mismatch/k3": 4.0, "a/b": 5.0}
    shown = overview(stats)
    assert shown == {
        "0_overview/1_reward": 1.0,
        "0_overview/4_eval_reward": 2.0,
        "0_overview/4_eval_reward_hard": 3.0,
    }
    assert sorted([*stats, *shown])[: len(shown)] == sorted(shown)
    assert overview(stats, best_by="mismatch/k3") == shown | {"0_overview/7_mismatch_k3": 4.0}
    # It is there already, or was not measured in this step.
    for name in ("eval/scores", "eval/hard/scores", "eval/f1"):
        assert overview(stats, best_by=name) == shown
    assert list(OVERVIEW.values()) == sorted(OVERVIEW.values())


@pytest.mark.parametrize("kind", [tracking.WandBTracker, tracking.ClearMLTracker, tracking.AimTracker])
def test_trackers_that_have_tables_get_the_first_rows_with_score_prompt_and_response_first(kind):
    calls = []

    class Player(kind):
        def __init__(self):
            pass

        def log_table(self, name, **arguments):
            calls.append((name, arguments))

    log_table(Player(), "rollouts", [ROW] * (MAX_ROWS + 1), 7)
    columns, data = ["score", "prompt", "response", "prompt_id"], [[0.5, "p", "r", 3]] * MAX_ROWS
    expected = [("rollouts/table", {"columns": columns, "data": data, "step": 7})]
    assert calls == ([] if kind is tracking.AimTracker else expected)
