"""Critic pretraining in a run: what stands still, what is learned, which passes are made, and that it resumes."""

import json

import pytest
import torch

from tests.tiny_runs import metric_lines, tiny_trainer, weights


def words(prompts, completions, **columns):
    """Four points for each word of the prompt, which a critic soon finds out."""
    return [4.0 * len(prompt.split()) for prompt in prompts]


RUN = {
    "rollout_batch_size": 4,
    "total_episodes": 20,
    "step_batch_size": 2,
    "critic_pretraining_steps": 3,
    "critic_learning_rate": 1e-2,
    "cliprange_value": None,
    "lr_scheduler_type": "linear",
    "kl_controller": "proportional",
    "gamma": 0.9,
    "lam": 0.5,
    "save_steps": 1,
    # The check before the first rollout makes passes too.
    "mismatch_action": "ignore",
    "trainer_arguments": {"reward_funcs": words},
}
"""Five steps of two optimizer steps."""


def policy_passes(trainer):
    """Appends the step of each forward pass of the policy's head, other than the sampler's, to the returned list."""
    policy, steps = trainer.actor_critic.policy, []
    outputs = policy.outputs_from_states
    policy.outputs_from_states = lambda *inputs, **how: (
        steps.append(trainer.state.global_step) or outputs(*inputs, **how)
    )
    return steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with three steps of pretraining: its metrics, and its weights at the start and after each step."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = tiny_trainer(folder, **RUN)
    at_end, end_step = [weights(trainer)], trainer._end_step
    trainer._end_step = lambda stats: at_end.append(weights(trainer)) or end_step(stats)
    trainer.train()
    return metric_lines(folder), at_end


STEPS = 3


def test_the_policy_stands_still_until_the_critic_is_pretrained(whole):
    at_end = whole[1]
    for step, (before, after) in enumerate(zip(at_end, at_end[1:], strict=False)):
        moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == ({"critic"} if step < STEPS else {"critic", "policy"}), step


def test_no_pass_of_the_policy_is_made_for_nothing(tmp_path):
    trainer = tiny_trainer(tmp_path, **{**RUN, "mismatch_action": "stop", "save_steps": 0})
    trainer.check_sampler()
    passes = policy_passes(trainer)
    trainer.train()
    # Before the first rollout, which counts as step 0; from the first step that trains the policy on; and once at the
    # end, to measure the last update.
    assert {step for step in passes if passes.count(step) > 1} == {3, 4} and set(passes) - {0} == {3, 4, 5}


def test_the_controller_and_the_schedule_of_the_policy_begin_afterwards(whole):
    lines = whole[0]
    coefs = [line["objective/kl_coef"] for line in lines]
    # A step of KL 0 is below the target: the coefficient falls by 0.1 * 0.2 = 2 %.
    assert coefs[: STEPS + 2] == [0.05] * (STEPS + 1) + [pytest.approx(0.05 * 0.98)]
    # Linear from 0.001 over the two optimizer steps of each of the steps that are left; the metric is the last one's.
    left = 2 * (5 - STEPS)
    rates = [line["objective/lr"] for line in lines[STEPS:]]
    assert rates == [pytest.approx(1e-3 * (1 - (2 * i + 1) / left)) for i in range(5 - STEPS)]


def test_a_run_can_be_all_pretraining(tmp_path):
    settings = {**RUN, "save_steps": 0, "total_episodes": 8}
    trainer = tiny_trainer(tmp_path, old_policy="rollout", **settings)
    before = weights(trainer)
    trainer.train()
    moved = {name.split(".")[0] for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved == {"critic"} and json.loads((tmp_path / "final" / "value" / "config.json").read_text())
