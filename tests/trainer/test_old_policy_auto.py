"""`old_policy: auto`: decided once, by the comparison before the first rollout, and kept."""

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo import PPOTrainer
from alpaca_ppo.generation import register_generation_backend
from alpaca_ppo.generation.built_in_backends import GenerateBackend
from alpaca_ppo.ppo.rollouts import RolloutCollector
from tests.registered import temporary_choices
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, tiny_trainer

RUN = {"rollout_batch_size": 4, "total_episodes": 16, "step_batch_size": 2}
"""Four steps of two optimizer steps."""


def recomputed(folder):
    """Of each step, whether the trainer computed the old log-probs."""
    return [line["mismatch/recomputed"] for line in metric_lines(folder)]


def said_by(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "old_policy: auto" in line]


def off_by(difference, monkeypatch):
    """Lets the package's sampler overstate its log-probs."""
    plain = RolloutCollector.sample

    def sample(*inputs, **how):
        samples = plain(*inputs, **how)
        samples["rollout_logprobs"] += difference * samples["response_mask"]
        return samples

    monkeypatch.setattr(RolloutCollector, "sample", sample)


def test_where_the_two_agree_all_steps_but_the_first_spare_the_policys_pass(tmp_path, capsys):
    tiny_trainer(tmp_path, **RUN).train()
    lines = metric_lines(tmp_path)
    assert recomputed(tmp_path) == [1, 0, 0, 0] and len(said_by(capsys)) == 1
    # The mismatch is measured in every step, in those without the pass by the update, and is rounding.
    assert all(0 < line["mismatch/logprob_abs_mean"] < 1e-5 for line in lines)
    assert all(line["ppo/policy/first_ratio_error_max"] < 1e-4 for line in lines)
    # The policy is its reference still.
    assert lines[0]["objective/kl_sum_seq"] == 0


@pytest.mark.parametrize("action", ["stop", "ignore"])
@pytest.mark.filterwarnings("ignore:sampler and trainer disagree")
def test_where_they_differ_by_more_than_rounding_every_step_recomputes(action, tmp_path, monkeypatch, capsys):
    off_by(0.01, monkeypatch)
    tiny_trainer(tmp_path, mismatch_action=action, **RUN).train()
    (said,) = said_by(capsys)
    assert recomputed(tmp_path) == [1] * 4 and "0.01 nats" in said


def test_a_resumed_run_keeps_the_decision_unless_what_it_depends_on_has_changed(tmp_path, monkeypatch, capsys):
    run = {**RUN, "save_steps": 1, "mismatch_action": "ignore"}
    tiny_trainer(tmp_path, **{**run, "total_episodes": 8}).train()
    said_by(capsys)
    off_by(0.01, monkeypatch)
    resumed = tiny_trainer(tmp_path, **run)
    resumed.train(resume_from_checkpoint=True)
    assert recomputed(tmp_path) == [1, 0, 0, 0] and not said_by(capsys)
    state = resumed.sampler_check.state_dict()
    for changed in range(len(state["conditions"])):
        conditions = ["other" if i == changed else each for i, each in enumerate(state["conditions"])]
        resumed.sampler_check.load_state_dict({**state, "conditions": conditions})
        assert resumed.sampler_check.compares and resumed.sampler_check.recomputes(1)
    resumed.sampler_check.load_state_dict(state)
    assert not resumed.sampler_check.compares and not resumed.sampler_check.recomputes(1)


def test_critic_pretraining_spares_the_pass_and_the_first_step_of_the_policy_does_not(tmp_path):
    tiny_trainer(tmp_path, critic_pretraining_steps=2, **RUN).train()
    assert recomputed(tmp_path) == [0, 0, 1, 0]


HALF = {
    "model": tiny_causal_lm("llama", dtype=torch.bfloat16),
    "critic_layout": "adapter",
    "trainer_arguments": {"peft_config": LoraConfig(r=4, target_modules="all-linear")},
}


class OwnSampler(PPOTrainer):
    def _generate(self, prompts, sampling_params):
        return super()._generate(prompts, sampling_params)


class Own(GenerateBackend):
    has_own_weights = True


@pytest.mark.parametrize(
    "settings",
    [{"critic_layout": "shared"}, HALF, {"trainer_class": OwnSampler}, {"generation_backend": "own"}],
    ids=["shared", "half", "hook", "backend"],
)
def test_every_step_recomputes_where_the_samplers_log_probs_spare_nothing_or_are_not_known(settings, tmp_path):
    with temporary_choices():
        register_generation_backend("own")(Own)
        tiny_trainer(tmp_path, **settings, **RUN).train()
    assert recomputed(tmp_path) == [1] * 4


def test_a_loop_of_ones_own_recomputes_until_it_has_checked_the_sampler(tmp_path):
    trainer = tiny_trainer(tmp_path, **RUN)
    assert [trainer.sampler_check.recomputes(step) for step in range(3)] == [True] * 3
    trainer.check_sampler()
    assert [trainer.sampler_check.recomputes(step) for step in range(3)] == [True, False, False]
