"""`model_init_kwargs` reach policy, critic and reference, and belong to a run's identity; how long rows may be."""

import pytest
from transformers import Gemma3Config, PreTrainedModel

from alpaca_ppo.models.loading import check_lengths
from alpaca_ppo.models.packed_attention import underlying_attention
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import tiny_trainer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, model in (("policy", tiny_causal_lm("llama")), ("value", tiny_sequence_classifier("llama"))):
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    return root


EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}


def run(folder, folders, *, value="value", **options):
    given = {"model": str(folders / "policy"), "value_model": value and str(folders / value), "processing_class": None}
    return tiny_trainer(folder, trainer_arguments=given, **options)


def backbones(trainer) -> list[PreTrainedModel]:
    reference = trainer.collector.reference.policy.model
    return [trainer.actor_critic.policy.model, trainer.actor_critic.critic.backbone, reference]


@pytest.mark.parametrize("value", ["value", "policy", None])
def test_every_model_that_the_run_loads_gets_them(tmp_path, folders, value):
    options = {"model_init_kwargs": {"attn_implementation": "eager", "rms_norm_eps": 0.25}}
    trainer = run(tmp_path, folders, value=value, reference=str(folders / "policy"), **options)
    for model in backbones(trainer):
        assert (underlying_attention(model), model.config.rms_norm_eps) == ("eager", 0.25)
    default = run(tmp_path / "default", folders, value=value, reference=str(folders / "policy"))
    for model in backbones(default):
        assert (underlying_attention(model), model.config.rms_norm_eps) == ("sdpa", 1e-6)
    # What a resumed run must share with its checkpoint.
    identities = [made._identity()["args"] for made in (trainer, default)]
    assert {name for name in identities[0] if identities[0][name] != identities[1][name]} == {*options}


def test_a_saved_distributional_critic_gets_them_too(tmp_path, folders):
    first = run(tmp_path / "first", folders, value=None, critic="c51", total_episodes=10)
    first.save_model(str(tmp_path / "saved"))
    given = {"model": str(folders / "policy"), "value_model": str(tmp_path / "saved/value"), "processing_class": None}
    second = tiny_trainer(
        tmp_path / "second", trainer_arguments=given, critic="c51", model_init_kwargs={"attn_implementation": "eager"}
    )
    assert underlying_attention(second.actor_critic.critic.backbone) == "eager"


def test_an_argument_that_loading_refuses_is_named(tmp_path, folders):
    with pytest.raises(ValueError, match=r"or it refuses an argument of model_init_kwargs \(attn_implementation\)"):
        run(tmp_path, folders, model_init_kwargs={"attn_implementation": "none_such"})


@pytest.mark.parametrize("options", [{"model_init_kwargs": {"rope_theta": 5.0}}])
def test_a_model_in_memory_has_been_loaded_already(tmp_path, options):
    with pytest.raises(ValueError, match="model_init_kwargs .* but model is a LlamaForCausalLM"):
        tiny_trainer(tmp_path, **options)


def test_the_longest_row_of_a_model_of_text_and_images_is_that_of_its_text():
    config = Gemma3Config(text_config={"max_position_embeddings": 8})
    check_lengths(config, {"query_len": 4, "response_len": 4})
    with pytest.raises(ValueError, match=r"query_len \(5\) \+ response_len \(4\) .* max_position_embeddings \(8\)"):
        check_lengths(config, {"query_len": 5, "response_len": 4})
