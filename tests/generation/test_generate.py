"""The sampler on every architecture: no effect of padding, other rows or order; log-probs equal a plain forward's."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from alpaca_ppo.generation import Generation, SamplingParams, generate
from alpaca_ppo.types import PromptBatch
from tests.tiny_models import ARCHITECTURES, EOS, PAD, tiny_causal_lm

# Long and short prompts, some with eos and pad ids inside, one of a single token.
PROMPTS = [[5, 9, 11, 20, 33, 7, 8], [EOS, PAD, 14], [40], [PAD, PAD, 9, EOS, EOS, 61]]
PROMPT_IDS = [3, 8, 1, 100]
WINDOWED = ["mistral", "gemma2", "gemma3"]
# transformers' eager attention computes its softmax in float32 for any dtype, and in float64 turns padding into NaN.
EAGER = ["gemma2", "bloom"]
MODELS = [(arch, {}) for arch in ARCHITECTURES] + [(arch, {"sliding_window": 4}) for arch in WINDOWED]


def padded(prompts: list[list[int]], extra: int = 0, ids: list[int] | None = None) -> PromptBatch:
    width = max(map(len, prompts)) + extra
    queries = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    if ids is None:
        ids = PROMPT_IDS if len(prompts) == len(PROMPT_IDS) else list(range(len(prompts)))
    return PromptBatch(queries=queries, query_attn_masks=mask, prompt_ids=torch.tensor(ids), rows=[])


SAMPLING: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 1.0,
    "pad_token_id": PAD,
    "stop_token_ids": (EOS, 7, 9, 10, 11),
    "seed": 3,
    "step": 1,
    "num_return_sequences": 3,
}
NAMES = {field.name for field in fields(SamplingParams)}


def run(
    model: PreTrainedModel,
    prompts: list[list[int]] = PROMPTS,
    ids: list[int] = PROMPT_IDS,
    extra: int = 2,
    **given: Any,
) -> Generation:
    """Fields of `SamplingParams` and keywords of `generate`, in `given`."""
    params = SamplingParams(**{**SAMPLING, **{name: given.pop(name) for name in NAMES & given.keys()}})
    return generate(model, padded(prompts, extra, ids), params, **given)


def rows(generation: Generation, index: Any) -> Generation:
    return generation[index]


def tensors_of(generation: Generation) -> list[Tensor]:
    return [tensor for tensor in vars(generation).values() if tensor is not None]


def assert_same(actual: Generation, expected: Generation, tolerance: float = 1e-5) -> None:
    assert torch.equal(actual.responses, expected.responses)
    assert torch.equal(actual.response_mask, expected.response_mask)
    assert torch.equal(actual.stopped, expected.stopped)
    assert (actual.logprobs[~actual.response_mask] == 0).all()
    # A relative tolerance too: these models' logits are in the tens, and float32 errors scale with them.
    assert_close(actual.logprobs, expected.logprobs, rtol=tolerance, atol=tolerance)


def full_forward_logprobs(model: PreTrainedModel, prompt: list[int], tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs of `tokens` after `prompt`, from one forward pass without padding or cache."""
    sequence = torch.cat([torch.tensor(prompt), tokens])[None]
    with torch.no_grad():
        logits = model(sequence, attention_mask=torch.ones_like(sequence), use_cache=False).logits
    logits = logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("arch", "overrides"), MODELS)
