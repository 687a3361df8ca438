"""What an optimizer step reads of the rollouts, and what it says when memory ends.

Its losses and gradients are compared with those of the independent PPO, in `tests/independent`.
"""

import re

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from alpaca_ppo import PPOTrainer
from alpaca_ppo.ppo.update_plan import UpdateStep
from tests.tiny_runs import tiny_trainer, with_advantages


def test_an_out_of_memory_error_says_what_would_fit(tmp_path):
    class Crowded(PPOTrainer):
        def compute_policy_loss(self, batch, outputs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    trainer = tiny_trainer(tmp_path, trainer_class=Crowded, step_batch_size=10, step_per_device_batch_size=10)
    with pytest.raises(torch.OutOfMemoryError, match=r"10 responses \((\d+) tokens\)") as caught:
        trainer.step(trainer.prompt_batches(0))
    tokens = int(re.search(r"\((\d+) tokens", str(caught.value))[1])
    assert f"max_tokens_per_micro_batch: {tokens // 2} " in str(caught.value)
    assert str(caught.value).endswith("Tried to allocate 2.00 GiB.")


def test_a_critic_that_reads_kept_states_is_not_advised_to_recompute_them(tmp_path):
    class Crowded(PPOTrainer):
        def compute_value_loss(self, batch, outputs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer = tiny_trainer(tmp_path, trainer_class=Crowded, critic_layout="cached", critic_width=64, critic_depth=1)
    with pytest.raises(torch.OutOfMemoryError, match=r"\d+ tokens\); set .*a smaller critic_width"):
        trainer.step(trainer.prompt_batches(0))


def test_in_a_micro_batch_that_cannot_be_smaller_it_advises_no_smaller_ones(tmp_path):
    class Crowded(PPOTrainer):
        def compute_policy_loss(self, batch, outputs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer = tiny_trainer(tmp_path, trainer_class=Crowded, step_per_device_batch_size=1)
    with pytest.raises(torch.OutOfMemoryError, match=r"\d+ tokens\); set gradient_checkpointing: true"):
        trainer.step(trainer.prompt_batches(0))


class Copies(TorchDispatchMode):
    """Lists the tensors of the rollouts that are indexed, once each time."""

    def __init__(self, rollouts):
        super().__init__()
        self.sources = {id(value): name for name, value in rollouts.items()}
        self.indexed = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index.Tensor and id(args[0]) in self.sources:
            self.indexed.append(self.sources[id(args[0])])
        return func(*args, **(kwargs or {}))


def test_an_optimizer_step_copies_each_tensor_of_the_rollouts_once(tmp_path):
    trainer = tiny_trainer(tmp_path, step_batch_size=10, max_tokens_per_micro_batch=18)
    rollouts = with_advantages(trainer, trainer.prompt_batches(0))
    update = UpdateStep("both", torch.arange(10), 0, (0, 0, 0, 0))
    with Copies(rollouts) as copies:
        batches = list(trainer.updater.micro_batches(rollouts, update))
    # The mask once more, to count its tokens.
    assert sorted(copies.indexed) == sorted([*rollouts, "response_mask"]) and len(batches) > 2
    assert len({batch.rows["responses"].untyped_storage().data_ptr() for batch in batches}) == 1
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    # Every row is in one micro-batch, with its own entries.
    found = {}
    for batch in batches:
        assert int(batch.rows["denominator"]) == int(rollouts["response_mask"].sum())
        assert batch.tokens == int(batch.rows["response_mask"].sum())
        for i, prompt in enumerate(batch.rows["prompt_ids"].tolist()):
            found[prompt] = {name: batch.rows[name][i] for name in rollouts}
    assert sorted(found) == sorted(rollouts["prompt_ids"].tolist())
    for i, prompt in enumerate(rollouts["prompt_ids"].tolist()):
        for name, value in rollouts.items():
            assert_close(found[prompt][name], value[i], rtol=0, atol=0, equal_nan=True)
