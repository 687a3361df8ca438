"""A prompt that several rows of a micro-batch have is read once in updates too: the same gradient for fewer tokens."""

from unittest import mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from alpaca_ppo.models import packed_attention
from alpaca_ppo.models.packed_attention import SHARED_IN_UPDATES
from alpaca_ppo.ppo.update_plan import UpdateStep
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, tiny_trainer, weights, with_advantages

# From fewer tokens than are shared to more, and two rows with the same.
LENGTHS = (SHARED_IN_UPDATES - 1, SHARED_IN_UPDATES, 20, 23, 20)
GRPO = {"adv_estimator": "grpo"}


def trained(folder, family="llama", *, peft_config=None, **settings):
    """Weights and metrics of a run with three answers to each of five prompts, and the tokens of its passes."""
    rows = [{"prompt": " ".join(f"w{10 + (7 * i + j) % 50}" for j in range(n))} for i, n in enumerate(LENGTHS)]
    sizes = {"query_len": 24, "rollout_batch_size": 5, "num_return_sequences": 3, "step_batch_size": 10}
    trainer = tiny_trainer(
        folder,
        model=tiny_causal_lm(family, dtype=torch.float64),
        trainer_arguments={"train_dataset": Dataset.from_list(rows), "peft_config": peft_config},
        **{**sizes, "step_per_device_batch_size": 10, "total_episodes": 10, **settings},
    )
    tokens = []
    backbone = trainer.actor_critic.policy.model.base_model
    backbone.register_forward_pre_hook(
        lambda module, args, given: tokens.append(given["input_ids"].numel()) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    trainer.train()
    return weights(trainer), metric_lines(folder), sum(tokens)


def never_shared():
    return mock.patch.object(packed_attention, "SHARED_IN_UPDATES", 10**9)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", GRPO),
        ("llama", GRPO | {"gradient_checkpointing": True}),
        ("mistral_window", GRPO),
        ("gemma2", GRPO),
        ("gpt2", GRPO),
        ("llama", {"critic_layout": "shared"}),
        ("llama", {"critic_layout": "cached", "critic_width": 64, "critic_epochs": 3}),
        ("llama", {"critic_layout": "adapter", "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}),
        ("llama", GRPO | {"max_tokens_per_micro_batch": 60}),
        ("llama", {"ppo_epochs": 2, "critic_epochs": 4}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_the_run_is_that_which_reads_a_prompt_with_each_of_its_answers(family, settings, tmp_path):
    shared, lines, tokens = trained(tmp_path / "shared", family, **settings)
    with never_shared():
        apart, expected, more_tokens = trained(tmp_path / "apart", family, **settings)
    assert tokens < 0.8 * more_tokens
    for name, weight in shared.items():
        torch.testing.assert_close(weight, apart[name], rtol=1e-5, atol=2e-6)
    for ours, theirs in zip(lines, expected, strict=True):
        for name in ("ppo/loss/policy", "objective/kl_sum_seq", "ppo/policy/entropy"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-8)


def test_a_plan_does_not_depend_on_whether_gradients_are_on(tmp_path):
    prompts = [{"prompt": " ".join(f"w{10 + i + j}" for j in range(SHARED_IN_UPDATES - i))} for i in (0, 1)]
    sizes = {"query_len": 16, "rollout_batch_size": 2, "num_return_sequences": 4, "step_batch_size": 8}
    trainer = tiny_trainer(tmp_path, trainer_arguments={"train_dataset": Dataset.from_list(prompts)}, **sizes)
    rollouts = with_advantages(trainer, trainer.prompt_batches(0))
    update = UpdateStep("both", torch.arange(8), 0, (0, 0, 0, 0))
    found = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            batches = list(trainer.updater.micro_batches(rollouts, update))
            found.append([(batch.rows["sample_ids"].tolist(), batch.packed[0].spans) for batch in batches])
    assert found[0] == found[1] and any(span.prefix_length for _, spans in found[0] for span in spans)


def test_prompts_too_short_to_be_shared_give_the_same_run_to_the_last_bit(tmp_path):
    sizes = {"query_len": SHARED_IN_UPDATES - 1, "rollout_batch_size": 1, "step_batch_size": 3, "total_episodes": 2}
    found, lines, _ = trained(tmp_path / "shared", **sizes)
    with never_shared():
        expected, theirs, _ = trained(tmp_path / "apart", **sizes)
    assert lines == theirs and all(torch.equal(weight, expected[name]) for name, weight in found.items())
