"""What trackers show besides the metrics; W&B and the others are played by subclasses of Accelerate's own classes."""

import sys
import types

import pytest
from accelerate import tracking

from alpaca_ppo.tracking.tracker_tables import (
    MAX_CHARS,
    OVERVIEW,
    log_table,
    markdown_table,
    overview,
    rows_to_read,
    table_rows,
)

ROWS = [{"prompt_id": 3, "prompt": "p", "response": "r", "score": 0.5, "length": 1, "tokens": [{"id": 1}]}]
COLUMNS = ["score", "prompt", "response", "prompt_id", "length"]


def test_a_table_takes_its_columns_from_the_first_row_and_keeps_each_row_on_one_line():
    rows = [{"prompt": "a|b\r\nc", "score": 0.123456}, {"prompt": "d"}]
    assert markdown_table(rows) == "| prompt | score |\n| --- | --- |\n| a\\|b<br>c | 0.1235 |\n| d |  |"
    assert markdown_table([]) == ""


def test_markdown_and_html_in_a_text_are_shown_as_they_are():
    assert markdown_table([{"t": "# a*b* _c_ `d` [e](f) <b>&x\\"}]).splitlines()[-1] == (
        "| \\# a\\*b\\* \\_c\\_ \\`d\\` \\[e\\](f) &lt;b&gt;&amp;x\\\\ |"
    )


def test_a_long_text_is_cut_in_the_middle_and_broken_into_lines():
    half = MAX_CHARS // 2
    line = markdown_table([{"t": "s" * half + "x" * 40 + "e" * half}]).splitlines()[-1]
    assert line.replace("<br>", " ").replace(" ", "") == f"|{'s' * half}...(40characters)...{'e' * half}|"
    assert max(map(len, line.split("<br>"))) <= 36
    assert markdown_table([{"t": "a word " * 8}]).splitlines()[-1] == (
        "| a word a word a word a word a word<br>a word a word a word |"
    )


def test_the_score_comes_first_and_tokens_stay_in_the_file():
    assert [list(row) for row in table_rows(ROWS)] == [COLUMNS]
    assert len(table_rows(ROWS * 20)) == 16
    assert table_rows([{"response": "r"}]) == [{"response": "r"}]


def test_a_row_to_read_has_the_texts_and_one_column_of_the_rest():
    columns = {"question": "Where is  it?", "output": "", "answer": "in it", "asks": ["a", "b"]}
    row = {"score": 0.5, "prompt": "Q: Where\nis it?\n", "response": "in it", "prompt_id": 3, "kl": 0.123456}
    row |= {"scores": {"a": 1.0, "b": None}, "correct": False, "turns": [{"role": "policy"}], "columns": columns}
    assert rows_to_read([row]) == [
        {
            "score": 0.5,
            "prompt": "Q: Where\nis it?\n",
            "response": "in it",
            "details": "prompt_id: 3\nkl: 0.1235\na: 1\ncorrect: False\nquestion: Where is it?\nanswer: in it\n"
            "asks: ['a', 'b']",
        }
    ]
    assert rows_to_read([{"response": "r"}]) == [{"response": "r"}]


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


def player(kind, calls):
    """An instance of Accelerate's tracker `kind` that records what it is given."""

    class Player(kind):
        def __init__(self):
            pass

        def log_table(self, name, **arguments):
            calls.append((name, arguments))

        def log_artifact(self, path, artifact_path):
            calls.append((path, artifact_path))

        def log(self, values, step):
            calls.append((values, step))

        @property
        def tracker(self):
            return types.SimpleNamespace(log_table=lambda name, **arguments: calls.append((name, arguments)))

    return Player()


DATA = [[0.5, "p", "r", 3, 1]]


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (tracking.WandBTracker, ("rollouts/table", {"columns": COLUMNS, "data": DATA, "step": 7})),
        (tracking.ClearMLTracker, ("rollouts/table", {"columns": COLUMNS, "data": DATA, "step": 7})),
        (tracking.CometMLTracker, ("rollouts_step_000007.csv", {"tabular_data": DATA, "headers": COLUMNS})),
        (tracking.MLflowTracker, ("out/step.jsonl", "rollouts")),
        (tracking.AimTracker, None),
    ],
)
def test_each_tracker_gets_a_table_in_its_own_way(kind, call):
    calls = []
    log_table(player(kind, calls), "rollouts", ROWS, "out/step.jsonl", 7)
    log_table(player(kind, calls), "rollouts", [], "out/step.jsonl", 8)
    assert calls == ([call] if call else [])


def test_trackio_gets_its_own_table(monkeypatch):
    calls = []
    module = types.SimpleNamespace(Table=lambda dataframe: dataframe.to_dict("records"))
    monkeypatch.setitem(sys.modules, "trackio", module)
    log_table(player(tracking.TrackioTracker, calls), "eval", ROWS, "out/step.jsonl", 7)
    (row,) = ROWS
    assert calls == [({"eval/table": [{name: row[name] for name in COLUMNS}]}, 7)]
