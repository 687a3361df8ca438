"""A merged model is the adapter on the stored base, also if the run held the base in half precision."""

import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from alpaca_ppo.adapters import add_policy_adapter
from alpaca_ppo.checkpoint.export import save_merged
from alpaca_ppo.models import load_causal_lm
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import tiny_config, tiny_trainer

IDS = torch.arange(4, 20)[None]


def loaded(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def stirred(base, **settings):
    adapters = add_policy_adapter(base, LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings}))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapters.parameters_of("default"):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapters


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("llama", {}),
        ("llama", {"use_dora": True}),
        ("gpt2", {}),
        ("gpt2", {"target_modules": ["c_attn", "wte"]}),
        # PEFT saves this embedding in the adapter's folder, in the run's precision.
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("qwen2", {"target_modules": ["q_proj"]}),
        ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    ],
)
def test_a_merged_model_is_the_adapter_on_the_stored_base(arch, settings, tmp_path):
    tiny_causal_lm(arch).save_pretrained(tmp_path / "base")
    adapters = stirred(load_causal_lm(str(tmp_path / "base"), dtype=torch.bfloat16), **settings)
    before = {name: tensor.clone() for name, tensor in adapters.peft.state_dict().items()}
    adapters.peft.save_pretrained(tmp_path / "policy")
    save_merged(tmp_path / "merged", adapters, tiny_tokenizer())
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not any(report.values()) and merged.dtype == torch.float32
    on_stored = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "policy")
    torch.testing.assert_close(logits(merged), logits(on_stored), atol=1e-4, rtol=0)
    # The error that rounding the base would have caused.
    rounded = loaded(tmp_path / "base", torch.bfloat16).float()
    assert (logits(PeftModel.from_pretrained(rounded, tmp_path / "policy")) - logits(merged)).abs().max() > 1e-3
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapters.peft.state_dict().items())


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_an_adapter_in_half_precision_is_merged_in_float32(settings, tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    adapters = stirred(load_causal_lm(str(tmp_path / "base"), dtype=torch.bfloat16), **settings)
    # As under DeepSpeed with bf16.
    for parameter in adapters.parameters_of("default"):
        parameter.data = parameter.data.bfloat16()
    before = {name: tensor.clone() for name, tensor in adapters.peft.state_dict().items()}
    adapters.peft.save_pretrained(tmp_path / "policy")
    save_merged(tmp_path / "merged", adapters, tiny_tokenizer())
    on_stored = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "policy")
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), logits(on_stored), atol=1e-4, rtol=0)
    assert {name: tensor.dtype for name, tensor in adapters.peft.state_dict().items()} == {
        name: tensor.dtype for name, tensor in before.items()
    }


def test_a_layer_of_the_adapter_s_own_is_merged_as_it_trained(tmp_path):
    tiny_causal_lm("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    base = load_causal_lm(str(tmp_path / "base"))
    # All other parameters: half precision is not trained.
    for name, parameter in base.named_parameters():
        if "embed_tokens" not in name:
            parameter.data = parameter.data.bfloat16()
    adapters = stirred(base, modules_to_save=["embed_tokens"])
    adapters.peft.save_pretrained(tmp_path / "policy")
    save_merged(tmp_path / "merged", adapters, tiny_tokenizer())
    on_stored = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "policy")
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), logits(on_stored), atol=1e-4, rtol=0)


def test_a_run_in_half_precision_leaves_a_policy_and_a_merged_model_that_agree(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    settings = {"dtype": "bfloat16", "critic_layout": "adapter", "learning_rate": 1e-2}
    arguments = {
        "model": str(tmp_path / "base"),
        "args": tiny_config(tmp_path / "run", **settings),
        "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    }
    trainer = tiny_trainer(tmp_path / "run", trainer_arguments=arguments)
    trainer.train()
    save_merged(tmp_path / "merged", trainer.actor_critic.policy.adapters, tiny_tokenizer())
    policy = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "run/final/policy")
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), logits(policy), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("gone", "cannot be read again"),
        ("damaged", "cannot be read again"),
        ("other", "are not those that this run loaded"),
        ("less", "are not those"),
    ],
)
def test_without_the_stored_base_the_loaded_one_is_merged_and_a_warning_says_so(change, reason, tmp_path):
    folder = tmp_path / "base"
    tiny_causal_lm("llama").save_pretrained(folder)
    adapters = stirred(load_causal_lm(str(folder), dtype=torch.bfloat16))
    rounded = loaded(folder, torch.bfloat16).float()
    adapters.peft.save_pretrained(tmp_path / "policy")
    if change == "damaged":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    else:
        shutil.rmtree(folder)
    if change in ("other", "less"):
        other = {"other": {"seed": 5}, "less": {"num_hidden_layers": 1}}[change]
        tiny_causal_lm("llama", **other).save_pretrained(folder)
    with pytest.warns(UserWarning, match=rf"{reason}.*: the adapter is merged into the base rounded to torch.bfloat16"):
        save_merged(tmp_path / "merged", adapters, tiny_tokenizer())
    on_rounded = PeftModel.from_pretrained(rounded, tmp_path / "policy")
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), logits(on_rounded), atol=1e-4, rtol=0)
