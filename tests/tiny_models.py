"""Tiny random models and a tokenizer, built from configurations without any file or network.

Dropout stays at each architecture's default, so that a caller that forgets to switch it off is found out. Weights are
drawn with a large spread: the default one gives nearly uniform next-token distributions, which hide mistakes in masks
and positions.
"""

from pathlib import Path
from typing import Any

import torch
import yaml
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
_FAMILIES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("architectures.yaml").read_text()
)
MAX_POSITIONS = 512
ARCHITECTURES, MIXTURES, HYBRIDS = (list(_FAMILIES[kind]) for kind in ("main", "mixtures", "hybrids"))
PADDED = ["bloom", "falcon", "stablelm", "lfm2", "mamba", "rwkv"]
"""Families with an attention of their own, or a state that runs from row to row: they need rows with padding."""
PACKED = [name for kind in ("main", "mixtures", "further") for name in _FAMILIES[kind] if name not in PADDED]
"""Families whose rows can be laid end to end."""
READ_BY_CRITICS = [*PACKED, *HYBRIDS, *sorted({*PADDED} - {"rwkv"})]
"""Families whose layers return one state for each token."""


def tiny_config(arch: str, *, vocab_size: int = 64, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a two-layer model of `arch`, a name in architectures.yaml; `overrides` replace fields."""
    fields = next(kind[arch] for kind in _FAMILIES.values() if arch in kind)
    special = {"vocab_size": vocab_size, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return AutoConfig.for_model(**{**fields, **special, **overrides})


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
