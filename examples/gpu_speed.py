"""How fast this machine decodes with models of known shapes, as shares of what its memory can do.

`gpu_smoke` and the GPU part of the benchmark use it. On a CPU it runs with tiny shapes and says nothing about speed.

Weights are random, and no response ends before its last token, so that every way decodes the same number of tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from alpaca_ppo.generation import SamplingParams, generate
from alpaca_ppo.types import PromptBatch

PAD, EOS = 0, 1
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 128,
    },
}
"""Qwen2.5's, and one for tests, with heads of the smallest size that vLLM takes on a CPU."""
_COMMON = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
PEAKS = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-80GB": (2.04e12, 312e12),
    "A100": (1.56e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
    "4090": (1.01e12, 165e12),
}
"""Bytes and dense bfloat16 FLOPs a second by data sheet; the first name that the device's contains."""


@dataclass(frozen=True)
class Peak:
    """What a device can do at most, or what a large copy and a large product reached."""

    bytes_per_second: float
    flops_per_second: float
    source: str
    """Where the two are from."""


def build(shape: str, device: torch.device, dtype: torch.dtype, **fields: Any) -> PreTrainedModel:
    """A model of `SHAPES[shape]` with random weights, made on `device`; `fields` replace those of its configuration."""
    torch.manual_seed(0)
    given = {**_COMMON, **SHAPES[shape], "pad_token_id": PAD, "eos_token_id": EOS, **fields}
    config = AutoConfig.for_model("qwen2", **given)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def synchronized_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `call` takes, until the device has finished."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_of(device: torch.device, size: int = 8192) -> Peak:
    """The data sheet's figures for a known GPU; otherwise measured on tensors of `size` x `size` numbers."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for part, figures in PEAKS.items():
        if part in name:
            return Peak(*figures, source="data sheet")
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy, product = (
        min(synchronized_seconds(call, device) for _ in range(5)) for call in (lambda: a.clone(), lambda: a @ b)
    )
    # A copy reads and writes every byte.
    return Peak(2 * a.nbytes / copy, 2 * size**3 / product, source="measured: a copy and a matrix product")


def _own(model: PreTrainedModel, prompts: Tensor, tokens: int, backend: str) -> None:
    batch = PromptBatch(
        queries=prompts, query_attn_masks=torch.ones_like(prompts), prompt_ids=torch.arange(len(prompts)), rows=[]
    )
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0, pad_token_id=PAD, stop_token_ids=())
    generate(model, batch, params, backend=backend)


def _config(tokens: int, **fields: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=None, **fields
    )


@torch.no_grad()
def _static_cache(model: PreTrainedModel, prompts: Tensor, tokens: int) -> None:
    mask = torch.ones_like(prompts)
    config = _config(tokens, cache_implementation="static")
    model.generate(prompts, attention_mask=mask, generation_config=config)  # type: ignore[operator]


@torch.no_grad()
def _continuous_batching(model: PreTrainedModel, prompts: Tensor, tokens: int) -> None:
    model.generate_batch(inputs=prompts.tolist(), generation_config=_config(tokens))  # type: ignore[operator]


WAYS: dict[str, Callable[[PreTrainedModel, Tensor, int], None]] = {
    "slots": lambda model, prompts, tokens: _own(model, prompts, tokens, backend="slots"),
    "generate": lambda model, prompts, tokens: _own(model, prompts, tokens, backend="generate"),
    "static cache": _static_cache,
    "continuous batching": _continuous_batching,
}
"""Ways to sample: this package's slots, `model.generate` with its choice of tokens and with a static cache, and
transformers' continuous batching, which on a CPU takes half a minute for whatever it does."""


@dataclass(frozen=True)
class DecodingSpeed:
    """What decoding reached."""

    tokens_per_second: float
    bandwidth_share: float
    """Bytes of weights and cache that a step must read, times the steps a second, of what the memory can do."""


def decoding_speed(
    model: PreTrainedModel, way: str, peak: Peak, *, rows: int, prompt_len: int = 128, tokens: int = 256
) -> DecodingSpeed:
    """The speed of `WAYS[way]` with `rows` rows, without prefill: the second half of the tokens is timed, as the
    difference of two calls. A call of either length comes first, in which kernels are compiled.
    """
    device = model.device
    prompts = torch.randint(2, model.config.vocab_size, (rows, prompt_len), device=device)
    short, long = (
        min(synchronized_seconds(partial(WAYS[way], model, prompts, n), device) for _ in range(3))
        for n in (tokens // 2, tokens)
    )
    steps_per_second = (tokens - tokens // 2) / max(long - short, 1e-9)
    read = step_bytes(model, rows=rows, columns=prompt_len + tokens * 3 // 4)
    return DecodingSpeed(rows * steps_per_second, read * steps_per_second / peak.bytes_per_second)


def step_bytes(model: PreTrainedModel, *, rows: int, columns: int) -> int:
    """Bytes that a decode step must read: each weight once, but of an embedding that is not also the head only the
    rows' lines, and the keys and values of `rows` rows of `columns` tokens.
    """
    config = model.config
    weights: Any = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    size = config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * size * rows * columns
    return int(weights + numbers * model.dtype.itemsize)