def test_padding_changes_nothing_and_logprobs_equal_a_plain_forward_pass(
    arch: str, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    exact = dtype == torch.float64 and arch not in EAGER
    model = tiny_causal_lm(arch, dtype=dtype if exact else torch.float32, **overrides)
    tolerance = 1e-9 if exact else 1e-5
    together = run(model, temperature=0.9)
    assert together.logprobs.dtype == model.dtype
    for i, prompt in enumerate(PROMPTS):
        mine = rows(together, slice(3 * i, 3 * i + 3))
        assert_same(mine, run(model, [prompt], [PROMPT_IDS[i]], extra=0, temperature=0.9), tolerance)
        for j in range(3):
            length = int(mine.response_mask[j].sum())
            expected = full_forward_logprobs(model, prompt, mine.responses[j, :length], 0.9)
            assert_close(mine.logprobs[j, :length], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("arch", "overrides"), MODELS)
def test_all_backends_sample_the_same_tokens(arch: str, overrides: dict[str, Any]) -> None:
    model = tiny_causal_lm(arch, **overrides)
    for do_sample in (True, False):
        expected = run(model, backend="generate", do_sample=do_sample)
        assert_same(run(model, backend="auto", do_sample=do_sample, rows_at_once=5), expected)


@pytest.mark.parametrize("arch", ["gemma3", "bloom"])
def test_a_half_precision_model_gives_float32_logprobs_of_its_own_logits(arch: str) -> None:
    model = tiny_causal_lm(arch, dtype=torch.bfloat16)
    together = run(model)
    assert together.logprobs.dtype == torch.float32
    longest = rows(together, slice(0, 3))
    assert_same(longest, run(model, PROMPTS[:1], PROMPT_IDS[:1], extra=0))
    for j in range(3):
        length = int(longest.response_mask[j].sum())
        expected = full_forward_logprobs(model.float(), PROMPTS[0], longest.responses[j, :length], 1.0)
        # bfloat16 has eight bits of precision, so the float32 model with the same weights is only close.
        assert (longest.logprobs[j, :length] - expected).abs().median() < 0.1


def test_several_samples_of_a_prompt_are_those_of_separate_calls() -> None:
    model = tiny_causal_lm("qwen3")
    five, three, one = (run(model, num_return_sequences=n) for n in (5, 3, 1))
    assert_same(rows(five, [0, 1, 2, 5, 6, 7, 10, 11, 12, 15, 16, 17]), three)
    assert_same(rows(three, slice(0, None, 3)), one)
    assert len({tuple(row) for row in five.responses[:5].tolist()}) == 5


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 2}, {"ids": [4, 9, 2, 101]}])
def test_seed_step_and_prompt_id_change_the_tokens(change: dict[str, Any]) -> None:
    model = tiny_causal_lm("llama")
    same_rows = (run(model).responses == run(model, **change).responses).all(dim=1)
    assert same_rows.sum() <= 2  # Responses that stop at the first token may agree by chance.


@pytest.mark.parametrize("backend", ["slots", "generate"])
def test_the_models_generation_config_does_not_matter(backend: str) -> None:
    model = tiny_causal_lm("llama")
    plain = run(model, backend=backend)
    overrides = {
        "repetition_penalty": 5.0,
        "top_k": 2,
        "top_p": 0.1,
        "min_p": 0.5,
        "temperature": 0.1,
        "do_sample": True,
        "min_length": 30,
        "min_new_tokens": 10,
        "no_repeat_ngram_size": 1,
        "bad_words_ids": [[int(plain.responses[0, 0])]],
        "suppress_tokens": plain.responses[3:5, 0].tolist(),
        "begin_suppress_tokens": plain.responses[5:7, 0].tolist(),
        "forced_bos_token_id": 5,
        "forced_eos_token_id": 6,
        "eos_token_id": [20, 21, 22],
        "max_length": 9,
        "num_beams": 3,
        "num_return_sequences": 2,
        "exponential_decay_length_penalty": (1, 5.0),
        "renormalize_logits": True,
        "use_cache": False,
    }
    for name, value in overrides.items():
        setattr(model.generation_config, name, value)
    config = model.generation_config
    model.config.use_cache = False
    assert_same(run(model, backend=backend), plain, 1e-7)
    assert model.generation_config is config and config.repetition_penalty == 5.0


def test_a_pad_token_that_is_the_stop_token_still_counts_as_chosen() -> None:
    model = tiny_causal_lm("llama")
    distinct = run(model, pad_token_id=0)
    same = run(model, pad_token_id=EOS, stop_token_ids=[EOS, 7, 9, 10, 11])
    assert torch.equal(same.response_mask, distinct.response_mask)
    assert torch.equal(same.responses[same.response_mask], distinct.responses[distinct.response_mask])
    assert (same.responses[~same.response_mask] == EOS).all()
    assert (distinct.responses[~distinct.response_mask] == 0).all()
    last = same.responses.gather(1, same.response_mask.sum(dim=1, keepdim=True) - 1)[:, 0]
    assert torch.equal(torch.isin(last, torch.tensor([EOS, 7, 9, 10, 11])), same.stopped)


