"""What the runs are fed: tiny random models, a tokenizer, prompts, rewards, and the files that some of them read.

Nothing here comes from the package or from the other tests, so that two commits get the same inputs.
"""

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VOCABULARY = 64
_LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ATTENTION = ["sliding_attention", "full_attention"]
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gemma3": (
        "gemma3_text",
        {**_LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "layer_types": _ATTENTION},
    ),
    "mixtral": ("mixtral", {**_LLAMA_LIKE, "num_local_experts": 4}),
}
_LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def lora_config() -> LoraConfig:
    """Of adapters on every linear layer of a causal language model."""
    return LoraConfig(**_LORA, task_type="CAUSAL_LM")


def causal_lm(arch: str) -> PreTrainedModel:
    """A random model of `arch`, always the same one."""
    return _random(AutoModelForCausalLM, arch, seed=0)


def adapted_lm() -> Any:
    """The llama with an adapter that is not at its start."""
    return _with_random_adapter(causal_lm("llama"), lora_config(), seed=1)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: special tokens, then `w4` up to `w63`, each its own id."""
    entries = [*_SPECIAL_TOKENS, *(f"w{i}" for i in range(len(_SPECIAL_TOKENS), _VOCABULARY))]
    pad, bos, eos, unk = _SPECIAL_TOKENS
    words = Tokenizer(WordLevel({token: i for i, token in enumerate(entries)}, unk_token=unk))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk, padding_side="left"
    )


def prompts(count: int) -> Dataset:
    """Prompts of one to four tokens, each with a number that a reward may use."""
    texts = [" ".join(f"w{10 + (7 * i + j) % 50}" for j in range(1 + i % 4)) for i in range(count)]
    return Dataset.from_list([{"prompt": text, "factor": 0.5 + i % 3} for i, text in enumerate(texts)])


def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The number of even token ids in each response."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def scaled_even(completion_ids: list[list[int]], factor: list[float]) -> list[float]:
    """`even` times the prompt's factor."""
    return [score * scale for score, scale in zip(even(completion_ids), factor, strict=True)]


def token_thirds(completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
    """A third of each token's remainder by three, token by token."""
    return [[token % 3 / 3 for token in ids] for ids in completion_ids]


def short_or_nothing(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """The length below zero; no opinion on responses whose first token is a multiple of four."""
    return [None if ids[0] % 4 == 0 else -0.1 * len(ids) for ids in completion_ids]


def reward_sources(name: str, folder: Path) -> list[Any]:
    """The sources that the run setting `name` stands for; `folder` holds what `write_inputs` wrote."""
    sources: dict[str, list[Any]] = {
        "even": [even],
        "column": [scaled_even],
        "tokens": [token_thirds, short_or_nothing],
        "model": [even, str(folder / "reward_model")],
    }
    return sources[name]


def write_inputs(folder: Path, *, model: str, reward: str) -> None:
    """Writes what a run of this model and reward may read into the new `folder`: DeepSpeed configurations, and the
    policy, reward model and reward adapter.
    """
    folder.mkdir(parents=True)
    for stage in (1, 2, 3):
        (folder / f"zero{stage}.json").write_text(json.dumps(_deepspeed(stage)))
    saved: dict[str, Any] = {}
    if model == "folder":
        saved["policy"] = causal_lm("llama")
    if reward == "model":
        saved["reward_model"] = _random(AutoModelForSequenceClassification, "llama", seed=2, num_labels=1)
    scorer = _random(AutoModelForSequenceClassification, "llama", seed=0, num_labels=1)
    saved["reward_adapter"] = _with_random_adapter(scorer, LoraConfig(**_LORA, task_type="SEQ_CLS"), seed=3)
    for name, content in saved.items():
        content.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def _deepspeed(stage: int) -> dict[str, Any]:
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    settings = {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero}
    return {**dict.fromkeys(automatic, "auto"), **settings}


def _random(auto_class: Any, arch: str, *, seed: int, **overrides: Any) -> PreTrainedModel:
    model_type, fields = ARCHITECTURES[arch]
    config = AutoConfig.for_model(model_type, vocab_size=_VOCABULARY, **_SPECIAL_IDS, **fields, **overrides)
    model = auto_class.from_config(config)
    _draw(model.parameters(), scale=0.3, seed=seed)
    return model.eval()


def _with_random_adapter(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> Any:
    adapted = get_peft_model(model, config)
    _draw([p for p in adapted.parameters() if p.requires_grad], scale=0.2, seed=seed)
    return adapted


def _draw(parameters: Any, *, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        # Biases and norms too: at 0 and 1 they would hide a change in how they are used.
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, scale, generator=generator)
