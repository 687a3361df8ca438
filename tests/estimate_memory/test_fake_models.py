"""Estimates for models whose layers differ, so that two of them are not enough, and for mixtures of experts."""

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from alpaca_ppo.estimate_memory.fake_models import Models
from alpaca_ppo.estimate_memory.measure import measure
from alpaca_ppo.estimate_memory.phases import sizes_of
from alpaca_ppo.estimate_memory.sharding import Sharding
from tests.estimate_memory.test_estimator import (
    VOCABULARY,
    fresh_state,
    llama,
    measured_peaks,
    predicted_peaks,
    settings,
)

__all__ = ["fresh_state"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
QWEN = {"num_experts": 8, **EXPERTS}


def config(model_type: str, **overrides: Any) -> Any:
    """Six layers of 128. The large vocabulary keeps a random model from ending responses early."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rest = {"num_hidden_layers": 6, "max_position_embeddings": 512}
    return AutoConfig.for_model(model_type, **{**sizes, **special, **rest, **overrides})


def queries() -> LoraConfig:
    return LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def bytes_of_parameters(of: Any) -> int:
    with torch.device("meta"):
        return 4 * sum(p.numel() for p in AutoModelForCausalLM.from_config(of).parameters())


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("qwen3_moe", {**QWEN, "mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {**QWEN, "decoder_sparse_step": 2}),
        ("glm4_moe", {"n_routed_experts": 8, "first_k_dense_replace": 3, **EXPERTS}),
        ("qwen3_moe", QWEN),
        ("gemma3_text", {"head_dim": 32, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}),
    ],
    ids=["first dense", "every other dense", "glm first dense", "alike", "sliding"],
)
def test_weights_are_those_of_every_layer(model_type, overrides):
    args, of = settings(critic_layout="shared", bf16=True), config(model_type, **overrides)
    # Rotary frequencies are not parameters: at most four tables of 16.
    beside = measure(Models(of), args, sizes_of(args, 1))["policy/weights"] - bytes_of_parameters(of)
    assert 0 <= beside <= 4 * 16 * 4 + 16


@pytest.mark.parametrize(
    ("with_lora", "overrides", "dense"),
    [
        (True, {"critic_layout": "adapter", "dtype": "bfloat16"}, [0, 1]),
        (False, {"critic_layout": "shared", "reference": "copy"}, []),
        (False, {"critic_layout": "shared", "reference": "copy", "bf16": True}, []),
        (True, {"critic_layout": "adapter", "gradient_checkpointing": True}, []),
    ],
    ids=["layers that differ", "float32", "bf16", "lora float32"],
)
def test_a_mixture_takes_the_estimated_memory(tmp_path, fresh_state, with_lora, overrides, dense):
    AcceleratorState._reset_state(True)
    overrides = {**overrides, "response_len": 16}
    args = settings(output_dir=str(tmp_path), **overrides)
    peft_config = queries() if with_lora else None
    of = config("qwen3_moe", **{**QWEN, "num_experts": 32}, mlp_only_layers=dense, num_hidden_layers=4)
    torch.manual_seed(0)
    predicted = predicted_peaks(Models(of, peft_config), args, Sharding())
    measured = measured_peaks(args, peft_config, of)
    ratios = {name: predicted[name] / measured[name] for name in predicted}
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), (ratios, predicted, measured)


@pytest.mark.parametrize("key", ["layers.3.self_attn.q_proj", r"layers\.3\.self_attn\.q_proj", r".*[3]\.self_attn.*"])
def test_ranks_of_single_layers_are_counted(key):
    """The keys of a rank pattern are regular expressions."""
    adapter = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM", rank_pattern={key: 16})
    args = settings(critic_layout="shared")
    found = measure(Models(llama(), adapter), args, sizes_of(args, 1))
    # The shared critic's head of 128; rank 8 of 128 + 128 in three layers and rank 16 in one.
    assert found["policy/elements"] + found["critic/elements"] == 128 + (3 * 8 + 16) * 256
