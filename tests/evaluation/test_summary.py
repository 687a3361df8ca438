"""The metrics of an evaluation, on a policy whose every response and its probability is known."""

import math
from itertools import product

import pytest

from alpaca_ppo.evaluation.settings import EvaluationSettings
from alpaca_ppo.evaluation.summary import ResponseRecord, summarize
from tests.enumerable import enumerable_policy, every_response, probabilities

NAMES = ("scores", "rewards", "gold")


def record(score, *, gold=0.0, prompt=0, answer=None, **more):
    values = {"scores": score, "rewards": score, "gold": gold}
    return ResponseRecord(prompt, values, answer=answer, **more)


def test_the_expectations_on_an_enumerable_policy_are_exact():
    """27 responses of three tokens. Over all 27^2 pairs of samples, weighted by their probabilities, pass@2, avg@2,
    maj@2 and best-of-2 have the expectations that follow from the 27 probabilities.
    """
    problem = every_response(stops=False)
    chances = probabilities(enumerable_policy(0), problem).tolist()
    assert math.fsum(chances) == pytest.approx(1.0)
    scores = problem.rewards.tolist()
    # The reward model is a coarse view of the score, so that responses tie; the answer is the last token.
    proxies = [float(round(score)) for score in scores]
    answers = [str(row[-1]) for row in problem.responses.tolist()]
    settings = EvaluationSettings(
        NAMES, num_samples=2, ks=(1, 2), success_above=0.0, success_by="gold", best_of_by="scores", votes=True
    )
    expected = dict.fromkeys(("pass_at_1", "pass_at_2", "avg_at_2", "maj_at_2", "best_of_2/gold"), 0.0)
    for i, j in product(range(27), repeat=2):
        records = [record(proxies[r], gold=scores[r], answer=answers[r]) for r in (i, j)]
        stats = summarize(records, settings)
        for name in expected:
            expected[name] += chances[i] * chances[j] * stats[name]
    solved = math.fsum(p for p, score in zip(chances, scores, strict=True) if score > 0)
    assert expected["pass_at_1"] == pytest.approx(solved)
    assert expected["avg_at_2"] == pytest.approx(solved)
    assert expected["pass_at_2"] == pytest.approx(1 - (1 - solved) ** 2)
    # Two answers either agree, and are as correct as their mean, or tie, and share the vote: avg@2 again.
    assert expected["maj_at_2"] == pytest.approx(solved)
    best = 0.0
    for level in set(proxies):
        below = math.fsum(p for p, proxy in zip(chances, proxies, strict=True) if proxy < level)
        at = [(p, s) for p, proxy, s in zip(chances, proxies, scores, strict=True) if proxy == level]
        mass = math.fsum(p for p, _ in at)
        # The best of two is at this level with (below + mass)^2 - below^2, and then any response at it by its share.
        best += ((below + mass) ** 2 - below**2) * math.fsum(p * s for p, s in at) / mass
    assert expected["best_of_2/gold"] == pytest.approx(best)


def test_standard_errors_are_over_prompts():
    settings = EvaluationSettings(NAMES, num_samples=2, ks=(1, 2), success_above=0.5)
    records = [record(s, prompt=i) for i, pair in enumerate([(1, 1), (1, 0), (0, 0)]) for s in map(float, pair)]
    stats = summarize(records, settings)
    # Means of prompts 1, 1/2, 0: variance 1/4; pass@2: 1, 1, 0: variance 1/3.
    assert stats["pass_at_1"] == stats["avg_at_2"] == stats["scores"] == 0.5
    assert stats["pass_at_1_se"] == stats["avg_at_2_se"] == pytest.approx(math.sqrt(1 / 4 / 3))
    assert (stats["pass_at_2"], stats["pass_at_2_se"]) == pytest.approx((2 / 3, math.sqrt(1 / 3 / 3)))


def test_dropped_and_unscored_responses_are_in_no_figure():
    settings = EvaluationSettings(NAMES, num_samples=2, ks=(1, 2), success_above=0.5, success_by="gold", votes=True)
    # Of prompt 1 one response was dropped; of prompt 0 the function scored both, of prompt 2 none.
    records = [record(1.0, gold=1.0, answer="x"), record(2.0, gold=0.0), record(3.0, gold=1.0, prompt=1)]
    records += [record(0.0, gold=math.nan, prompt=2, answer="y")]
    stats = summarize(records, settings)
    assert stats["gold"] == pytest.approx(2 / 3)
    assert stats["pass_at_1"] == pytest.approx((0.5 + 1) / 2)
    assert stats["pass_at_2"] == 1.0
    # "x" is correct; the response of prompt 1 has no answer.
    assert stats["maj_at_2"] == 0.5
    empty = summarize([], settings)
    assert empty.keys() == stats.keys()
    assert all(math.isnan(value) for value in empty.values())


def test_wins_are_counted_over_what_was_judged():
    settings = EvaluationSettings(NAMES, num_samples=2, compares=True)
    records = [record(0.0, win=1.0), record(0.0, win=None, length_difference=99.0), record(0.0, prompt=1, win=0.5)]
    stats = summarize(records, settings)
    # Residuals 1/4 and -1/4, two prompts: sqrt(2 * 2/16) / 2.
    assert (stats["win_rate"], stats["win_rate_se"]) == pytest.approx((0.75, 0.25))
    assert stats["lc_win_rate"] == pytest.approx(0.75, abs=1e-3)
    assert (stats["unjudged"], stats["length_difference"]) == (1.0, 0.0)
