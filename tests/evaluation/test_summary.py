"""The metrics of an evaluation, on a policy whose every response and its probability is known."""

import math
from itertools import product

import pytest

from alpaca_ppo.evaluation.settings import EvaluationSettings
from alpaca_ppo.evaluation.summary import ResponseRecord, summarize
from tests.enumerable import enumerable_policy, every_response, probabilities

NAMES = ("scores", "rewards", "gold")


def record(score, *, gold=0.0, prompt=0, **more):
    values = {"scores": score, "rewards": score, "gold": gold}
    return ResponseRecord(prompt, values, **more)


def test_the_expectations_on_an_enumerable_policy_are_exact():
    """27 responses of three tokens. Over all 27^2 pairs of samples, weighted by their probabilities, pass@2 and avg@2
    have the expectations that follow from the 27 probabilities.
    """
    problem = every_response(stops=False)
    chances = probabilities(enumerable_policy(0), problem).tolist()
    assert math.fsum(chances) == pytest.approx(1.0)
    scores = problem.rewards.tolist()
    settings = EvaluationSettings(NAMES, num_samples=2, ks=(1, 2), success_above=0.0, success_by="gold")
    expected = dict.fromkeys(("pass_at_1", "pass_at_2", "avg_at_2"), 0.0)
    for i, j in product(range(27), repeat=2):
        records = [record(0.0, gold=scores[r]) for r in (i, j)]
        stats = summarize(records, settings)
        for name in expected:
            expected[name] += chances[i] * chances[j] * stats[name]
    solved = math.fsum(p for p, score in zip(chances, scores, strict=True) if score > 0)
    assert expected["pass_at_1"] == pytest.approx(solved)
    assert expected["avg_at_2"] == pytest.approx(solved)
    assert expected["pass_at_2"] == pytest.approx(1 - (1 - solved) ** 2)


def test_standard_errors_are_over_prompts():
    settings = EvaluationSettings(NAMES, num_samples=2, ks=(1, 2), success_above=0.5)
    records = [record(s, prompt=i) for i, pair in enumerate([(1, 1), (1, 0), (0, 0)]) for s in map(float, pair)]
    stats = summarize(records, settings)
    # Means of prompts 1, 1/2, 0: variance 1/4; pass@2: 1, 1, 0: variance 1/3.
    assert stats["pass_at_1"] == stats["avg_at_2"] == stats["scores"] == 0.5
    assert stats["pass_at_1_se"] == stats["avg_at_2_se"] == pytest.approx(math.sqrt(1 / 4 / 3))
    assert (stats["pass_at_2"], stats["pass_at_2_se"]) == pytest.approx((2 / 3, math.sqrt(1 / 3 / 3)))


def test_dropped_and_unscored_responses_are_in_no_figure_but_a_count():
    settings = EvaluationSettings(NAMES, num_samples=2, ks=(1, 2), success_above=0.5, success_by="gold")
    # Of prompt 1 one response was dropped; of prompt 0 the function scored both, of prompt 2 none.
    records = [record(1.0, gold=1.0), record(2.0, gold=0.0), record(3.0, gold=1.0, prompt=1)]
    records += [record(0.0, gold=math.nan, prompt=2)]
    stats = summarize(records, settings)
    assert stats["gold"] == pytest.approx(2 / 3)
    assert stats["pass_at_1"] == pytest.approx((0.5 + 1) / 2)
    assert stats["pass_at_2"] == 1.0
    assert stats["gold_missing"] == 1.0 and "scores_missing" not in stats
    empty = summarize([], settings)
    assert empty.keys() == stats.keys() - {"gold_missing"}
    assert all(math.isnan(value) for value in empty.values())


def test_wins_are_counted_over_what_was_judged():
    settings = EvaluationSettings(NAMES, num_samples=2, compares=True)
    records = [record(0.0, win=1.0), record(0.0, win=None, length_difference=99.0), record(0.0, prompt=1, win=0.5)]
    stats = summarize(records, settings)
    # Residuals 1/4 and -1/4, two prompts: sqrt(2 * 2/16) / 2.
    assert (stats["win_rate"], stats["win_rate_se"]) == pytest.approx((0.75, 0.25))
    assert (stats["unjudged"], stats["length_difference"]) == (1.0, 0.0)
