"""Micro-batches under a token budget, and an optimizer step that is made again after a device has run out of memory."""

import random
from unittest import mock

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.ppo.token_budget import OutOfMemory, TokenBudget
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import Crowded, tiny_config, tiny_trainer, weights

SIZES = {"step_batch_size": 10, "step_per_device_batch_size": 10, "ppo_epochs": 2}


def crowded(folder, room, **settings):
    """A trainer that has memory for `room` rows, in float64."""
    settings = {"trainer_class": Crowded, **SIZES, **settings}
    trainer = tiny_trainer(folder, model=tiny_causal_lm("llama", dtype=torch.float64), **settings)
    trainer.room = room
    return trainer


@pytest.mark.parametrize("settings", [{}, {"critic": "iqn", "num_quantiles": 4, "critic_pretraining_steps": 1}])
def test_a_step_that_ran_out_of_memory_is_made_again_with_the_same_numbers(settings, tmp_path, capsys):
    expected = crowded(tmp_path / "roomy", 10, **settings)
    before = weights(expected)
    expected.train()
    assert set(expected.attempts) == {10}
    trainer = crowded(tmp_path / "crowded", 3, **settings)
    trainer.train()
    # Ten rows do not fit, nor do the five of half the tokens; three do, for the rest of the run.
    assert trainer.attempts[0] == 10 and max(trainer.attempts[3:]) <= 3
    budget = trainer.updater.budget
    assert 9 <= budget.max_tokens <= 3 * 9 < budget.configured == 10 * 9
    assert capsys.readouterr().out.count("micro-batches now have at most") == trainer.attempts.count(10) + sum(
        4 <= rows < 10 for rows in trainer.attempts
    )
    after = weights(expected)
    for name, tensor in weights(trainer).items():
        assert_close(tensor, after[name], rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    ours, theirs = trainer.progress.stats, expected.progress.stats
    for name in theirs:
        if name.startswith(("ppo/", "objective/")) and "padding" not in name:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9), name


def test_a_micro_batch_that_finds_no_memory_for_its_rows_is_made_smaller_too(tmp_path, monkeypatch):
    trainer, expected = (crowded(tmp_path / name, 10) for name in ("full", "roomy"))
    pack, sizes = ActorCritic.pack, []

    def pack_few(model, queries, *rows, **keywords):
        sizes.append(len(queries))
        if len(queries) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return pack(model, queries, *rows, **keywords)

    expected.step(expected.prompt_batches(0))
    monkeypatch.setattr(ActorCritic, "pack", pack_few)
    trainer.step(trainer.prompt_batches(0))
    assert sizes[0] == 10 and trainer.attempts == sizes[1:]
    assert trainer.updater.budget.max_tokens < trainer.updater.budget.configured
    after = weights(expected)
    for name, tensor in weights(trainer).items():
        assert_close(tensor, after[name], rtol=1e-9, atol=1e-12)


class Noisy(Crowded):
    """Draws from the global generators in each micro-batch."""

    def compute_loss(self, rollouts_batch):
        self.draws.append([random.random(), float(np.random.random()), float(torch.rand(()))])
        return super().compute_loss(rollouts_batch)


