"""A critic that reads text before the prompt: nothing but values and returns depends on it."""

from collections import Counter
from dataclasses import asdict

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from alpaca_ppo.checkpoint.export import save_final
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.models import packed_sequences
from alpaca_ppo.tracking.weights_step import WeightsStep
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import HINTS, hinted_prompts, prompts, tiny_config, tiny_trainer, weights

LAYOUTS = ["separate", "adapter"]
SIZES = {"privileged_column": "hint", "privileged_len": 3}


def trainer_of(folder, layout="separate", *, hints=HINTS, trainer_class=PPOTrainer, **settings):
    """In float64, with a critic whose values are not all 0."""
    arguments = {"train_dataset": hinted_prompts(hints)}
    if layout == "adapter":
        arguments["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = tiny_trainer(
        folder,
        model=tiny_causal_lm("llama", dtype=torch.float64),
        trainer_class=trainer_class,
        trainer_arguments=arguments,
        **{"critic_layout": layout, **SIZES, **settings},
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.actor_critic.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return trainer


def rollouts_of(trainer):
    return trainer._rollouts_with_advantages(trainer.prompt_batches(0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_changes_values_and_returns_and_nothing_that_the_policy_reads_or_says(layout, tmp_path):
    settings = {"num_return_sequences": 2, "rollout_batch_size": 8, "whiten_advantages": False}
    # Other words, as many as before: also the same passes, so nothing else may move by a bit.
    others = [" ".join(f"w{4 + (int(word[1:]) + 13) % 60}" for word in hint.split()) for hint in HINTS]
    first, second, longer = (
        rollouts_of(trainer_of(tmp_path / name, layout, hints=hints, **settings))
        for name, hints in (("a", HINTS), ("b", others), ("c", ["w5 w6 w7"] * 40))
    )
    free = {"values", "advantages", "returns", "privileged", "privileged_attn_masks"}
    assert first.keys() == second.keys() and free < first.keys()
    for key in first.keys() - free:
        assert torch.equal(first[key], second[key]), key
        assert_close(longer[key], first[key], rtol=1e-9, atol=1e-12)
    # Each row whose text changed has another value at its first token, all others the same.
    changed = first["privileged_attn_masks"].any(dim=1)
    assert 0 < int(changed.sum()) < len(changed)
    assert torch.equal(((first["values"] - second["values"]).abs() > 1e-6)[:, 0], changed)
    assert bool(((first["returns"] - second["returns"]).abs() > 1e-6)[changed].any())
    assert bool(((longer["values"] - first["values"]).abs() > 1e-6)[:, 0].any())
    for key in ("queries", "responses"):
        assert first[key].shape[1] == {"queries": 4, "responses": 5}[key]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_and_padding_change_no_weight(layout, tmp_path, monkeypatch):
    tokens = Counter()
    read = packed_sequences.sequence_keywords

    def counting(backbone, packed):
        tokens[packed.input_ids.numel()] += 1
        return read(backbone, packed)

    monkeypatch.setattr("alpaca_ppo.models.policy.sequence_keywords", counting)
    settings = {"rollout_batch_size": 12, "total_episodes": 12, "mismatch_action": "ignore"}
    settings["hints"] = ["w5 w6 w7"] * 40
    packed = trainer_of(tmp_path / "packed", layout, step_per_device_batch_size=1, **settings)
    # The longest row as the critic reads it, one a micro-batch: 3 + 4 + 5.
    assert packed.updater.budget.max_tokens == 12 and packed.collector.row_tokens == 12
    rollouts = rollouts_of(packed)
    tokens.clear()
    packed.step_with_rollouts(rollouts)
    assert tokens and max(tokens) <= 12
    padded = trainer_of(tmp_path / "padded", layout, padding_free=False, **settings)
    padded.step_with_rollouts(rollouts_of(padded))
    expected = weights(padded)
    for name, tensor in weights(packed).items():
        assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)


class Renamed(PPOTrainer):
    """Trains a critic that is given no text, in the batch that it is given."""

    def compute_loss(self, rollouts_batch):
        rollouts_batch = {key: value for key, value in rollouts_batch.items() if not key.startswith("privileged")}
        assert self.updater.packed(rollouts_batch) is None
        return super().compute_loss(rollouts_batch)


def test_the_update_trains_the_critic_on_rows_with_the_text(tmp_path):
    given, taken = (
        trainer_of(tmp_path / name, trainer_class=kind, total_episodes=10)
        for name, kind in (("given", PPOTrainer), ("taken", Renamed))
    )
    for trainer in (given, taken):
        trainer.step_with_rollouts(rollouts_of(trainer))
    expected = weights(given)
    for name, tensor in weights(taken).items():
        same = torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-12)
        # The policy learns the same: its advantages are those of the rollout.
        assert same or name.startswith("critic."), name
    assert not torch.allclose(weights(taken)["critic.head.weight"], expected["critic.head.weight"])


def test_evaluation_prompts_need_no_such_column(tmp_path):
    trainer = tiny_trainer(
        tmp_path, trainer_arguments={"train_dataset": hinted_prompts(), "eval_dataset": prompts(3)}, **SIZES
    )
    assert trainer.evaluate()["eval/scores"] >= 0
    with pytest.raises(ValueError, match="no column 'hint'"):
        tiny_trainer(tmp_path, **SIZES)


def test_prompts_with_text_that_is_too_long_are_left_out(tmp_path):
    trainer = trainer_of(tmp_path, privileged_len=2)
    # Every fourth hint has three words.
    assert trainer.train_prompts.num_dropped == 10
    with pytest.raises(ValueError, match="privileged text in row 3 has 3 tokens"):
        trainer_of(tmp_path, privileged_len=2, overlong_prompts="error")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_prompt_and_response_fit_the_critics_positions(layout, tmp_path):
    trainer_of(tmp_path, layout, privileged_len=503)
    with pytest.raises(
        ValueError,
        match=r"query_len \(4\) \+ response_len \(5\) \+ privileged_len \(504\) is more than the critic's max_pos",
    ):
        trainer_of(tmp_path, layout, privileged_len=504)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_layout": "shared"}, "privileged_column is 'hint', but with critic_layout 'shared'"),
        ({"critic_layout": "side"}, "'side' the critic reads .* set critic_layout to separate or adapter, or priv"),
        ({"adv_estimator": "remax"}, "privileged_column is 'hint', but adv_estimator 'remax' has no critic"),
        ({"max_tokens_per_micro_batch": 11}, r"less than query_len \+ response_len \+ privileged_len \(12\)"),
    ],
)
def test_settings_that_leave_no_place_for_the_text_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_config("unused", **SIZES, **settings)


