"""Critic pretraining in a run: what stands still, what is learned, which passes are made, and that it resumes."""

import json

import pytest
import torch

from alpaca_ppo.distributed.preemption import Interrupted
from tests.tiny_runs import metric_lines, tiny_trainer, weights


def words(prompts, completions, **columns):
    """Four points for each word of the prompt, which a critic soon finds out."""
    return [4.0 * len(prompt.split()) for prompt in prompts]


RUN = {
    "rollout_batch_size": 4,
    "total_episodes": 20,
    "step_batch_size": 2,
    "critic_pretraining_steps": 4,
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
BOUND = 0.04
"""Reached in the third step, with 0.09; the values of a new critic, all 0, explain nothing."""


def recording(trainer):
    """Appends the global rollouts of each step to the returned list."""
    taken, step = [], trainer.step_with_rollouts
    trainer.step_with_rollouts = lambda rollouts: taken.append(dict(rollouts)) or step(rollouts)
    return taken


def policy_passes(trainer):
    """Appends the step of each forward pass of the policy's head, other than the sampler's, to the returned list."""
    policy, steps = trainer.actor_critic.policy, []
    outputs = policy.outputs_from_states
    policy.outputs_from_states = lambda *inputs, **how: (
        steps.append(trainer.state.global_step) or outputs(*inputs, **how)
    )
    return steps


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory):
    """A run whose pretraining ends before its fourth step: its folder, metrics, weights, rollouts and passes."""
    folder = tmp_path_factory.mktemp("early")
    trainer = tiny_trainer(folder, critic_pretraining_explained_variance=BOUND, **RUN)
    start, taken, passes = weights(trainer), recording(trainer), policy_passes(trainer)
    at_end, end_step = [], trainer._end_step
    trainer._end_step = lambda stats: at_end.append(weights(trainer)) or end_step(stats)
    trainer.train()
    return folder, metric_lines(folder), [start, *at_end], taken, passes


def pretrained_steps(lines):
    """The steps up to the first whose values explained enough, from the metric alone."""
    return next(step for step, line in enumerate(lines, 1) if line["ppo/val/explained_variance"] >= BOUND)


def test_the_policy_stands_still_until_the_critic_explains_enough(ended_early):
    _, lines, at_end, _, _ = ended_early
    steps = pretrained_steps(lines)
    assert steps == 3
    for step, (before, after) in enumerate(zip(at_end, at_end[1:], strict=False)):
        moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == ({"critic"} if step < steps else {"critic", "policy"}), step


def test_the_critic_learns_discounted_sums_of_the_shaped_rewards(ended_early):
    _, lines, _, taken, _ = ended_early
    for step, rollouts in enumerate(taken):
        of_sums, largest = 0.0, 0.0
        for row, mask in enumerate(rollouts["response_mask"].tolist()):
            chosen = [t for t, counts in enumerate(mask) if counts]
            rewards = [float(rollouts["shaped_rewards"][row, t]) for t in chosen]
            for i, t in enumerate(chosen):
                expected = sum(0.9**k * reward for k, reward in enumerate(rewards[i:]))
                of_sums = max(of_sums, abs(float(rollouts["returns"][row, t]) - expected))
                largest = max(largest, abs(expected))
        # A lambda-return of 0.5 takes most of a value that is nothing like the return yet.
        assert (of_sums < 1e-5) == (step < pretrained_steps(lines)), step
        assert largest > 1


def test_no_pass_of_the_policy_is_made_for_nothing_and_the_kl_is_exactly_0(ended_early):
    _, lines, _, taken, passes = ended_early
    steps = pretrained_steps(lines)
    # One pass, of which the first step finds that the reference's has the same numbers.
    assert [passes.count(step) > 0 for step in range(5)] == [True, *[False] * (steps - 1), *[True] * (5 - steps)]
    assert [line["objective/kl_sum_seq"] == 0 for line in lines] == [True] * (steps + 1) + [False] * (4 - steps)
    assert all(rollouts["recomputed"].all() for rollouts in taken[: steps + 1])
    assert all(0 < line["mismatch/logprob_abs_mean"] < 1e-5 for line in lines)


def test_the_controller_and_the_schedule_of_the_policy_begin_afterwards(ended_early):
    _, lines, _, _, _ = ended_early
    steps = pretrained_steps(lines)
    coefs = [line["objective/kl_coef"] for line in lines]
    # A step of KL 0 is below the target: the coefficient falls by k_beta * 0.2 = 2 %.
    assert coefs[: steps + 2] == [0.05] * (steps + 1) + [pytest.approx(0.05 * 0.98)]
    # Linear from 0.001 over the two optimizer steps of each of the steps that are left; the metric is the last one's.
    left = 2 * (5 - steps)
    rates = [line["objective/lr"] for line in lines[steps:]]
    assert rates == [pytest.approx(1e-3 * (1 - (2 * i + 1) / left)) for i in range(5 - steps)]


def test_a_run_resumed_anywhere_is_the_run_that_was_not_interrupted(ended_early, tmp_path):
    folder, lines, at_end, _, _ = ended_early
    steps = pretrained_steps(lines)
    for number in (4, 3, 2, 1):
        resumed = tiny_trainer(tmp_path / str(number), critic_pretraining_explained_variance=BOUND, **RUN)
        passes = policy_passes(resumed)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{number}"))
        assert metric_lines(tmp_path / str(number)) == lines[number:]
        assert all(torch.equal(at_end[-1][name], value) for name, value in weights(resumed).items())
        assert not [step for step in passes if step < steps]


@pytest.mark.parametrize("ends", [False, True])
def test_an_update_that_is_interrupted_in_pretraining_goes_on(ends, ended_early, tmp_path):
    """In the middle of the first update, or of the one after which pretraining ends."""
    _, lines, at_end, _, _ = ended_early
    settings = {**RUN, "save_steps": 0, "critic_pretraining_explained_variance": BOUND}
    trainer, taken = tiny_trainer(tmp_path, **settings), []
    plain = trainer.updater.step

    def interrupt(*inputs, **how):
        if len(taken) == (2 * pretrained_steps(lines) - 1 if ends else 1):
            raise Interrupted(15)
        taken.append(1)
        return plain(*inputs, **how)

    trainer.updater.step = interrupt
    with pytest.raises(Interrupted):
        trainer.train()
    resumed = tiny_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert metric_lines(tmp_path) == lines
    assert all(torch.equal(at_end[-1][name], value) for name, value in weights(resumed).items())


def test_a_run_can_be_all_pretraining(tmp_path, capsys):
    settings = {**RUN, "save_steps": 0, "total_episodes": 8, "critic_pretraining_explained_variance": 1.0}
    trainer = tiny_trainer(tmp_path, old_policy="rollout", **settings)
    before = weights(trainer)
    trainer.train()
    moved = {name.split(".")[0] for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved == {"critic"} and json.loads((tmp_path / "final" / "value" / "config.json").read_text())
    # Four steps were allowed; the run has two.
    assert "critic_pretraining" not in capsys.readouterr().out
