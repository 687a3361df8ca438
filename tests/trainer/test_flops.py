"""A step computes its real tokens and nothing else: its FLOPs, which no load of the machine moves, against a formula.

The formula is checked first, on plain passes of transformers over rows without padding.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from transformers import TrainerCallback

from alpaca_ppo.ppo import metrics
from tests.benchmarks import workloads
from tests.benchmarks.bare_steps import BareSteps
from tests.benchmarks.flops import Backbone, flop_counter, needed_flops
from tests.benchmarks.own_steps import make_trainer

SMALL = {"hidden_size": 96, "head_size": 32, "num_hidden_layers": 2, "vocab_size": 1024}
MOST = 1.02
"""Executed FLOPs a step may have for each that its tokens need."""


class CountSteps(TrainerCallback):
    """The FLOPs of a step, by stage, and the tokens that were sampled in it."""

    def __init__(self, monkeypatch):
        self.by_stage, self.total, self.sampled = {}, 0, 0
        self._counter = flop_counter()
        measure = metrics.Timers.measure

        @contextmanager
        def counted(timers, phase):
            before = self._counter.get_total_flops()
            with measure(timers, phase):
                yield
            self.by_stage[phase] = self.by_stage.get(phase, 0) + self._counter.get_total_flops() - before

        monkeypatch.setattr(metrics.Timers, "measure", counted)

    def on_step_begin(self, *args, **kwargs):
        self._counter.__enter__()

    def on_log(self, *args, logs=None, **kwargs):
        self._counter.__exit__(None, None, None)
        self.total, self.sampled = self._counter.get_total_flops(), logs["tokens/sampled"]


@pytest.fixture(scope="module")
def uneven():
    """Prompts of 12 to 32 tokens, and responses of 1 to 68."""
    workload = workloads.realistic(**SMALL)
    return replace(workload, prompt_lengths=tuple(12 + 7 * i % 21 for i in range(workload.num_prompts)))


def needed(workload, **passes):
    prompts, responses = workload.prompt_lengths, workload.lengths
    return needed_flops(
        workloads.policy(workload),
        workloads.classifier(workload, 1),
        workloads.classifier(workload, 2),
        prompts=prompts,
        responses=responses,
        # The text of a response has no eos.
        texts=[p + r - 1 for p, r in zip(prompts, responses, strict=True)],
        epochs=workload.ppo_epochs,
        **passes,
    )


@pytest.mark.parametrize("old_policy", ["recompute", "rollout"])
def test_a_step_executes_what_its_real_tokens_need(old_policy, uneven, tmp_path, monkeypatch):
    count = CountSteps(monkeypatch)
    make_trainer(uneven, str(tmp_path), steps=1, callbacks=[count], old_policy=old_policy).train()
    assert count.sampled == sum(uneven.lengths)
    need = needed(uneven, old_policy_pass=old_policy == "recompute", logits_made_twice=False)
    ratios = {stage: flops / getattr(need, stage) for stage, flops in count.by_stage.items()}
    assert count.total / need.total <= MOST, ratios
    assert max(ratios.values()) <= MOST, ratios
    # Less than is needed would mean that an operator is not counted.
    assert min(ratios.values()) >= 0.999, ratios


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
        bare.reward,
        prompts=[32] * 4,
        responses=[8] * 4,
        texts=[40] * 4,
        epochs=2,
        old_policy_pass=True,
        logits_made_twice=False,
    )
    assert counted == vars(needed)


def test_every_row_attends_to_its_own_tokens_only():
    rows = Backbone(weights=3, attention=2)
    # 3 tokens * 3 weights * 2 = 18; rows of 2 and 1 tokens: 4 * 2 * (2 * 2 + 1 * 1) = 40.
    assert rows.forward([2, 1]) == 58
    # Twice the linear part; five attention products instead of two.
    assert rows.backward([2, 1]) == 36 + 100
    # Two tokens, after 1 and 2 others and with themselves: 2 * 6 + 4 * 2 * (2 + 3).
    assert rows.decode(1, 2) == 52
