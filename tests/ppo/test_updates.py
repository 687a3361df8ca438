"""What an optimizer step does with the options: against losses computed here, on the whole batch at once."""

import re

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from alpaca_ppo import PPOTrainer
from alpaca_ppo.functional import policy_loss, value_loss
from alpaca_ppo.ppo.minibatches import UpdateStep
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_trainer, with_advantages

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def drifted_rollouts(trainer):
    """Rollouts whose old log-probs and values are off the model's, so that every clip range has something to clip."""
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    generator = torch.Generator().manual_seed(0)
    mask = rollouts["response_mask"]
    for name, scale in (("logprobs", 0.5), ("values", 0.3)):
        noise = scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        rollouts[name] = torch.where(mask, rollouts[name] + noise, 0.0)
    for name in ("advantages", "returns"):
        rollouts[name] = torch.where(mask, torch.randn(mask.shape, generator=generator, dtype=torch.float64), 0.0)
    return rollouts


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_an_optimizer_step_is_that_of_the_unsplit_batch_with_every_option(mode, tmp_path):
    options = {"cliprange": 0.1, "cliprange_high": 0.3, "clip_ratio_c": 1.5, "cliprange_value": 0.05, "vf_coef": 0.7}
    model = tiny_causal_lm("llama", dtype=torch.float64)
    settings = {**options, "loss_agg_mode": mode, "step_batch_size": 10, "ppo_epochs": 1, "temperature": 0.7}
    settings["mismatch_action"] = "ignore"
    trainer = tiny_trainer(tmp_path, model=model, **settings)
    rollouts = drifted_rollouts(trainer)
    keys = ("queries", "query_attn_masks", "responses", "response_mask")
    with torch.no_grad():
        now = trainer.actor_critic(*(rollouts[key] for key in keys), temperature=0.7, chunk_size=1000)
    mask = rollouts["response_mask"]
    policy = policy_loss(
        now.logprobs,
        rollouts["logprobs"],
        rollouts["advantages"],
        mask,
        cliprange_low=0.1,
        cliprange_high=0.3,
        clip_ratio_c=1.5,
        loss_agg_mode=mode,
    )
    value = value_loss(
        now.values, rollouts["values"], rollouts["returns"], mask, cliprange_value=0.05, loss_agg_mode=mode
    )
    with pytest.warns(UserWarning, match="probability ratio deviates from 1"):
        stats = trainer.step_with_rollouts(rollouts)
    assert stats["loss/policy"] == pytest.approx(float(policy.loss), rel=1e-9)
    assert stats["loss/value"] == pytest.approx(float(value.loss), rel=1e-9)
    assert stats["loss/total"] == pytest.approx(float(policy.loss + 0.7 * value.loss), rel=1e-9)
    for name in ("clipfrac", "clipfrac_lower", "approx_kl_k3", "ratio_max"):
        assert stats[f"policy/{name}"] == pytest.approx(float(policy.stats[name]), rel=1e-6), name
        assert stats[f"policy/{name}"] > 0, "the case exercises the option"


def test_every_epoch_and_every_step_shuffles_its_rows_anew(tmp_path):
    trainer = tiny_trainer(tmp_path, ppo_epochs=2)
    seen = []
    original = trainer.updater.micro_batches
    trainer.updater.micro_batches = lambda rollouts, update: (
        seen.append(tuple(update.rows.tolist())) or original(rollouts, update)
    )
    for step in range(2):
        trainer.step(trainer.prompt_batches(step))
    # Two steps of two epochs of three step batches (4, 4, 2 rows).
    assert [len(rows) for rows in seen] == [4, 4, 2] * 4
    orders = [sum((list(rows) for rows in seen[i : i + 3]), []) for i in range(0, 12, 3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


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
