"""An update computes what the sampler computed: it draws no noise, whatever a model does in train mode."""

import random
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


def with_layers(forward):
    """A model whose layers compute `forward(layer, states, out)` of a llama's layer, and have a buffer `bias` of 0."""
    model = tiny_causal_lm("llama")

    class NoisyLayer(type(model.model.layers[0])):
        def forward(self, states, *args, **kwargs):
            return forward(self, states, super().forward(states, *args, **kwargs))

    for layer in model.model.layers:
        layer.__class__ = NoisyLayer
        layer.register_buffer("bias", torch.zeros(()))
    return model


def noise(layer, states, out):
    return out + 0.1 * torch.randn_like(out) if layer.training else out


# A trial on a few tokens almost never sees a chance of one in a million: it must see that a number is drawn.
def rare_skip(layer, states, out):
    return states if layer.training and torch.rand(()) < 1e-6 else out


def rare_skip_by_python(layer, states, out):
    return states if layer.training and random.random() < 1e-6 else out


def balance(layer, states, out):
    layer.bias += 0.001 * layer.training
    return out


@pytest.mark.parametrize("forward", [noise, rare_skip, rare_skip_by_python, balance])
def test_a_layer_that_is_random_or_changes_where_it_checkpoints_activations_is_refused_by_name(tmp_path, forward):
    model = with_layers(forward)
    tiny_trainer(tmp_path / "plain", model=model)
    assert [layer.bias.item() for layer in model.model.layers] == [0.0, 0.0]
    reason = r"its buffer model\.layers\.0\.bias changes" if forward is balance else "it draws random numbers"
    with pytest.raises(ValueError, match=f"NoisyLayer of LlamaForCausalLM .*{reason}.*gradient_checkpointing: false"):
        tiny_trainer(tmp_path / "checkpointed", model=model, gradient_checkpointing=True)


def rare_skip_with_gradients(layer, states, out):
    return states if torch.is_grad_enabled() and torch.rand(()) < 1e-6 else out


def scaled_with_gradients(layer, states, out):
    return 1.1 * out if torch.is_grad_enabled() else out


@pytest.mark.parametrize(
    "forward, reason",
    [(rare_skip_with_gradients, "it draws random numbers"), (scaled_with_gradients, "its states differ by")],
)
def test_what_a_model_computes_only_with_gradients_is_refused(tmp_path, forward, reason):
    with pytest.raises(ValueError, match=f"the code of LlamaForCausalLM .*{reason}"):
        tiny_trainer(tmp_path, model=with_layers(forward))


def rare_skip_always(layer, states, out):
    return states if torch.rand(()) < 1e-6 else out


def test_rare_noise_in_eval_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM draws random numbers also in eval mode"):
        tiny_trainer(tmp_path, model=with_layers(rare_skip_always))


class Standardized(nn.Module):
    """A layer's experts, and running statistics of their states."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.norm = nn.BatchNorm1d(32, affine=False)

    def forward(self, states):
        return self.norm(self.mlp(states).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_neither_the_trial_of_an_update_nor_the_update_changes_running_statistics(tmp_path, checkpointing):
    model = tiny_causal_lm("llama")
    for layer in model.model.layers:
        layer.mlp = Standardized(layer.mlp)
    random_state = torch.get_rng_state()
    trainer = tiny_trainer(tmp_path, model=model, gradient_checkpointing=checkpointing)
    assert torch.equal(torch.get_rng_state(), random_state)
    stats = trainer.step(trainer.prompt_batches(0))
    for layer in model.model.layers:
        assert layer.mlp.norm.running_mean.tolist() == [0.0] * 32
        assert layer.mlp.norm.running_var.tolist() == [1.0] * 32
    assert abs(stats["objective/kl_sum_seq"]) < 1e-4
