"""A merged model is the adapter on its base."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.checkpoint.export import save_merged
from alpaca_ppo.models import load_causal_lm
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer

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
        # PEFT saves this embedding in the adapter's folder.
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("qwen2", {"target_modules": ["q_proj"]}),
        ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    ],
)
def test_a_merged_model_is_the_adapter_on_its_base(arch, settings, tmp_path):
    tiny_causal_lm(arch).save_pretrained(tmp_path / "base")
    adapters = stirred(load_causal_lm(str(tmp_path / "base")), **settings)
    before = {name: tensor.clone() for name, tensor in adapters.peft.state_dict().items()}
    adapters.peft.save_pretrained(tmp_path / "policy")
    save_merged(tmp_path / "merged", adapters, tiny_tokenizer())
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not any(report.values()) and merged.dtype == torch.float32
    on_stored = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "policy")
    torch.testing.assert_close(logits(merged), logits(on_stored), atol=1e-4, rtol=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapters.peft.state_dict().items())


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_an_adapter_in_half_precision_is_merged_in_float32(settings, tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    adapters = stirred(load_causal_lm(str(tmp_path / "base")), **settings)
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
