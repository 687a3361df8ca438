"""A step computes its real tokens and nothing else: its FLOPs, which no load of the machine moves, against a formula.

The formula is checked first, on plain passes of transformers over rows without padding.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.bare_steps import BareSteps, policy_loss
from tests.tools.benchmarks.flops import Backbone, count_stages, flop_counter, needed_flops
from tests.tools.benchmarks.own_steps import make_trainer

SMALL = {"hidden_size": 96, "head_size": 32, "num_hidden_layers": 2, "vocab_size": 1024}
MOST = 1.02
"""Executed FLOPs a step may have for each that its tokens need."""


def lora(task_type=None):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task_type)


class CountSteps(TrainerCallback):
    """The FLOPs of a run's last step, by stage, and its metrics."""

    def __init__(self, monkeypatch):
        self._counter = flop_counter()
        self.by_stage = count_stages(self._counter, monkeypatch)
        self.total, self.logs = 0, {}

    def on_step_begin(self, args, state, *rest, **kwargs):
        if state.global_step == state.max_steps - 1:
            self.by_stage.clear()
            self._counter.__enter__()

    def on_log(self, args, state, *rest, logs=None, **kwargs):
        if state.global_step == state.max_steps:
            self._counter.__exit__(None, None, None)
            self.total, self.logs = self._counter.get_total_flops(), logs


def uneven(workload):
    """Prompts of 12 to 32 tokens."""
    return replace(workload, prompt_lengths=tuple(12 + 7 * i % 21 for i in range(workload.num_prompts)))


@pytest.fixture(scope="module")
def realistic():
    """32 responses of 1 to 68 tokens."""
    return uneven(workloads.realistic(**SMALL))


@pytest.fixture(scope="module")
def few():
    """8 responses of 1 to 24 tokens."""
    return replace(uneven(workloads.realistic(8, 8, **SMALL)), step_batch_size=4, micro_batch_size=2)


def needed(workload, *, critic="separate", samples=1, adapters=False, old_policy_pass=True):
    policy, own = workloads.policy(workload), workloads.classifier(workload, 1)
    if adapters:
        get_peft_model(policy, lora())
        get_peft_model(own, lora())
    pairs = [pair for pair in zip(workload.prompt_lengths, workload.lengths, strict=True) for _ in range(samples)]
    return needed_flops(
        policy,
        {"separate": own, "shared": policy, "none": None}[critic],
        workloads.policy(workload),
        workloads.classifier(workload, 2),
        prompts=workload.prompt_lengths,
        responses=[response for _, response in pairs],
        # The text of a response has no eos.
        texts=[prompt + response - 1 for prompt, response in pairs],
        epochs=workload.ppo_epochs,
        old_policy_pass=old_policy_pass,
    )


def assert_executed(count, need):
    ratios = {stage: flops / getattr(need, stage) for stage, flops in count.by_stage.items()}
    assert count.total / need.total <= MOST, ratios
    assert max(ratios.values()) <= MOST, ratios
    # Less than is needed would mean that an operator is not counted.
    assert min(ratios.values()) >= 0.999, ratios


def test_a_step_executes_what_its_real_tokens_need(realistic, tmp_path, monkeypatch):
    count = CountSteps(monkeypatch)
    make_trainer(realistic, str(tmp_path), steps=1, callbacks=[count]).train()
    assert count.logs["tokens/sampled"] == sum(realistic.lengths)
    assert_executed(count, needed(realistic))


SAMPLES = {"adv_estimator": "grpo", "num_return_sequences": 3, "step_batch_size": 12}


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


def test_a_step_that_spares_the_old_policys_pass_executes_the_others(few, tmp_path, monkeypatch):
    count = CountSteps(monkeypatch)
    # Steps 2 and 3 compare sampler and trainer, once the first has moved the policy away from its reference.
    make_trainer(few, str(tmp_path), steps=4, callbacks=[count], learning_rate=1e-3).train()
    assert count.logs["mismatch/recomputed"] == 0 and count.logs["tokens/sampled"] == sum(few.lengths)
    assert_executed(count, needed(few, old_policy_pass=False))


def test_the_formula_is_what_plain_passes_without_padding_execute():
    bare, counted = BareSteps(workloads.realistic(4, 8, **SMALL)), {}

    @contextmanager
    def stage(name):
        with flop_counter() as counter:
            yield
        counted[name] = counter.get_total_flops()

    bare.step(stage)
    counted["logprobs"] += counted.pop("old policy")
    needed = needed_flops(
        bare.policy,
        bare.critic,
        bare.reference,
        bare.reward,
        prompts=[32] * 4,
        responses=[8] * 4,
        texts=[40] * 4,
        epochs=2,
        old_policy_pass=True,
    )
    assert counted == vars(needed)


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


def test_nothing_below_the_first_adapter_has_a_gradient():
    model = workloads.policy(workloads.realistic(4, 8, **SMALL))
    get_peft_model(model, lora())
    backbone = Backbone.of(model)
    # A layer of width 96: q, k, v, dense of 96 * 96, fc1 and fc2 of 96 * 384, A and B of q and v of 4 * 96.
    square, wide, adapter = 96 * 96, 96 * 384, 4 * 96
    assert backbone.weights == 2 * (4 * square + 2 * wide + 4 * adapter)
    # A layer's inputs need a gradient everywhere, and the adapters' weights too ...
    second = 4 * square + 2 * wide + 2 * 4 * adapter
    # ... but the first layer's input comes from the frozen embedding: attention and, beside it in Phi, fc1 and fc2 read
    # it. Only the output projection and the two B read what an adapter has changed.
    first = square + adapter * (2 + 2 * 2)
    assert backbone.gradients == first + second


def test_every_row_attends_to_its_own_tokens_only():
    rows = Backbone(weights=3, gradients=5, attention=2)
    # 3 tokens * 3 weights * 2 = 18; rows of 2 and 1 tokens: 4 * 2 * (2 * 2 + 1 * 1) = 40.
    assert rows.forward([2, 1]) == 58
    # 3 tokens * 5 gradients * 2; five attention products instead of two.
    assert rows.backward([2, 1]) == 30 + 100
    # Two tokens, after 1 and 2 others and with themselves: 2 * 6 + 4 * 2 * (2 + 3).
    assert rows.decode(1, 2) == 52
    # Two tokens at once after 1 other, which the kernel counts with all three keys: 2 * 6 + 4 * 2 * 2 * 3.
    assert rows.extend(1, 2) == 60


def test_the_samples_of_a_prompt_share_it_in_all_passes_but_the_updates():
    workload = workloads.realistic(1, 8, **SMALL)
    policy, reward = workloads.policy(workload), workloads.classifier(workload, 2)
    backbone, logits = Backbone.of(policy), 2 * 96 * 1024
    need = needed_flops(
        policy, None, None, reward, prompts=[5], responses=[3, 1], texts=[7, 5], epochs=1, old_policy_pass=True
    )
    # Tokens 2 and 3 of the first response are sampled after 5 and 6 others, and its first is the second's only one.
    assert need.rollout == backbone.forward([5]) + backbone.extend(5, 1) + backbone.extend(6, 1) + 3 * logits
    assert need.logprobs == backbone.forward([5]) + backbone.extend(5, 2) + 4 * logits
    assert need.update == backbone.forward([7, 5]) + backbone.backward([7, 5]) + 3 * 4 * logits