def test_a_run_interrupted_in_an_update_goes_on_with_the_text(tmp_path):
    whole = trainer_of(tmp_path / "whole", total_episodes=10)
    whole.train()
    stopped = trainer_of(tmp_path / "stopped", total_episodes=10)
    step = stopped.updater.step

    def interrupt(rollouts, rows, *inputs, **how):
        read = zip(rollouts["privileged"], rollouts["privileged_attn_masks"], strict=True)
        words = [HINTS[i].split() for i in rollouts["prompt_ids"].tolist()]
        assert [ids[mask.bool()].tolist() for ids, mask in read] == [[int(word[1:]) for word in row] for row in words]
        if stopped.updater.num_updates == 1:
            raise Interrupted(15)
        return step(rollouts, rows, *inputs, **how)

    stopped.updater.step = interrupt
    with pytest.raises(Interrupted):
        stopped.train()
    resumed = trainer_of(tmp_path / "stopped", total_episodes=10)
    resumed.train(resume_from_checkpoint=True)
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_card_of_the_critic_names_the_column(layout, tmp_path):
    trainer = trainer_of(tmp_path, layout)
    config = asdict(trainer.args)
    save_final(
        tmp_path / "final",
        trainer.actor_critic,
        trainer.processing_class,
        step=WeightsStep(2, 2),
        metrics={},
        config=config,
    )
    card = (tmp_path / "final" / "value" / "README.md").read_text()
    assert "`privileged_column: hint`: begin `input_ids` with the text" in card
    save_final(
        tmp_path / "none", trainer.actor_critic, trainer.processing_class, step=WeightsStep(2, 2), metrics={}, config={}
    )
    assert "privileged" not in (tmp_path / "none" / "value" / "README.md").read_text()
