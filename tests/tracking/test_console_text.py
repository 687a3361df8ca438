import math

import pytest

from alpaca_ppo.tracking.console import change_lines, evaluation_lines, number, printable, sample_lines
from alpaca_ppo.tracking.results import averaged_steps


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.23456, "1.235"),
        (0.0, "0.000"),
        (0.0004, "4.0e-04"),
        (0.0005, "0.001"),
        (-0.0004, "-4.0e-04"),
        (99_999.0, "99999.000"),
        (123_456.0, "1.2e+05"),
        (math.nan, "nan"),
    ],
)
def test_a_number_has_decimals_unless_they_would_be_zeros_or_too_many(value, shown):
    assert number(value) == shown


EVAL = {
    "eval/rewards": 0.5,
    "eval/scores": 0.5,
    "eval/scores_std": 0.1,
    "eval/kl_sum_seq": 0.0,
    "eval/response_length": 10.0,
    "eval/truncated_fraction": 0.25,
    "eval/masked_rows": 0.0,
    "objective/rewards": 3.0,
}


def test_an_evaluation_shows_each_metric_before_training_and_now():
    assert evaluation_lines(EVAL, {}, step=0) == [
        "eval before training:  reward 0.500  KL 0.000  length 10.0  cut off 25.0%"
    ]
    (line,) = evaluation_lines(EVAL | {"eval/empty_fraction": 0.125}, {}, step=0)
    assert line.endswith("  cut off 25.0%  empty 12.5%")
    now = EVAL | {"eval/rewards": 0.75, "eval/kl_sum_seq": 2.0, "eval/scores": 1.0, "eval/rewards_se": 0.02}
    assert evaluation_lines(now, EVAL, step=20) == [
        "eval at step 20:  reward 0.500 -> 0.750 ±0.020 (+0.250)  KL 0.000 -> 2.000  length 10.0 -> 10.0"
        "  cut off 25.0% -> 25.0%"
    ]


def test_an_only_source_is_not_shown_beside_the_reward():
    one = {"eval/scores/even": 0.5, "eval/scores/even_se": 0.1}
    assert evaluation_lines(EVAL | one, {}, step=0) == evaluation_lines(EVAL, {}, step=0)
    (line,) = evaluation_lines(EVAL | one | {"eval/scores/odd": 0.25}, {}, step=0)
    assert line.endswith("  even 0.500 ±0.100  odd 0.250")


def test_a_source_named_rewards_is_no_eval_set():
    (line,) = evaluation_lines(EVAL | {"eval/scores/rewards": 0.5, "eval/scores/odd": 0.25}, {}, step=0)
    assert line.endswith("  cut off 25.0%  rewards 0.500  odd 0.250")
    # A set named scores is one.
    (line,) = evaluation_lines({"eval/scores/rewards": 0.5, "eval/scores/scores": 0.5}, {}, step=0)
    assert line == "eval scores before training:  reward 0.500"


def test_numbers_that_are_the_same_are_shown_once():
    same = {f"eval/{name}{end}": value for name in ("rewards", "pass_at_1", "right") for end, value in SAME.items()}
    stats = EVAL | same | {"eval/other": 0.5, "eval/other_se": 0.2}
    (line,) = evaluation_lines(stats, {}, step=0)
    assert line == (
        "eval before training:  reward = pass_at_1 = right 0.500 ±0.100  KL 0.000  length 10.0  cut off 25.0%"
        "  other 0.500 ±0.200"
    )
    (line,) = evaluation_lines(
        stats | dict.fromkeys(("eval/rewards", "eval/pass_at_1", "eval/right"), 0.75), stats, step=9
    )
    assert "reward = pass_at_1 = right 0.500 -> 0.750 ±0.100 (+0.250)  KL" in line
    lines = change_lines([{"step": 0, **stats}, {"step": 9, **stats}])
    assert lines[1] == "  eval reward = pass_at_1 = right      0.500 ->      0.500  (+0.000)"


SAME = {"": 0.5, "_se": 0.1}


def test_a_metric_without_a_value_before_or_now_has_no_arrow():
    lines = evaluation_lines(EVAL | {"eval/rewards": None}, EVAL | {"eval/kl_sum_seq": None}, step=3)
    assert lines[0].startswith("eval at step 3:  reward -  KL 0.000  length 10.0 -> 10.0")


