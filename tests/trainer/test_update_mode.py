"""An update computes what the sampler computed: it draws no noise, whatever a model does in train mode."""

from collections import Counter

import pytest
import torch
from peft import LoraConfig
from torch import nn

from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_trainer, weights, with_advantages

NOISY = {
    "a router's jitter": ("mixtral", {"router_jitter_noise": 0.5}, None),
    "sampled experts": ("phimoe", {"input_jitter_noise": 0.5}, None),
    "an adapter's dropout": ("llama", {}, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("noise", NOISY)
def test_the_first_ratios_are_1_and_the_first_kl_is_0(tmp_path, noise, checkpointing):
    arch, overrides, adapter = NOISY[noise]
    arguments = {} if adapter is None else {"peft_config": adapter}
    settings = {"old_policy": "recompute", "gradient_checkpointing": checkpointing, "padding_free": False}
    model = tiny_causal_lm(arch, **overrides)
    trainer = tiny_trainer(tmp_path, model=model, trainer_arguments=arguments, **settings)
    trainer.check_sampler()
    stats = trainer.step(trainer.prompt_batches(0))
    assert stats["ppo/policy/first_ratio_error_max"] < 1e-4
    assert abs(stats["objective/kl_sum_seq"]) < 1e-4
    assert stats["mismatch/logprob_abs_mean"] < 1e-5


def test_activations_are_still_checkpointed(tmp_path):
    """Each backward pass runs the inner modules of a layer once more."""
    calls = {}
    for checkpointing in (False, True):
        trainer = tiny_trainer(tmp_path, gradient_checkpointing=checkpointing)
        rollouts = with_advantages(trainer, trainer.prompt_batches(0))
        counter = Counter()
        trainer.actor_critic.policy.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, counter=counter: counter.update(["pass"])
        )
        trainer.step_with_rollouts(rollouts)
        calls[checkpointing] = counter["pass"]
    assert calls[True] == 2 * calls[False] > 0


class Noise(nn.Module):
    """Adds noise in every mode."""

    def forward(self, states):
        return states + 0.1 * torch.randn_like(states)


def test_a_model_that_is_random_in_every_mode_is_refused_by_name(tmp_path):
    model = tiny_causal_lm("llama")
    model.model.norm = nn.Sequential(model.model.norm, Noise())
    with pytest.raises(ValueError, match="LlamaForCausalLM draws random numbers also in eval mode"):
        tiny_trainer(tmp_path, model=model)


class Experts(nn.Module):
    """Has a path for inference without gradients, as families whose code comes with the model have."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, states):
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return self.mlp(states)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_that_eval_mode_gives_no_gradient_are_trained(tmp_path, checkpointing):
    model = tiny_causal_lm("llama")
    for layer in model.model.layers:
        layer.mlp = Experts(layer.mlp)
    trainer = tiny_trainer(tmp_path, model=model, gradient_checkpointing=checkpointing)
    before = weights(trainer)
    trainer.step(trainer.prompt_batches(0))
    after = weights(trainer)
    assert [name for name in before if "mlp" in name and torch.equal(before[name], after[name])] == []


def test_a_layer_that_is_random_where_it_checkpoints_activations_is_refused_by_name(tmp_path):
    model = tiny_causal_lm("llama")

    class NoisyLayer(type(model.model.layers[0])):
        def forward(self, *args, **kwargs):
            states = super().forward(*args, **kwargs)
            return states + 0.1 * torch.randn_like(states) if self.training else states

    for layer in model.model.layers:
        layer.__class__ = NoisyLayer
    tiny_trainer(tmp_path / "plain", model=model)
    with pytest.raises(ValueError, match="NoisyLayer of LlamaForCausalLM .*gradient_checkpointing: false"):
        tiny_trainer(tmp_path / "checkpointed", model=model, gradient_checkpointing=True)
