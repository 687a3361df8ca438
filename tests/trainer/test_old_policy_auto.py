"""`old_policy: auto`: which steps spare the policy's pass, that it changes nothing but rounding, and the way back.

A run with a reference compares from step 2 on, once the policy has moved. Two comparisons agree, so step 4 is the first
that takes the sampler's log-probs.
"""

import itertools

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo import PPOTrainer
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.ppo.mismatch import SamplerMismatch
from tests.tiny_runs import metric_lines, tiny_trainer, weights

RUN = {"mismatch_check_steps": 5, "rollout_batch_size": 4, "total_episodes": 28, "step_batch_size": 2}
"""Seven steps of two optimizer steps."""
SPARED_FROM_4 = [1, 1, 1, 0, 1, 0, 0]
AGREED = {"agreed_at": [0, 1], "disagreed_at": None}


def shifted(difference, passes):
    """A trainer class whose sampler overstates its log-probs by `difference` nats, after `passes` correct rollouts."""

    class Shifted(PPOTrainer):
        rollouts = itertools.count()

        def _generate(self, prompts, sampling_params):
            samples = super()._generate(prompts, sampling_params)
            if next(self.rollouts) >= passes:
                samples["rollout_logprobs"] += difference * samples["response_mask"]
            return samples

    return Shifted


