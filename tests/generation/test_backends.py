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
    assert given["before_token"]() is None
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
        register_generation_backend("mine", refills=True, takes_turns=True)(len)
        for trait in ("refills", "takes_turns"):
            assert not GENERATION_BACKENDS.trait("plain", trait) and GENERATION_BACKENDS.trait("mine", trait)


def refilling(reported: list[int]) -> Any:
    """A backend that reports these rows of four one by one."""

    def sample(
        model: Any,
        queries: Tensor,
        mask: Tensor,
        *,
        sampling_params: SamplingParams,
        slots: Any,
        on_finished: Any,
        **_: Any,
    ) -> Generation:
        shape = (len(queries) * sampling_params.num_return_sequences, sampling_params.max_new_tokens)
        numbers = torch.arange(shape[0]).unsqueeze(1).expand(shape) + 10 * (slots or 0)
        whole = Generation(numbers, numbers >= 0, -1.0 * numbers, numbers[:, 0] > 0)
        for row in reported:
            if on_finished is not None:
                on_finished([row], Generation(*(tensor[[row % 4]] for tensor in vars(whole).values())))
        return whole

    return sample


def test_a_backend_that_refills_gets_slots_and_reports_rows() -> None:
    model, seen = tiny_causal_lm("llama"), []
    with temporary_choices():
        register_generation_backend("one_by_one", refills=True)(refilling([3, 2, 1, 0]))
        settings = {
            **SETTINGS,
            "slots": 2,
            "on_finished": lambda rows, found: seen.append((rows, found.responses.tolist())),
        }
        generate(model, QUERIES, MASK, **settings, backend="one_by_one")
        assert seen == [([row], [[20 + row] * 3]) for row in (3, 2, 1, 0)]
        generate(model, QUERIES, MASK, **SETTINGS, backend="one_by_one")
        for name, reported, passed_on, problem in (
            ("twice", [0, 1, 0, 2, 3], [0, 1], r"with the rows \[0\] of 4"),
            ("unknown", [0, 4], [0], r"with the rows \[4\] of 4"),
            ("missing", [2, 0], [2, 0], r"without the rows \[1, 3\] of 4"),
        ):
            seen.clear()
            register_generation_backend(name, refills=True)(refilling(reported))
            with pytest.raises(ValueError, match=f"'{name}' called on_finished {problem}; .* once for each row"):
                generate(model, QUERIES, MASK, **settings, backend=name)
            assert [row for rows, _ in seen for row in rows] == passed_on


def test_a_backend_without_slots_reports_all_rows_at_the_end() -> None:
    seen: list[Any] = []
    generation = generate(
        tiny_causal_lm("llama"),
        QUERIES,
        MASK,
        **SETTINGS,
        backend="generate",
        slots=1,
        on_finished=lambda rows, finished: seen.append((rows, finished)),
    )
    assert seen == [([0, 1, 2, 3], generation)]


def test_logits_that_are_not_finite_are_an_error_before_a_row_is_reported() -> None:
    model = tiny_causal_lm("llama")
    model.lm_head.weight.data[5] = float("nan")
    settings = {**SETTINGS, "slots": 1, "on_finished": lambda rows, finished: pytest.fail("reported")}
    with pytest.raises(ValueError, match="not finite at response position 0 of row 0"):
        generate(model, QUERIES, MASK, **settings)
