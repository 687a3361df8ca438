"""Activations that transformers spells out, replaced by torch's: equal, one operator, and nothing else changes."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from alpaca_ppo.models import Policy, build_actor_critic
from alpaca_ppo.models.policy import use_torch_activations
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import tiny_trainer

REPLACED = ["gelu_new", "gelu_accurate", "gelu_python"]


class Operators(TorchDispatchMode):
    """Counts the operators that run in its block."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators_of(module, inputs):
    with Operators() as counted, torch.no_grad():
        module(inputs)
    return counted.count


@pytest.mark.parametrize("name", REPLACED)
def test_a_replacement_is_one_operator_and_equal_in_float64_with_its_gradient(name):
    layers = nn.Sequential(nn.Identity(), ACT2FN[name])
    inputs = torch.linspace(-12, 12, 4001, dtype=torch.float64, requires_grad=True)
    before = layers(inputs)
    (gradient,) = torch.autograd.grad(before.sum(), inputs)
    operators = operators_of(layers, inputs)
    use_torch_activations(layers)
    after = layers(inputs)
    assert float((after - before).detach().abs().max()) <= 2e-15
    assert float((torch.autograd.grad(after.sum(), inputs)[0] - gradient).abs().max()) <= 1e-14
    assert operators >= 5 and operators_of(layers, inputs) == 1


class Mine(type(ACT2FN["gelu_new"])):
    """A subclass of a replaced activation may compute something else."""


def test_other_activations_stay():
    others = [ACT2FN[name] for name in ("gelu", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "gelu_10", "silu")]
    layers = nn.Sequential(*others, Mine())
    kept = list(layers)
    use_torch_activations(layers)
    assert all(layer is before for layer, before in zip(layers, kept, strict=True))


def spelled_out(model):
    return [name for name, module in model.named_modules() if type(module) is type(ACT2FN["gelu_new"])]


def test_a_model_in_memory_stays_usable_and_what_is_saved_is_the_same(tmp_path):
    model = tiny_causal_lm("gpt2", dtype=torch.float64)
    plain = copy.deepcopy(model)
    ids = torch.arange(6).unsqueeze(0)
    policy = Policy(model)
    assert spelled_out(plain) and not spelled_out(policy)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-14)
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert spelled_out(again) == spelled_out(plain) and again.config.activation_function == "gelu_new"


def test_policy_critic_reference_and_reward_model_are_replaced(tmp_path):
    reward = tiny_sequence_classifier("gpt2")
    arguments = {"reward_funcs": reward, "reward_processing_classes": tiny_tokenizer()}
    assert spelled_out(reward)
    trainer = tiny_trainer(
        tmp_path, model=tiny_causal_lm("gpt2"), trainer_arguments=arguments, init_value_with_reward=True
    )
    models = [trainer.actor_critic, trainer.collector.reference.policy, trainer.collector.scorer.sources[0].model]
    assert models[2] is reward and not any(spelled_out(model) for model in models)
    built = build_actor_critic(
        tiny_causal_lm("gpt2"), critic_layout="separate", value_model=tiny_sequence_classifier("gpt2")
    )
    assert not spelled_out(built)
