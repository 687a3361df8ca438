"""As `test_flops`, for the other layouts of policy and critic, and for the formula with adapters."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.bare_steps import policy_loss
from tests.tools.benchmarks.flops import Backbone, flop_counter
from tests.tools.benchmarks.own_steps import make_trainer
from tests.trainer.test_flops import SMALL, CountSteps, assert_executed, lora, needed, uneven

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def few():
    """8 responses of 1 to 24 tokens."""
    return replace(uneven(workloads.realistic(8, 8, **SMALL)), step_batch_size=4, micro_batch_size=2)


SAMPLES = {"adv_estimator": "grpo", "num_return_sequences": 3, "step_batch_size": 24, "step_per_device_batch_size": 24}


@pytest.mark.parametrize(
    "settings, passes",
    [
        ({"old_policy": "rollout"}, {"old_policy_pass": False}),
        ({"critic_layout": "shared"}, {"critic": "shared"}),
        (
            {"critic_layout": "adapter", "reference": "adapter_off", "peft_config": lora("CAUSAL_LM")},
            {"adapters": True},
        ),
        (SAMPLES | {"rollout_per_device_batch_size": 24}, {"critic": "none", "samples": 3}),
    ],
    ids=["rollout", "shared", "adapter", "samples"],
)
def test_every_layout_executes_what_its_real_tokens_need(settings, passes, few, tmp_path, monkeypatch):
    count = CountSteps(monkeypatch)
    make_trainer(few, str(tmp_path), steps=1, callbacks=[count], **settings).train()
    assert count.logs["tokens/sampled"] == sum(few.lengths) * passes.get("samples", 1)
    assert_executed(count, needed(few, **passes))


@pytest.mark.parametrize("epochs", [1, 8])
def test_a_cached_critic_executes_nothing_but_its_small_transformer(epochs, few, tmp_path, monkeypatch):
    count, width, layers = CountSteps(monkeypatch), 64, 2
    sizes = {"critic_layout": "cached", "critic_width": width, "critic_depth": 1, "critic_layers": [1, layers]}
    make_trainer(few, str(tmp_path), steps=1, callbacks=[count], **sizes, critic_epochs=epochs).train()
    need, tokens = needed(few, critic="none"), sum(few.lengths)
    inputs, block = 2 * layers * 96 * width, 2 * (4 * width**2 + 3 * width * 4 * width)
    more = {stage: flops - getattr(need, stage) for stage, flops in count.by_stage.items()}
    assert more["rollout"] <= 0.02 * need.rollout and more["score"] <= 0.02 * need.score
    # Attention is not in the formula. States have no gradient.
    most = 1.1 * tokens
    for stage, of_token in {"logprobs": inputs + block, "update": epochs * (2 * inputs + 3 * block)}.items():
        assert tokens * of_token <= more[stage] <= most * of_token


@pytest.mark.parametrize(("backend", "passes"), [("slots", 0), ("generate", 1)])
def test_with_the_samplers_log_probs_its_states_spare_a_pass_of_the_policy(backend, passes, few, tmp_path, monkeypatch):
    count, width = CountSteps(monkeypatch), 64
    sizes = {"critic_layout": "cached", "critic_width": width, "critic_depth": 1, "critic_layers": [1]}
    settings = {"old_policy": "rollout", "generation_backend": backend}
    make_trainer(few, str(tmp_path), steps=1, callbacks=[count], **sizes, **settings).train()
    without = needed(few, critic="none", old_policy_pass=False).logprobs
    # All of a pass but the policy's head.
    policy_pass = needed(few, critic="none").logprobs - without - 2 * 1024 * 96 * sum(few.lengths)
    own = (2 * 96 * width + 2 * (4 * width**2 + 3 * width * 4 * width)) * sum(few.lengths)
    assert count.by_stage["logprobs"] == pytest.approx(without + passes * policy_pass + own, rel=0.02)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["fc2", "k_proj", "dense"]])
def test_the_formula_is_what_a_plain_pass_with_adapters_executes(targets):
    workload = workloads.realistic(4, 8, **SMALL)
    model = workloads.policy(workload)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    ids = torch.tensor(workloads.prompt_ids(workload))
    with flop_counter() as counter:
        policy_loss(peft, ids, 8).backward()
    rows, backbone = [ids.size(1) - 1] * 4, Backbone.of(model)
    # The head is frozen: a product forward and one for the gradient of the hidden states.
    head = 4 * 8 * 2 * 2 * 96 * 1024
    assert counter.get_total_flops() == backbone.forward(rows) + backbone.backward(rows) + head
