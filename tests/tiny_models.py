"""Tiny random models and a tokenizer, built from configurations without any file or network.

Dropout stays at each architecture's default, so that a caller that forgets to switch it off is found out. Weights are
drawn with a large spread: the default one gives nearly uniform next-token distributions, which hide mistakes in masks
and positions.
"""

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
MAX_POSITIONS = 512

_LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_NO_GROUPS = {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}
_GEMMA_LIKE = {**_LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 8}),
    "mistral": ("mistral", _LLAMA_LIKE),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}),
    "gpt_neox": ("gpt_neox", _NO_GROUPS),
    "opt": (
        "opt",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "gemma2": ("gemma2", _GEMMA_LIKE),
    # Six layers make one period of Gemma 3's pattern by default; two layers must still have one of either kind.
    "gemma3": ("gemma3_text", {**_GEMMA_LIKE, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi": ("phi", _LLAMA_LIKE),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
}
ARCHITECTURES = list(_CONFIGS)
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**_LLAMA_LIKE, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_LLAMA_LIKE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}
MIXTURES = list(_MIXTURES)
"""Architectures with experts: their weights are parameters of one module, which no adapter for layers acts on."""
# Windows are shorter than the rows of the tests.
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_window": ("mistral", {**_LLAMA_LIKE, "sliding_window": 4}),
    "qwen2_window": ("qwen2", {**_LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gemma2_window": ("gemma2", {**_GEMMA_LIKE, "sliding_window": 4}),
    "gemma3_window": ("gemma3_text", {**_GEMMA_LIKE, **_WINDOW}),
    "gpt_oss": ("gpt_oss", {**_LLAMA_LIKE, **_WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LLAMA_LIKE,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "head_dim": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
        },
    ),
    "qwen2_moe": ("qwen2_moe", {**_LLAMA_LIKE, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "olmo3": ("olmo3", {**_LLAMA_LIKE, **_WINDOW}),
    "cohere": ("cohere", _LLAMA_LIKE),
    "cohere2": ("cohere2", {**_LLAMA_LIKE, **_WINDOW, "head_dim": 8}),
    "exaone4": ("exaone4", {**_LLAMA_LIKE, **_WINDOW, "head_dim": 8}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}),
    "biogpt": ("biogpt", _NO_GROUPS),
    "granite": ("granite", _LLAMA_LIKE),
    "glm4": ("glm4", {**_LLAMA_LIKE, "head_dim": 8}),
    "falcon": ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS, "rotary_dim": 4}),
    "stablelm": ("stablelm", _LLAMA_LIKE),
    "lfm2": ("lfm2", {**_LLAMA_LIKE, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "conv_L_cache": 3}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}
PADDED = ["bloom", "falcon", "gptj", "stablelm", "lfm2", "mamba", "rwkv"]
"""Families with an attention of their own, or a state that runs from row to row: they need rows with padding."""
PACKED = [name for name in _CONFIGS | _MIXTURES | _FURTHER if name not in PADDED]
"""Families whose rows can be laid end to end."""
# Architectures that a run refuses in some settings or in all.
_AWKWARD: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", _LLAMA_LIKE),
    "rwkv": ("rwkv", {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}),
    # Without a soft cap on the logits, which the policy does not reproduce.
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "hidden_size": 32,
            "lru_width": 32,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "logits_soft_cap": 1e6,
        },
    ),
    "llama4": ("llama4_text", {**_LLAMA_LIKE, "head_dim": 8, "intermediate_size_mlp": 48, "moe_layers": []}),
    "bart": (
        "bart",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "decoder_layers": 2,
            "decoder_ffn_dim": 48,
            "decoder_attention_heads": 4,
        },
    ),
}


def tiny_config(arch: str, *, vocab_size: int = 64, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a two-layer model of `arch`, such as one of ARCHITECTURES or MIXTURES; `overrides` replace
    single fields.
    """
    model_type, fields = (_CONFIGS | _MIXTURES | _FURTHER | _AWKWARD)[arch]
    special = {"vocab_size": vocab_size, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return AutoConfig.for_model(model_type, **{**fields, **special, **overrides})


SMALLEST: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Overrides that make a llama as small as it can be, where many are loaded."""


def tiny_causal_lm(
    arch: str, *, vocab_size: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random causal language model of `arch`, in eval mode; its weights depend on `seed` alone."""
    config = tiny_config(arch, vocab_size=vocab_size, **overrides)
    return _build(AutoModelForCausalLM, config, dtype=dtype, seed=seed)


def tiny_sequence_classifier(
    arch: str, *, vocab_size: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random scorer of `arch` with one output, in eval mode, its weights depend on `seed` alone."""
    config = tiny_config(arch, vocab_size=vocab_size, num_labels=1, **overrides)
    return _build(AutoModelForSequenceClassification, config, dtype=dtype, seed=seed)


def _build(auto_class: Any, config: PreTrainedConfig, *, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class.from_config(config)
        for parameter in model.parameters():
            # Biases and norms too: all-zero or all-one ones would hide a mistake in how they are used.
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model.to(dtype).eval()


def tiny_tokenizer(words: list[str] | None = None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of 64 entries: pad, bos, eos, unk (ids 0 to 3), then `words`, then `w<id>` up to 63.

    Adds no special tokens by itself. `words` are at most 60 strings without blanks.
    """
    words = list(words or [])
    assert len(words) <= 60, f"{len(words)} words do not fit beside 4 special tokens in 64 entries"
    entries = [*SPECIAL_TOKENS, *words, *(f"w{i}" for i in range(len(SPECIAL_TOKENS) + len(words), 64))]
    vocabulary = {token: i for i, token in enumerate(entries)}
    assert len(vocabulary) == 64, "words must differ from each other, from the special tokens and from the fillers"
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk, padding_side="left"
    )
