"""`drop_unscored`: responses that no source scores are left out of a step."""

import math

import pytest

from alpaca_ppo.rewards import FailurePolicy, RewardError, build_reward
from tests.tiny_runs import count_even, metric_lines, tiny_trainer


def even_starts(prompts, completions, completion_ids):
    """Scores responses that begin with an even token."""
    scores = count_even(prompts, completions, completion_ids)
    return [score if ids[0] % 2 == 0 else None for score, ids in zip(scores, completion_ids, strict=True)]


def test_only_rows_without_any_score_are_dropped():
    def score(*functions):
        scorer = build_reward(list(functions), policy=FailurePolicy(drop_unscored=True))
        return scorer(["a"] * 3, ["A", "B", "C"], [[4, 2], [5, 2], [7, 2]], [{"prompt": "a"}] * 3)

    result = score(even_starts)
    assert result.rewards.tolist() == [2.0, 0.0, 0.0] and set(result.failures) == {1, 2}
    both = score(even_starts, lambda completions, **_: [None, 3.0, None])
    assert both.rewards.tolist() == [2.0, 3.0, 0.0] and set(both.failures) == {2}
    # What is no missing score still ends the run.
    for broken in (lambda completions, **_: [1.0, float("nan"), None], lambda completions, **_: 1 / 0):
        with pytest.raises(RewardError, match="not finite|raised ZeroDivisionError"):
            score(broken)


def test_without_the_option_the_error_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"'even_starts' returned None; .* \(drop_unscored: true leaves such resp"):
        tiny_trainer(tmp_path, trainer_arguments={"reward_funcs": even_starts}).train()


@pytest.mark.parametrize(
    "settings",
    [{}, {"adv_estimator": "grpo", "num_return_sequences": 3, "dynamic_sampling": True}],
    ids=["gae", "grpo"],
)
def test_a_step_learns_from_the_scored_responses_and_counts_the_others(tmp_path, settings):
    given = {"trainer_arguments": {"reward_funcs": even_starts}, "drop_unscored": True, **settings}
    whole = tiny_trainer(tmp_path / "whole", **settings)
    rollouts = whole.rollout(whole.prompt_batches(0))
    scored = rollouts["responses"][:, 0] % 2 == 0
    assert 0 < int(scored.sum()) < len(scored)
    trainer = tiny_trainer(tmp_path / "kept", **given)
    kept = trainer.rollout(trainer.prompt_batches(0))
    pairs = set(zip(rollouts["prompt_ids"][scored].tolist(), rollouts["sample_ids"][scored].tolist(), strict=True))
    found = set(zip(kept["prompt_ids"].tolist(), kept["sample_ids"].tolist(), strict=True))
    if settings:
        # A response without another one to compare it with is left out as well.
        alone = {p for p, _ in pairs if sum(prompt == p for prompt, _ in pairs) == 1}
        pairs = {(prompt, sample) for prompt, sample in pairs if prompt not in alone}
    assert found == pairs
    trainer.train()
    lines = metric_lines(tmp_path / "kept")
    assert all(line["objective/dropped_rows"] > 0 for line in lines) and len(lines) == 2
    assert all(math.isfinite(line["ppo/loss/total"]) for line in lines)