def test_named_evaluation_sets_have_a_line_each():
    stats = {
        "eval/math/rewards": 0.5,
        "eval/math/pass@4": 0.75,
        "eval/chat/rewards": 2.0,
        "eval/rewards": 1.0,
        "eval/f1": 4.0,
    }
    assert evaluation_lines(stats, stats | {"eval/math/pass@4": 0.25}, step=5) == [
        "eval math at step 5:  reward 0.500 -> 0.500 (+0.000)  pass@4 0.250 -> 0.750",
        "eval chat at step 5:  reward 2.000 -> 2.000 (+0.000)",
        "eval at step 5:  reward 1.000 -> 1.000 (+0.000)  f1 4.000 -> 4.000",
    ]


def sample(**fields):
    row = {"prompt": "1 + 1?", "response": "2", "score": 1.0, "kl": 0.5, "length": 2, "stopped": True}
    return row | {"rank": "highest score of 8"} | fields


def test_a_sample_has_its_score_and_kl_above_and_its_text_beside_a_bar():
    lines = sample_lines([sample(response="Let me see.\n\n\tTwo.")], step=50)
    assert lines == [
        "-- step 50, highest score of 8: score 1.000, KL 0.500, 2 tokens, stopped",
        "prompt   | 1 + 1?",
        "response | Let me see.",
        "         |",
        "         |     Two.",
    ]
    assert sample_lines([], step=50) == []
    assert "cut off" in sample_lines([sample(stopped=False)], step=1)[0]


def test_a_long_sample_keeps_its_beginning_and_its_end():
    assert sample_lines([sample(response="a" * 500 + "b" * 500)], step=1)[-1] == f"response | {'a' * 500}{'b' * 500}"
    long = sample_lines([sample(response="a" * 500 + "x" * 7 + "b" * 500)], step=1)[-1]
    assert long == f"response | {'a' * 500} [... 7 characters ...] {'b' * 500}"


def test_a_sample_cannot_control_the_terminal():
    text = "\x1b[31mred\x07 \r\nnext\rover \u202ereversed\u2028end\x9b"
    assert printable(text) == ("\\x1b[31mred\\x07 \nnext\\rover \\u202ereversed\\u2028end\\x9b")


def test_changes_are_means_over_the_first_and_last_tenth():
    history = [{"step": 0, "eval/rewards": 0.5}]
    history += [{"step": i, "objective/rewards": float(i)} for i in range(1, 31)]
    history[-1]["eval/rewards"] = 0.25
    # Of 30 steps 3 at each end: (1 + 2 + 3) / 3 and (28 + 29 + 30) / 3.
    assert averaged_steps(30) == 3
    assert change_lines(history) == [
        "  reward           2.000 ->     29.000  (+27.000)",
        "  eval reward      0.500 ->      0.250  (-0.250)",
    ]


def test_changes_name_several_sources_what_evaluations_measure_and_the_chosen_metric():
    one = {"objective/rewards": 1.0, "objective/scores/a": 1.0, "objective/kl_sum_seq": 0.0, "ppo/x": 2.0}
    evaluated = {"eval/rewards": 1.0, "eval/scores": 1.0, "eval/scores/a": 1.0, "eval/f1": 0.5}
    history = [
        {"step": 0, **evaluated},
        {"step": 1, **one, "objective/scores/b": 0.5},
        {"step": 2, **one, "objective/scores/b": 0.25, **evaluated, "eval/f1": 0.75},
    ]
    shown = [
        "  reward           1.000 ->      1.000  (+0.000)",
        "  a                1.000 ->      1.000",
        "  b                0.500 ->      0.250",
        "  KL               0.000 ->      0.000",
        "  eval reward      1.000 ->      1.000  (+0.000)",
        "  eval f1          0.500 ->      0.750",
    ]
    assert change_lines(history) == change_lines(history, metric="eval/f1") == shown
    for metric, title in (("eval/scores", "eval scores"), ("ppo/x", "ppo x")):
        *others, last = change_lines(history, metric=metric)
        assert others == shown and last.startswith(f"  {title} ")
    # A single source is the reward.
    history = [{"step": 1, "objective/rewards": 1.0, "objective/scores/a": 1.0}]
    assert change_lines(history) == ["  reward      1.000 ->      1.000  (+0.000)"]


def test_changes_of_a_run_without_finite_numbers_are_none():
    # A single evaluation says nothing of a change.
    for history in ([], [{"step": 1, "objective/rewards": None}], [{"step": 0, "eval/rewards": 1.0}]):
        assert change_lines(history) == []
    assert [averaged_steps(n) for n in (1, 19, 20, 1000)] == [1, 1, 2, 10]
