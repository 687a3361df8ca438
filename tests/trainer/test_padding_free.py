"""Training without padding is training with it, in every layout of policy, critic and reference."""

import inspect

import pytest
import torch
from transformers import LlamaForCausalLM

from alpaca_ppo.functional.packing import PackedRows
from alpaca_ppo.models import ActorCritic, Policy
from alpaca_ppo.models.policy import PolicyOutputs
from alpaca_ppo.models.trial import packing_problem
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, tiny_trainer


class OwnStates(Policy):
    def states(self, packed: PackedRows) -> torch.Tensor:
        assert packed.spans is None
        return super().states(packed)


def test_a_policy_with_states_of_its_own_gets_padded_rows(tmp_path):
    model = ActorCritic(OwnStates(tiny_causal_lm("llama")), None)
    trainer = tiny_trainer(tmp_path, model=model, adv_estimator="rloo", num_return_sequences=2, total_episodes=10)
    trainer.train()
    assert not trainer.actor_critic.padding_free
    assert trainer.start.padding == "policy, reference: OwnStates reads padded rows"


class LouderLlama(LlamaForCausalLM):
    """Its logits are 1.5 times what the head computes, as no field of its configuration says."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)


class LouderPolicy(Policy):
    def outputs_from_states(
        self, states, packed, responses, *, temperature, chunk_size, with_entropies
    ) -> PolicyOutputs:
        return super().outputs_from_states(
            states,
            packed,
            responses,
            temperature=temperature / 1.5,
            chunk_size=chunk_size,
            with_entropies=with_entropies,
        )


def test_a_policy_with_outputs_of_its_own_trains_a_model_that_is_refused_otherwise(tmp_path):
    model = LouderLlama(tiny_causal_lm("llama").config)
    with pytest.raises(ValueError, match="LouderLlama's logits are not its head's"):
        Policy(model)
    settings = {"adv_estimator": "rloo", "num_return_sequences": 2, "total_episodes": 20, "old_policy": "recompute"}
    tiny_trainer(tmp_path, model=ActorCritic(LouderPolicy(model), None), **settings).train()
    first, second = metric_lines(tmp_path)
    # The reference is a copy of the policy, and the sampler runs the model itself.
    assert first["objective/kl_sum_seq"] == 0 and second["objective/kl_sum_seq"] != 0
    assert first["mismatch/logprob_abs_mean"] < 1e-5


def test_a_model_that_needs_padding_is_refused_where_there_must_be_none(tmp_path):
    with pytest.raises(ValueError, match=r"padding_free is true, but BloomForCausalLM .* set it to auto"):
        tiny_trainer(tmp_path, model=tiny_causal_lm("bloom"), padding_free=True)


def test_the_line_about_batches_says_why_rows_have_padding_where_they_need_not(tmp_path, capsys):
    said = []
    for number, (arch, choice) in enumerate((("bloom", "auto"), ("bloom", False), ("llama", "auto"))):
        model = tiny_causal_lm(arch)
        trainer = tiny_trainer(tmp_path / str(number), model=model, padding_free=choice, critic_layout="shared")
        trainer._begin(None)
        assert trainer.actor_critic.padding_free is (arch == "llama")
        said.append(capsys.readouterr().out.splitlines()[1].partition(" tokens on each of 1 processes")[2])
    reason = packing_problem(tiny_causal_lm("bloom"))
    generated = ", sampled by model.generate"
    assert reason and said == [f", with padding: policy, reference: {reason}{generated}", f"{generated}: {reason}", ""]
    trainer = tiny_trainer(tmp_path / "other", trainer_arguments={"ref_model": tiny_causal_lm("bloom")})
    trainer._begin(None)
    assert capsys.readouterr().out.splitlines()[1].endswith(f" 1 processes, with padding: reference: {reason}")