def test_a_step_that_is_made_again_draws_the_same_random_numbers(tmp_path):
    trainer = crowded(tmp_path, 5, trainer_class=Noisy, ppo_epochs=1)
    trainer.draws = []
    rollouts = trainer._rollouts_with_advantages(trainer.prompt_batches(0))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    trainer.step_with_rollouts(rollouts)
    assert trainer.attempts[0] == 10 and max(trainer.attempts[1:]) <= 5
    drawn = trainer.draws
    # Ten rows did not fit. The second micro-batch of the second attempt goes on where the first one stopped.
    assert drawn[0] == drawn[1] and drawn[2] != drawn[1]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    for numbers in drawn[1:]:
        assert numbers == [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_a_resumed_run_starts_with_the_lowered_budget_unless_it_is_configured_anew(tmp_path):
    trainer = crowded(tmp_path, 3, save_steps=1)
    trainer.train()
    lowered = trainer.updater.budget.max_tokens
    assert lowered < trainer.updater.budget.configured
    for settings, expected in (({}, lowered), ({"max_tokens_per_micro_batch": 45}, 45)):
        resumed = crowded(tmp_path, 10, save_steps=1, **settings)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.updater.budget.max_tokens == expected


def test_one_response_that_does_not_fit_ends_the_run_with_remedies(tmp_path):
    trainer = crowded(tmp_path, 0, step_per_device_batch_size=1)
    with pytest.raises(torch.OutOfMemoryError, match=r"one response \(\d+ tokens\).*gradient_checkpointing: true") as e:
        trainer.train()
    assert str(e.value).endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_where_gradients_have_been_exchanged_the_error_names_a_budget(tmp_path):
    trainer = crowded(tmp_path, 3)
    with (
        mock.patch.object(Engine, "can_repeat", False),
        # Nothing is kept for an attempt that there cannot be.
        mock.patch("alpaca_ppo.ppo.updates.random_states", side_effect=AssertionError),
        pytest.raises(torch.OutOfMemoryError, match=r"10 responses \(\d+ tokens\).*max_tokens_per_micro_batch: \d+"),
    ):
        trainer.step(trainer.prompt_batches(0))
    assert trainer.attempts == [10]


def budget(padding_free=True, num_ranks=2, **settings):
    # Rows of at most 4 + 5 tokens.
    return TokenBudget(tiny_config("unused", **settings), padding_free=padding_free, num_ranks=num_ranks)


def test_the_default_budget_is_the_worst_case_of_the_row_limit():
    assert budget(step_per_device_batch_size=3).max_tokens == 27
    assert budget(max_tokens_per_micro_batch=11).max_tokens == 11


def test_rows_are_counted_only_where_one_process_pads_them():
    lengths = [9, 9, 3, 3, 3, 3, 3, 3]
    packed, padded = budget(step_batch_size=8), budget(padding_free=False, step_batch_size=8)
    # Budgets of 3 * (4 + 5) = 27 tokens hold the 18 of each rank.
    assert [[sum(lengths[i] for i in rows) for rows in part] for part in packed.plan(lengths)] == [[18], [18]]
    assert padded.plan(lengths) == [[[0, 1]], [[2, 3, 4, 5, 6, 7]]]
    alone = budget(padding_free=False, step_batch_size=8, num_ranks=1)
    # ceil(8 / 3 rows) = 3 micro-batches.
    assert alone.plan(lengths) == [[[0, 1, 2], [3, 4, 5], [6, 7]]]
    explicit = budget(padding_free=False, step_batch_size=8, num_ranks=1, max_tokens_per_micro_batch=27)
    assert explicit.plan(lengths) == [[[0, 1], [2, 3, 4, 5, 6, 7]]]
    assert (packed.cost([4, 2]), padded.cost([4, 2]), padded.cost([])) == (6, 8, 0)


def test_the_budget_becomes_half_of_the_smallest_micro_batch_that_failed():
    some = budget(step_per_device_batch_size=100)
    text = some.lower([OutOfMemory(0, 5, 60, "a"), OutOfMemory(1, 4, 51, "b")])
    assert some.max_tokens == 25 and text.startswith("process 1 ran out of memory in a micro-batch of 4 responses (51")
    assert text.endswith("set max_tokens_per_micro_batch: 25")
    assert "set max_tokens" not in some.lower([OutOfMemory(0, 2, 16, "a")]), "the configuration would refuse 8"
    with pytest.raises(torch.OutOfMemoryError, match="process 1 ran out of memory in a micro-batch of one response"):
        some.lower([OutOfMemory(0, 2, 8, "a"), OutOfMemory(1, 1, 9, "b")])
    empty = OutOfMemory(1, 0, 0, "b")
    with pytest.raises(
        torch.OutOfMemoryError, match="process 1 .* without responses.*taken by something else"
    ) as lowered:
        some.lower([OutOfMemory(0, 2, 8, "a"), empty])
    assert str(some.unrepeatable(empty)) == str(lowered.value)
    assert "query_len" not in str(lowered.value) and "max_tokens_per_micro_batch" not in str(lowered.value)


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


def test_an_optimizer_step_reads_each_tensor_of_the_rollouts_once(tmp_path):
    trainer = tiny_trainer(tmp_path, step_batch_size=10, step_per_device_batch_size=2)
    rollouts = trainer._rollouts_with_advantages(trainer.prompt_batches(0))
    rows, batches = torch.arange(10), []
    plan = [[0, 1, 2], [], [5, 4], [9]]
    with Copies(rollouts) as copies:
        batches = list(trainer.updater._micro_batches(rollouts, rows, plan, {"denominator": torch.tensor(3)}))
    assert sorted(copies.indexed) == sorted(rollouts)
    assert len({batches[i]["responses"].untyped_storage().data_ptr() for i in (0, 2, 3)}) == 1
    for batch, part in zip(batches, plan, strict=True):
        assert int(batch["denominator"]) == 3
        for name, value in rollouts.items():
            if part:
                assert_close(batch[name], value[part], rtol=0, atol=0, equal_nan=True)
        assert part or (not batch["response_mask"].any() and len(batch["responses"]) == 1)