@pytest.mark.parametrize("backend", ["slots", "generate"])
def test_responses_may_stop_at_the_first_token_or_never(backend: str) -> None:
    model = tiny_causal_lm("gpt2")
    at_once = run(model, stop_token_ids=range(64), backend=backend)
    assert at_once.response_mask.sum(dim=1).tolist() == [1] * 12 and at_once.stopped.all()
    assert (at_once.responses[:, 1:] == PAD).all() and (at_once.logprobs[:, 1:] == 0).all()
    never = run(model, stop_token_ids=[], backend=backend)
    assert never.response_mask.all() and not never.stopped.any()
    assert torch.equal(never.responses[:, 0], at_once.responses[:, 0])
    single = run(model, max_new_tokens=1, backend=backend)
    assert single.responses.shape == (12, 1) and torch.equal(single.responses[:, 0], never.responses[:, 0])


def test_truncate_tokens_end_a_response_only_after_enough_tokens() -> None:
    model = tiny_causal_lm("llama")
    free = run(model, stop_token_ids=[])
    cut = run(model, stop_token_ids=[], truncate_token_ids=range(64), truncate_after=4)
    assert cut.response_mask.sum(dim=1).tolist() == [5] * 12 and cut.stopped.all()
    assert torch.equal(cut.responses[:, :5], free.responses[:, :5])


def test_top_k_and_top_p_restrict_what_is_sampled() -> None:
    model = tiny_causal_lm("llama")
    greedy = run(model, do_sample=False)
    assert_same(run(model, top_k=1), greedy)
    assert_same(run(model, top_p=1e-6), greedy)
    assert not torch.equal(run(model, top_k=2).responses, run(model).responses)


def modes(model: PreTrainedModel) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("backend", ["slots", "generate"])
def test_a_model_in_train_mode_with_checkpointing_samples_the_same_and_keeps_its_modes(backend: str) -> None:
    for arch in ("gpt2", "llama", "phi" if backend == "slots" else "bloom"):
        model = tiny_causal_lm(arch)
        expected = run(model, backend=backend)
        model.train()
        model.gradient_checkpointing_enable()
        model.get_input_embeddings().eval()
        before, state = modes(model), torch.get_rng_state()
        actual = run(model, backend=backend)
        assert_same(actual, expected, 1e-7)
        assert modes(model) == before and torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()
        assert not actual.logprobs.requires_grad and not actual.logprobs.is_inference()


@pytest.mark.parametrize("backend", ["slots", "generate"])
def test_an_exception_restores_the_models_modes_and_config(backend: str) -> None:
    model = tiny_causal_lm("llama").train()
    model.model.norm.eval()
    before, config = modes(model), model.generation_config

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    hook = model.lm_head.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        run(model, backend=backend)
    hook.remove()
    assert modes(model) == before and model.generation_config is config and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens \(0\)"),
        ({"num_return_sequences": 0}, r"num_return_sequences \(0\)"),
        ({"temperature": 0.0}, r"temperature \(0.0\) must be positive; for greedy decoding: do_sample=False"),
        ({"temperature": float("nan")}, r"temperature \(nan\)"),
        ({"sample_ids": (0,)}, r"num_return_sequences \(3\) must be 1 where sample_ids are given"),
        ({"top_k": 0}, r"top_k \(0\)"),
        ({"top_p": 0.0}, r"top_p \(0.0\)"),
        ({"top_p": 1.5}, r"top_p \(1.5\)"),
        ({"backend": "vlm"}, "generation_backend is 'vlm'; choose one of auto, slots, generate, vllm"),
    ],
)
def test_an_argument_out_of_range_is_an_error(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny_causal_lm("llama"), **argument)


EMPTY = torch.zeros(0, 3, dtype=torch.long)
BATCH = padded(PROMPTS)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (padded([[5], []], 1), "the prompt in row 1 is empty"),
        ({"queries": EMPTY, "query_attn_masks": EMPTY, "prompt_ids": EMPTY[:, 0], "rows": []}, "queries has no rows"),
        ({**BATCH, "query_attn_masks": BATCH["query_attn_masks"].flip(1)}, "padding after a token in row 1"),
    ],
)
def test_prompts_that_are_empty_or_not_left_padded_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny_causal_lm("llama"), batch, SamplingParams(**SAMPLING))