def recomputed(folder):
    """Of each step, whether the trainer computed the old log-probs."""
    return [line["mismatch/recomputed"] for line in metric_lines(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Metrics and weights of a run that is never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = tiny_trainer(folder, **RUN)
    trainer.train()
    return metric_lines(folder), weights(trainer)


def test_the_policys_pass_is_spared_once_two_comparisons_have_agreed_and_each_nth_step_compares_again(whole):
    lines, _ = whole
    assert [line["mismatch/recomputed"] for line in lines] == SPARED_FROM_4
    # The mismatch is measured in every step, in those without the pass by the update, and is rounding.
    assert all(0 < line["mismatch/logprob_abs_mean"] < 1e-5 for line in lines)
    assert all(line["ppo/policy/first_ratio_error_max"] < 1e-4 for line in lines)


def test_the_weights_are_those_of_recomputed_log_probs_up_to_rounding(whole, tmp_path):
    # A larger epsilon: with AdamW's own, the sign of a gradient that is all rounding moves a weight by a whole step.
    runs = {}
    for mode in ("auto", "recompute"):
        trainer = tiny_trainer(tmp_path / mode, old_policy=mode, adam_epsilon=1e-3, **RUN)
        trainer.train()
        runs[mode] = weights(trainer)
    start = weights(tiny_trainer(tmp_path / "start", **RUN))
    moved = max(float((value - start[name]).abs().max()) for name, value in runs["recompute"].items())
    apart = max(float((value - runs["auto"][name]).abs().max()) for name, value in runs["recompute"].items())
    assert moved > 1e-3 and 0 < apart < 1e-3 * moved


def test_without_a_reference_the_first_two_steps_compare(tmp_path, capsys):
    tiny_trainer(tmp_path, reference="none", use_kl_in_reward=False, **{**RUN, "total_episodes": 16}).train()
    assert recomputed(tmp_path) == [1, 1, 0, 0]
    said = [line for line in capsys.readouterr().out.splitlines() if "old_policy: auto" in line]
    assert len(said) == 1 and said[0].startswith("step 2: sampler and trainer agree") and "every 5th step" in said[0]


def test_a_spared_step_learns_from_the_samplers_log_probs(tmp_path):
    trainer = tiny_trainer(tmp_path, **RUN)
    trainer.old_policy.load_state_dict(AGREED)
    trainer.state.global_step = 2
    batch = trainer.rollout(trainer.prompt_batches(2))
    assert torch.equal(batch["logprobs"], batch["rollout_logprobs"])
    assert "recomputed" not in batch and "entropies" not in batch and "values" in batch
    trainer.state.global_step = 1
    again = trainer.rollout(trainer.prompt_batches(1))
    assert again["recomputed"].all() and not torch.equal(again["logprobs"], again["rollout_logprobs"])


def test_first_ratio_and_mismatch_of_a_spared_step_are_those_of_the_sampler(tmp_path):
    tiny_trainer(tmp_path, trainer_class=shifted(5e-4, passes=3), **RUN).train()
    lines = metric_lines(tmp_path)
    assert recomputed(tmp_path)[3] == 0
    # Every token of step 4 is off by 0.0005: 1 - exp(-0.0005) = 0.000499875.
    assert lines[3]["mismatch/logprob_abs_mean"] == pytest.approx(5e-4, abs=5e-6)
    assert lines[3]["ppo/policy/first_ratio_error_max"] == pytest.approx(4.99875e-4, abs=5e-6)
    assert lines[2]["mismatch/logprob_abs_mean"] < 1e-5


@pytest.mark.filterwarnings("ignore:sampler and trainer disagree", "ignore:before any update")
@pytest.mark.parametrize(("passes", "step"), [(3, 4), (4, 5)])
def test_after_a_disagreement_the_rest_of_the_run_recomputes(passes, step, tmp_path, capsys):
    """Found in the update of a spared step, or in a step that compares."""
    tiny_trainer(tmp_path, trainer_class=shifted(0.01, passes), **RUN).train()
    assert recomputed(tmp_path) == [1, 1, 1, 0, 1, 1, 1]
    said = [line for line in capsys.readouterr().out.splitlines() if "disagree" in line]
    assert len(said) == 1 and said[0].startswith(
        f"step {step}: sampler and trainer disagree, mismatch/logprob_abs_mean"
    )
    assert "is 0.01 (bound 0.001)" in said[0]


def test_a_sampler_that_disagrees_at_once_is_never_trusted_whatever_the_action(tmp_path):
    tiny_trainer(tmp_path, trainer_class=shifted(0.2, 0), mismatch_action="ignore", **RUN).train()
    assert recomputed(tmp_path) == [1] * 7


def test_a_spared_step_is_refused_before_it_moves_a_weight(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=shifted(0.2, 3), **RUN)
    with pytest.raises(SamplerMismatch, match=r"logprob_abs_mean is 0.2 \(bound 0.1\)"):
        trainer.train()
    assert len(metric_lines(tmp_path)) == 3 and trainer.updater.num_updates == 6
    # The checkpoint is from before the rollouts: with a mended sampler the run is the one that was never stopped.
    mended = tiny_trainer(tmp_path, **RUN)
    mended.train(resume_from_checkpoint=True)
    assert recomputed(tmp_path) == SPARED_FROM_4


@pytest.mark.parametrize(("step", "number"), [(1, 0), (2, 1), (3, 0), (3, 1)])
def test_a_run_interrupted_anywhere_is_the_run_that_was_not(step, number, whole, tmp_path):
    """Before optimizer step `number` of the update in `step`, both from 0."""
    trainer, taken = tiny_trainer(tmp_path, **RUN), 0

    def interrupt(*inputs, **how):
        nonlocal taken
        if (trainer.state.global_step, taken % 2) == (step, number):
            raise Interrupted(15)
        taken += 1
        return plain(*inputs, **how)

    plain, trainer.updater.step = trainer.updater.step, interrupt
    with pytest.raises(Interrupted):
        trainer.train()
    resumed = tiny_trainer(tmp_path, **RUN)
    resumed.train(resume_from_checkpoint=True)
    assert metric_lines(tmp_path) == whole[0]
    assert all(torch.equal(whole[1][name], value) for name, value in weights(resumed).items())


@pytest.mark.parametrize("estimator", ["grpo", "opo", "reinforce_plus_plus"])
def test_a_constant_reward_moves_no_weight(estimator, tmp_path):
    """The KL of a policy that is its reference is exactly 0 in a recomputed step, and rounding in a sampler's."""

    def constant(prompts, completions, **columns):
        return [0.0] * len(prompts)

    settings = {**RUN, "total_episodes": 8, "rollout_batch_size": 2, "num_return_sequences": 2}
    settings |= {"adv_estimator": estimator, "trainer_arguments": {"reward_funcs": constant}}
    moved = {}
    for mode in ("auto", "rollout"):
        trainer = tiny_trainer(tmp_path / mode, old_policy=mode, **settings)
        before = weights(trainer)
        trainer.train()
        moved[mode] = any(not torch.equal(before[name], value) for name, value in weights(trainer).items())
    assert recomputed(tmp_path / "auto") == [1] * 4
    assert moved == {"auto": False, "rollout": True}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [5, 6, 7, 8]),
        ({"critic_warmup_steps": 6}, [6, 7, 8]),
        ({"critic_layout": "shared"}, []),
        ({"old_policy": "recompute"}, []),
        ({"old_policy": "correct"}, []),
        ({"old_policy": "rollout"}, list(range(9))),
    ],
)
def test_which_steps_spare_the_pass_after_two_comparisons_have_agreed(settings, steps, tmp_path):
    trainer = tiny_trainer(tmp_path, mismatch_check_steps=5, **settings)
    trainer.old_policy.load_state_dict({"agreed_at": [1, 4], "disagreed_at": None})
    assert [step for step in range(9) if not trainer.old_policy.recomputes(step)] == steps


def test_a_policy_with_weights_in_half_precision_recomputes(tmp_path):
    arguments = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    for dtype in (torch.float32, torch.bfloat16):
        trainer = tiny_trainer(tmp_path, dtype=dtype, trainer_arguments=arguments)
        trainer.old_policy.load_state_dict(AGREED)
        assert trainer.old_policy.recomputes(2) == (dtype == torch.bfloat16)


def test_what_a_step_itself_has_recorded_does_not_change_how_it_is_repeated(tmp_path):
    source = tiny_trainer(tmp_path, mismatch_check_steps=5).old_policy
    source.load_state_dict({"agreed_at": [1, 2], "disagreed_at": 3})
    assert [source.recomputes(step) for step in (1, 2, 3, 4, 5)] == [True, True, False, True, True]
