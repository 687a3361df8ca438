"""What `alpaca-ppo evaluate` prints, and the names by which options of evaluation mean a score."""

import json
import math
from types import SimpleNamespace

import pytest

from alpaca_ppo.evaluation.results import results_text, write_results
from alpaca_ppo.evaluation.settings import make_settings

ARGS = {
    "eval_success_by": "scores",
    "eval_judge": "scores",
    "eval_num_samples": 1,
    "eval_success_above": 0.5,
    "eval_opponent": None,
}


def test_a_source_is_meant_by_its_bare_name_and_a_metric_of_that_name_comes_first():
    given = SimpleNamespace(**ARGS | {"eval_success_by": "short", "eval_judge": "gold"})
    settings = make_settings(given, sources=["short", "gold"], metrics=["exact"])
    assert settings.success_by == "scores/short"
    assert settings.judged_by == "scores/gold"
    of_metric = make_settings(
        SimpleNamespace(**ARGS | {"eval_success_by": "short"}), sources=["short"], metrics=["short"]
    )
    assert of_metric.success_by == "short" and of_metric.judged_by == "scores"
    by_function = SimpleNamespace(**ARGS | {"eval_judge": "tests.trainer.test_evaluation:longer"})
    assert make_settings(by_function, sources=["gold"], metrics=[]).judged_by is None
    with pytest.raises(ValueError, match="eval_success_by is 'golden'; choose one of scores, rewards, scores/gold$"):
        make_settings(SimpleNamespace(**ARGS | {"eval_success_by": "golden"}), sources=["gold"], metrics=[])
    # The reward with its penalties judges no pair.
    with pytest.raises(ValueError, match="eval_judge is 'rewards'; use scores, scores/gold, module:function"):
        make_settings(SimpleNamespace(**ARGS | {"eval_judge": "rewards"}), sources=["gold"], metrics=[])


@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_pass_at_k_is_computed_for_powers_of_two_and_all_samples(n, ks):
    assert make_settings(SimpleNamespace(**ARGS | {"eval_num_samples": n}), sources=[], metrics=[]).ks == ks


def test_the_text_says_what_was_drawn_and_each_metric_with_its_error():
    results = {
        "model": "outputs/ppo",
        "prompts": {"": 64},
        "samples_per_prompt": 4,
        "temperature": 0.7,
        "success": "scores/short above 0.5",
        "metrics": {
            "eval/rewards": 0.25,
            "eval/rewards_se": 0.0312,
            "eval/scores": 0.25,
            "eval/scores_se": 0.0312,
            "eval/scores/short": 0.25,
            "eval/scores/short_se": 0.02,
            "eval/avg_at_4": 0.5,
            "eval/avg_at_4_se": 0.1,
            "eval/pass_at_1": 0.5,
            "eval/pass_at_1_se": 0.1,
            "eval/right": 0.5,
            "eval/right_se": 0.1,
            "eval/truncated_fraction": 0.5,
        },
    }
    assert results_text(results).splitlines() == [
        "outputs/ppo: 64 prompts, 4 answers to each, sampled at temperature 0.7",
        "a success is an answer with scores/short above 0.5",
        "avg_at_4                   0.5  ±0.1",
        "pass_at_1                  0.5  ±0.1",
        "rewards                   0.25  ±0.031",
        "right                      0.5  ±0.1",
        "scores                    0.25  ±0.031",
        "scores/short              0.25  ±0.02",
        "truncated_fraction         0.5",
    ]
    two = {**results, "prompts": {"a": 3, "b": 2}, "samples_per_prompt": 1, "temperature": 0.0, "success": None}
    two["metrics"] = {"eval/a/scores": 1.0, "eval/b/scores": 1.0}
    assert results_text(two).splitlines() == [
        "outputs/ppo: 3 prompts of a, 2 prompts of b, 1 answer to each, greedy (the likeliest tokens)",
        "a/scores           1",
        "b/scores           1",
    ]


def test_a_metric_may_be_named_like_a_standard_error():
    results = {"model": "m", "prompts": {"": 4}, "samples_per_prompt": 1, "temperature": 0.0, "success": None}
    results["metrics"] = {"eval/noise_se": 0.5, "eval/noise_se_se": 0.1, "eval/scores": 1.0, "eval/scores_se": 0.2}
    assert results_text(results).splitlines()[1:] == ["noise_se         0.5  ±0.1", "scores             1  ±0.2"]


def test_numbers_that_are_not_finite_are_null_in_both_files(tmp_path):
    answers = [{"prompt": "p", "response": "r", "scores": 0.5, "exact": math.nan, "correct": True, "win": None}]
    write_results(tmp_path, {"model": "m", "metrics": {"eval/scores": 0.5, "eval/scores_se": math.nan}}, answers)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written == {"model": "m", "metrics": {"eval/scores": 0.5, "eval/scores_se": None}}
    line = '{"prompt": "p", "response": "r", "scores": 0.5, "exact": null, "correct": true, "win": null}\n'
    assert (tmp_path / "answers.jsonl").read_text() == line
