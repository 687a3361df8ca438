"""A step computes its real tokens and nothing else: its FLOPs, which no load of the machine moves, against a formula.

The formula is checked first, on plain passes of transformers over rows without padding.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.bare_steps import BareSteps
from tests.tools.benchmarks.flops import count_stages, flop_counter, needed_flops
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
