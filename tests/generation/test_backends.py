"""Registered generation backends: what they get from `generate`, and what is checked of what they return."""

from typing import Any

import pytest
import torch
from torch import Tensor

from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation import Generation, SamplingParams, generate, register_generation_backend
from alpaca_ppo.registry import GENERATION_BACKENDS
from tests.registered import temporary_choices
from tests.tiny_models import EOS, PAD, tiny_causal_lm

QUERIES, MASK = torch.tensor([[PAD, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
SETTINGS: dict[str, Any] = {
    "prompt_ids": torch.tensor([4, 2]),
    "max_new_tokens": 3,
    "pad_token_id": PAD,
    "stop_token_ids": [EOS],
    "seed": 1,
    "step": 2,
    "num_return_sequences": 2,
}


def test_a_registered_backend_gets_trimmed_prompts_and_the_sampling_params() -> None:
    model, given = tiny_causal_lm("llama").train(), {}
    with temporary_choices():

        @register_generation_backend("two_tokens")
        def two_tokens(model: Any, queries: Tensor, query_attn_masks: Tensor, **keywords: Any) -> Generation:
            given.update(keywords, queries=queries, mask=query_attn_masks, training=model.training)
            given["grad"] = torch.is_grad_enabled()
            params: SamplingParams = keywords["sampling_params"]
            # A token from the random number that the other backends would use at position 0, and the stop token.
            numbers = uniforms(params.random_keys(keywords["prompt_ids"]), 0)
            responses = torch.full((4, 3), PAD)
            responses[:, 0], responses[:, 1] = (10 + 50 * numbers).long(), EOS
            mask = torch.tensor([[True, True, False]]).expand(4, 3)
            return Generation(responses, mask, -1.0 * mask, torch.ones(4, dtype=torch.bool))

        padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), QUERIES], dim=1)
        mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), MASK], dim=1)
        generation = generate(model, padded, mask, **SETTINGS, temperature=0.5, backend="two_tokens")
    assert torch.equal(given["queries"], QUERIES) and torch.equal(given["mask"], MASK)
    assert given["sampling_params"] == SamplingParams(
        max_new_tokens=3,
        temperature=0.5,
        pad_token_id=PAD,
        stop_token_ids=(EOS,),
        num_return_sequences=2,
        backend="two_tokens",
        seed=1,
        step=2,
    )
    assert given["any_rank"] is None and given["before_token"]() is None
    assert not given["training"] and not given["grad"] and model.training
    assert len(set(generation.responses[:, 0].tolist())) > 1 and generation.logprobs[0].tolist() == [-1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("text", "returned a str; it must return a generation.Generation"),
        (
            Generation(torch.ones(4, 2), torch.ones(4, 2), torch.ones(4, 2), torch.ones(4)),
            r"returned responses of shape \(4, 2\); it must be \(4, 3\): one row per response",
        ),
        (
            Generation(torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3)),
            r"returned stopped of shape \(4, 3\); it must be \(4,\)",
        ),
    ],
)
def test_what_a_registered_backend_returns_is_checked(returned: Any, message: str) -> None:
    with temporary_choices():
        register_generation_backend("mine")(lambda *args, **keywords: returned)
        with pytest.raises(ValueError, match=f"the generation_backend 'mine' {message}"):
            generate(tiny_causal_lm("llama"), QUERIES, MASK, **SETTINGS, backend="mine")


def test_a_backend_is_registered_with_its_traits() -> None:
    with temporary_choices():
        register_generation_backend("plain")(len)
        register_generation_backend("mine", stops_before_tokens=True, own_cache=True)(len)
        for trait in ("stops_before_tokens", "own_cache"):
            assert not GENERATION_BACKENDS.trait("plain", trait) and GENERATION_BACKENDS.trait("mine", trait)
