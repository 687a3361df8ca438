"""A critic that starts from a language model of another size: its backbone, with a head of its own."""

import math

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from alpaca_ppo.checkpoint.export import save_final
from alpaca_ppo.checkpoint.model_card import TrainedRun
from alpaca_ppo.models import load_critic
from alpaca_ppo.tracking.results import WeightsStep
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import tiny_trainer

WIDE = {"hidden_size": 64, "num_hidden_layers": 3}


def given(value_model):
    return {"trainer_arguments": {"value_model": value_model}}


def backbone_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.actor_critic.critic.backbone.named_parameters()}


@pytest.mark.parametrize(
    ("arch", "sizes", "settings"),
    [
        ("llama", WIDE, {}),
        # Smaller, of another family, with embeddings tied to the head that is dropped, and longer than the policy's.
        ("gpt2", {"n_embd": 16, "n_layer": 1, "vocab_size": 80}, {"critic": "quantile", "num_atoms": 3}),
        # Its states are narrower than its layers.
        ("opt", {"word_embed_proj_dim": 16}, {}),
    ],
)
def test_a_critic_takes_the_backbone_of_a_language_model(arch, sizes, settings, tmp_path):
    start = tiny_causal_lm(arch, seed=7, **sizes)
    start.save_pretrained(tmp_path / "start")
    before = {name: p.detach().clone() for name, p in start.named_parameters()}
    in_memory = tiny_trainer(tmp_path / "memory", **given(start), **settings)
    on_disk = tiny_trainer(tmp_path / "disk", **given(str(tmp_path / "start")), **settings)
    expected = {name: p for name, p in start.base_model.named_parameters()}
    for trainer in (in_memory, on_disk):
        critic = trainer.actor_critic.critic
        assert critic.head.hidden_size == start.get_output_embeddings().in_features
        assert all(torch.equal(value, expected[name]) for name, value in backbone_of(trainer).items())
        # The head for tokens is gone.
        assert all("lm_head" not in name for name, _ in trainer.actor_critic.critic.named_parameters())
        stats = trainer.step(trainer.prompt_batches(0))
        assert math.isfinite(stats["ppo/loss/value"])
    after = backbone_of(in_memory)
    assert any(not torch.equal(after[name], value) for name, value in expected.items())
    assert all(torch.equal(before[name], p) for name, p in start.named_parameters()), "the model in memory is copied"
    for name, value in backbone_of(on_disk).items():
        assert torch.equal(value, after[name])


@pytest.mark.proof
def test_a_critic_of_another_size_is_exported_and_starts_another_run(tmp_path):
    trainer = tiny_trainer(tmp_path / "first", **given(tiny_causal_lm("llama", seed=7, **WIDE)))
    trainer.step(trainer.prompt_batches(0))
    save_final(
        tmp_path / "final", trainer.actor_critic, tiny_tokenizer(), TrainedRun(tmp_path, WeightsStep(2, 2), {}, {})
    )
    value = load_critic(str(tmp_path / "final" / "value")).backbone
    assert value.config.hidden_size == 64 and value.config.num_hidden_layers == 3
    second = tiny_trainer(tmp_path / "second", **given(str(tmp_path / "final" / "value")))
    head = second.actor_critic.critic.head
    assert_close(head.weight, trainer.actor_critic.critic.head.weight)
    assert all(torch.equal(p, backbone_of(trainer)[name]) for name, p in backbone_of(second).items())


def test_the_policy_itself_may_be_the_value_model(tmp_path):
    policy = tiny_causal_lm("llama")
    trainer = tiny_trainer(tmp_path, model=policy, **given(policy))
    own = {p.data_ptr() for p in trainer.actor_critic.critic.parameters()}
    assert not own & {p.data_ptr() for p in policy.parameters()}


def test_a_critic_without_a_backbone_of_its_own_does_not_start_from_one(tmp_path):
    wide = tiny_causal_lm("llama", **WIDE)
    with pytest.raises(ValueError, match="'LlamaForCausalLM' is not the final/value of a run with crit"):
        tiny_trainer(tmp_path, critic_layout="shared", **given(wide))
    arguments = {"value_model": wide, "peft_config": LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")}
    with pytest.raises(ValueError, match="is not the final/value of a run with critic_layout 'adapter' and adapters"):
        tiny_trainer(tmp_path, critic_layout="adapter", trainer_arguments=arguments)


def test_what_a_critic_cannot_read_or_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"critic's vocabulary \(60\) is smaller than the policy's \(64\)"):
        tiny_trainer(tmp_path, **given(tiny_causal_lm("llama", vocab_size=60)))
    with pytest.raises(ValueError, match=r"cannot be a critic: it has .*decoder of an encoder-decoder"):
        tiny_trainer(tmp_path, **given(tiny_causal_lm("bart")))
    with pytest.raises(ValueError, match="value_model is .*nothing.*neither a folder nor a hub id"):
        tiny_trainer(tmp_path, **given(str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="critic's max_position_embeddings"):
        tiny_trainer(tmp_path, **given(tiny_causal_lm("llama", max_position_embeddings=8)))


def test_a_critic_with_another_tokenizer_is_refused_and_special_tokens_may_differ(tmp_path):
    folder = str(tmp_path / "critic")
    tiny_causal_lm("llama", **WIDE).save_pretrained(folder)
    own = tiny_tokenizer()
    own.add_special_tokens({"pad_token": "w60"})
    own.save_pretrained(folder)
    tiny_trainer(tmp_path / "run", **given(folder))
    tiny_tokenizer(["w5", "w4"]).save_pretrained(folder)
    # Ids 4 and 5 are w4 and w5 for the policy.
    problem = "another tokenizer than the policy: 2 ids.* 4 for 'w5' instead of 'w4'"
    with pytest.raises(ValueError, match=f"value_model '.*' has {problem}"):
        tiny_trainer(tmp_path / "run", **given(folder))
    tiny_sequence_classifier("llama").save_pretrained(folder)
    reward = {"reward_funcs": folder}
    with pytest.raises(ValueError, match=f"reward_funcs '.*' has {problem}"):
        tiny_trainer(tmp_path / "run", trainer_arguments=reward, init_value_with_reward=True)


def test_a_folder_is_read_as_what_it_was_saved_as(tmp_path):
    tiny_sequence_classifier("llama", seed=3).save_pretrained(tmp_path / "classifier")
    trainer = tiny_trainer(tmp_path / "run", **given(str(tmp_path / "classifier")))
    score = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").score.weight
    assert_close(trainer.actor_critic.critic.head.weight, score)
