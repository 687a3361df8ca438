"""The passes of an evaluation: as many tokens as the budget, rows copied and packed once, and the same numbers."""

from collections import Counter

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.ppo import device_rows, rollouts
from alpaca_ppo.ppo.rollouts import ForwardRows, RolloutOptions
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_trainer


@pytest.fixture
def counted(monkeypatch):
    """How often rows were copied and packed, and the tokens of each sequence that was packed."""
    counts, tokens = Counter(), []
    upload, pack_rows = device_rows.upload, rollouts.pack_rows

    def counting_upload(*arguments):
        counts["uploads"] += 1
        return upload(*arguments)

    def counting_pack(*arguments, **keywords):
        counts["packs"] += 1
        packed = pack_rows(*arguments, **keywords)
        tokens.append(packed.input_ids.numel())
        return packed

    monkeypatch.setattr(device_rows, "upload", counting_upload)
    monkeypatch.setattr(rollouts, "pack_rows", counting_pack)
    return counts, tokens


def samples_of(trainer):
    """Twelve rows, three of each prompt, of known lengths."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor([4, 1, 3, 2]), torch.arange(12) % 6
    queries = torch.randint(4, 60, (4, 4), generator=generator)
    masks = torch.arange(4) >= 4 - prompts.unsqueeze(1)
    return {
        "queries": (queries * masks).repeat_interleave(3, dim=0),
        "query_attn_masks": masks.long().repeat_interleave(3, dim=0),
        "responses": torch.randint(4, 60, (12, 5), generator=generator),
        "response_mask": torch.arange(5) < responses.unsqueeze(1),
        "prompt_ids": torch.arange(4).repeat_interleave(3),
        "sample_ids": torch.arange(3).repeat(4),
        "rollout_logprobs": torch.zeros(12, 5),
    }


def evaluate(trainer, samples, **passes):
    return trainer.collector.forward(samples, RolloutOptions(**passes), temperature=1.0)


def trainer_of(folder, **settings):
    return tiny_trainer(folder, model=tiny_causal_lm("llama", dtype=torch.float64), num_return_sequences=3, **settings)


def test_policy_critic_and_reference_share_passes_copies_and_packed_rows(tmp_path, counted):
    counts, tokens = counted
    trainer = trainer_of(tmp_path / "packed")
    samples = samples_of(trainer)
    out = evaluate(trainer, samples)
    # Prompts and their three responses: 12 + 3, 3 + 12, 9 + 3 and 6 + 12 tokens; at most 4 rows * 9 tokens a pass.
    assert [
        rows
        for rows, _, _ in ForwardRows(samples, torch.device("cpu"), per_device_batch_size=4, max_tokens=36).batches(
            trainer.actor_critic
        )
    ] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    counts.clear()
    tokens.clear()
    evaluate(trainer, samples)
    # Four tensors; two passes, of which policy, critic and reference read the same rows.
    assert counts == {"uploads": 4, "packs": 2}
    assert max(tokens) <= 36
    padded = trainer_of(tmp_path / "padded", padding_free=False)
    expected = evaluate(padded, samples)
    assert out.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(out[name], value, rtol=1e-9, atol=1e-12)


def test_a_rank_makes_the_passes_of_the_longest_one(tmp_path):
    trainer = trainer_of(tmp_path)
    samples, calls = samples_of(trainer), []
    rows = ForwardRows(
        samples, torch.device("cpu"), per_device_batch_size=4, max_tokens=36, count_of_all_ranks=lambda count: count + 2
    )
    trainer.actor_critic.policy.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    out = rollouts.forward_responses(
        trainer.actor_critic, rows, temperature=1.0, chunk_size=trainer.args.logprob_chunk_size
    )
    assert len(calls) == 2 + 2
    expected = evaluate(trainer, samples)
    for name in ("logprobs", "values"):
        assert_close(out[name], expected[name], rtol=0, atol=0)
