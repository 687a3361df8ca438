"""Which models can read rows without padding, and that the others are left as they were."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from alpaca_ppo.models import trial
from alpaca_ppo.models.packed_attention import is_installed, underlying_attention
from alpaca_ppo.models.trial import packing_problem, padding_reason
from tests.tiny_models import PADDED, tiny_causal_lm, tiny_config


@pytest.mark.parametrize("arch", PADDED)
def test_models_that_need_padding_keep_it_and_stay_as_they_are(arch):
    model = tiny_causal_lm(arch)
    ids = torch.arange(4, 12).unsqueeze(0)
    wanted, attention = model(ids).logits, model.config._attn_implementation
    assert padding_reason(model, "auto") == packing_problem(model) is not None
    assert padding_reason(model, False) == "padding_free is false"
    with pytest.raises(ValueError, match=rf"padding_free is true, but {type(model).__name__} .* set it to auto"):
        padding_reason(model, True)
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, wanted)


def test_a_state_that_hardly_runs_into_the_next_row_is_found():
    model = tiny_causal_lm("lfm2", block_ff_dim=32)
    for name, parameter in model.named_parameters():
        if ".conv." in name:
            parameter.data *= 1e-3
    # The rows differ by less than rounding may, but they are not independent.
    assert packing_problem(model) == "what it computes for one row depends on another"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_trial_without_memory_is_no_finding(error, monkeypatch):
    def run_out(*arguments, **keywords):
        raise error("out of memory")

    monkeypatch.setattr(trial.packing_trial, "found", {})
    model = tiny_causal_lm("llama")
    with monkeypatch.context() as full:
        full.setattr(trial, "difference", run_out)
        with pytest.raises(error, match="out of memory"):
            packing_problem(model)
    assert packing_problem(model) is None and is_installed(model)


@pytest.mark.parametrize("choice", [False, "auto", True])
def test_a_llama_packs_unless_it_must_not(choice):
    model = tiny_causal_lm("llama").train()
    assert (padding_reason(model, choice) is None) is bool(choice)
    assert is_installed(model) is bool(choice)
    assert model.training and underlying_attention(model) == "sdpa"


def test_a_mask_that_the_attention_is_not_told_of_is_found_by_its_shape():
    # Chunks of 8192 tokens: rows of a trial are shorter.
    config = AutoConfig.for_model("llama4_text", **_llama4())
    model = AutoModel.from_config(config)
    assert packing_problem(model) == "its masks are not causal masks or sliding windows"
    window = tiny_causal_lm("mistral", sliding_window=4096)
    assert packing_problem(copy.deepcopy(window)) is None
    for layer in window.model.layers:
        # Mistral's layers read the window from the configuration; the masks are made from another one.
        layer.self_attn.config = tiny_config("mistral", sliding_window=None)
        layer.self_attn.config._attn_implementation = "packing_trial"
    window.config.max_position_embeddings += 1
    assert packing_problem(window) == "a layer with a window of 4096 tokens has the keyword None"


def _llama4() -> dict:
    sizes = tiny_config("llama", vocab_size=64).to_dict()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {name: sizes[name] for name in names} | {"intermediate_size_mlp": 48, "head_dim": 8, "moe_layers": []}


def test_models_without_weights_and_with_other_attention_need_padding():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    assert packing_problem(model) == "its weights are on the meta device"
    weights = tiny_causal_lm("llama", output_attentions=True, attn_implementation="eager")
    assert packing_problem(weights) == "its attention (eager) cannot be replaced"


@pytest.mark.proof
def test_a_model_with_flex_attention_keeps_it():
    flex = tiny_causal_lm("llama", hidden_size=16)
    flex.config._attn_implementation = "flex_attention"
    assert packing_problem(flex) is not None and flex.config._attn_implementation == "flex_attention"


def test_an_error_in_the_trial_is_the_reason():
    model = tiny_causal_lm("llama", hidden_size=48)
    model.model.layers[0].register_forward_pre_hook(_fails_on_keywords, with_kwargs=True)
    assert packing_problem(model) == "a trial raised RuntimeError: no keywords here"
    assert not is_installed(model)


def _fails_on_keywords(module, args, kwargs):
    if "packing" in kwargs:
        raise RuntimeError("no keywords here")


def test_results_that_depend_on_the_name_of_the_attention_keep_it():
    # GPT-2 looks for the name "eager" when it computes attention in float32 whatever the weights' dtype.
    model = tiny_causal_lm("gpt2", dtype=torch.bfloat16, attn_implementation="eager", reorder_and_upcast_attn=True)
    assert packing_problem(model) == "its results depend on the name of its attention"
    assert model.config._attn_implementation == "eager"
    assert_close(model(torch.ones(1, 3, dtype=torch.long)).logits, model(torch.ones(1, 3, dtype=torch.long)).logits)


def test_a_model_with_a_hook_is_tried_though_others_of_its_kind_were():
    assert packing_problem(tiny_causal_lm("gpt2")) is None
    hooked = tiny_causal_lm("gpt2")
    hooked.transformer.register_forward_pre_hook(
        lambda module, inputs, keywords: (inputs, {**keywords, "position_ids": None}), with_kwargs=True
    )
    assert "differ by" in packing_problem(hooked)


def test_a_trial_leaves_the_mode_of_each_module_as_it_was():
    model = tiny_causal_lm("llama", hidden_act="relu").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert packing_problem(model) is None
    assert [module.training for module in model.modules()] == modes


def test_what_is_found_in_diverged_weights_is_not_kept_for_other_models():
    # A kind of its own, which no other test has tried.
    settings = {"intermediate_size": 44}
    diverged = tiny_causal_lm("llama", **settings)
    diverged.model.norm.weight.data.fill_(torch.nan)
    assert packing_problem(diverged) is not None
    assert packing_problem(tiny_causal_lm("llama", **settings)) is None
