"""The choice of a token: literal cases, the distribution of sampled tokens, and the log-prob of the chosen one."""

import math

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation.token_sampling import choose_tokens

EDGES = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_a_token_is_chosen_where_the_cumulative_sum_exceeds_the_number() -> None:
    # Cumulative sums of (.1, .2, .3, .4): .1, .3, .6, 1.
    numbers = torch.tensor([0.05, 0.11, 0.29, 0.31, 0.59, 0.61, 0.99], dtype=torch.float64)
    choice = choose_tokens(logits_of(0.1, 0.2, 0.3, 0.4).expand(7, 4), numbers, temperature=1.0)
    assert choice.tokens.tolist() == [0, 1, 1, 2, 2, 3, 3]
    expected = torch.tensor([0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4], dtype=torch.float64).log()
    assert_close(choice.logprobs, expected, rtol=1e-12, atol=0)


def test_temperature_divides_the_logits_for_choice_and_logprob() -> None:
    # At temperature 1/2, (.2, .8) becomes (.04, .64)/.68 = (1/17, 16/17), and .1 exceeds the first.
    numbers = torch.tensor([0.1], dtype=torch.float64)
    choice = choose_tokens(logits_of(0.2, 0.8)[None], numbers, temperature=0.5)
    assert choice.tokens.item() == 1
    assert_close(choice.logprobs.item(), math.log(16 / 17), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [3, 256, 257, 700])
def test_a_token_of_probability_zero_is_never_chosen(size: int) -> None:
    logits = torch.full((2, size), float("-inf"))
    logits[:, 1] = 0.0
    assert choose_tokens(logits, EDGES, temperature=1.0).tokens.tolist() == [1, 1]
    logits[:, size - 2] = 0.0
    assert choose_tokens(logits, EDGES, temperature=1.0).tokens.tolist() == [1, size - 2]


def test_rounding_at_the_ends_of_a_block_still_finds_a_token_with_mass() -> None:
    # Cumulative sums are rounded; for every number, the chosen token must have mass.
    logits = torch.full((4000, 1000), float("-inf"))
    logits[:, 100:900:3] = torch.randn(4000, 267, generator=torch.Generator().manual_seed(0)) * 8
    ends = torch.cat([2.0**-53 + torch.arange(2000) * 2.0**-52, 1 - 2.0**-53 - torch.arange(2000) * 2.0**-52])
    choice = choose_tokens(logits, ends.double(), temperature=1.0)
    assert choice.logprobs.isfinite().all()


def test_a_vocabulary_of_128k_keeps_every_token_its_mass() -> None:
    # The middle of each token's interval in a float64 cumulative sum must give that token; float32 sums miss most.
    logits = torch.randn(1, 128_256, generator=torch.Generator().manual_seed(0)) * 0.5
    probabilities = logits.double().softmax(dim=-1)[0]
    wanted = torch.arange(0, 128_256, 509)
    numbers = (probabilities.cumsum(0) - probabilities / 2)[wanted]
    choice = choose_tokens(logits.expand(len(wanted), -1), numbers, temperature=1.0)
    assert choice.tokens.tolist() == wanted.tolist()
    assert_close(choice.logprobs, probabilities[wanted].log().float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_chosen_tokens_follow_the_softmax(temperature: float) -> None:
    logits = torch.linspace(-2, 2, 301).sin()
    probabilities = (logits.double() / temperature).softmax(dim=0)
    numbers = uniforms(torch.arange(60_000) * 7919, 0)
    tokens = choose_tokens(logits.expand(60_000, -1), numbers, temperature=temperature).tokens
    counts = torch.bincount(tokens, minlength=301).double()
    expected = probabilities * 60_000
    assert expected.min() > 5  # With smaller counts the statistic does not follow a chi-square distribution.
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # 300 degrees of freedom, probability 1e-4 on either side: 300 * (1 - 2/2700 +- 3.719 * sqrt(2/2700))^3.
    assert 217.4 < statistic < 399.0


def test_logprobs_are_the_full_softmax_in_float32_or_better() -> None:
    logits = torch.randn(5, 777, generator=torch.Generator().manual_seed(1)) * 6
    numbers = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    for dtype, result, tolerance in (
        (torch.bfloat16, torch.float32, 1e-6),
        (torch.float32, torch.float32, 1e-6),
        (torch.float64, torch.float64, 1e-12),
    ):
        choice = choose_tokens(logits.to(dtype), numbers, temperature=0.7)
        expected = (logits.to(dtype).double() / 0.7).log_softmax(dim=-1).gather(1, choice.tokens[:, None])[:, 0]
        assert choice.logprobs.dtype == result
        assert_close(choice.logprobs.double(), expected, rtol=tolerance, atol=tolerance)


def test_no_number_means_the_most_likely_token() -> None:
    choice = choose_tokens(logits_of(0.2, 0.5, 0.3)[None], None, temperature=1.0)
    assert choice.tokens.item() == 1
    assert_close(choice.logprobs.item(), math.log(0.5), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("limits", "number", "token"),
    [
        # (.5, .3, .15, .05): the two most likely, renormalized, are .625 and .375.
        ({"top_k": 2}, 0.62, 0),
        ({"top_k": 2}, 0.63, 1),
        ({"top_k": 2}, 0.999, 1),
        ({"top_k": 1}, 0.999, 0),
        ({"top_k": 9}, 0.999, 3),
        # .5 does not reach .7, .5 + .3 does.
        ({"top_p": 0.7}, 0.63, 1),
        ({"top_p": 0.7}, 0.999, 1),
        ({"top_p": 0.001}, 0.999, 0),
        ({"top_p": 1.0}, 0.999, 3),
        # Of the three most likely, .5/.95 + .3/.95 = .842 reaches .83; of all four .8 would not.
        ({"top_k": 3, "top_p": 0.83}, 0.999, 1),
        ({"top_p": 0.83}, 0.999, 2),
    ],
)
def test_top_k_and_top_p_restrict_the_choice_and_not_the_logprob(
    limits: dict[str, float], number: float, token: int
) -> None:
    probabilities = (0.05, 0.5, 0.15, 0.3)
    by_rank = (1, 3, 2, 0)
    numbers = torch.tensor([number], dtype=torch.float64)
    logits = logits_of(*(probabilities[i] for i in by_rank))[None]
    choice = choose_tokens(logits, numbers, temperature=1.0, **limits)
    assert choice.tokens.item() == token
    assert_close(choice.logprobs.item(), math.log((0.5, 0.3, 0.15, 0.05)[token]), rtol=1e-12, atol=0)


def test_all_tokens_tied_at_the_kth_place_are_kept() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert choose_tokens(logits, EDGES[1:], temperature=1.0, top_k=2).tokens.item() == 3


def test_tokens_beyond_what_reaches_top_p_are_excluded_also_where_they_are_as_likely() -> None:
    # Four tokens of 1/4: two of them reach 1/2 exactly.
    choice = choose_tokens(torch.zeros(1, 4), EDGES[1:], temperature=1.0, top_p=0.5)
    assert choice.tokens.item() == 1


def test_a_nan_among_the_logits_makes_the_logprob_nan() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = float("nan")
    choice = choose_tokens(logits, EDGES, temperature=1.0)
    assert choice.logprobs.isnan().tolist() == [False, True]


def test_the_logits_are_not_changed() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    choose_tokens(logits, EDGES, temperature=1.0, top_k=2, top_p=0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [255, 256, 257, 3000])
def test_a_row_is_chosen_alone_as_among_others_to_the_last_bit(size: int) -> None:
    # Together the rows are summed in several chunks of blocks, alone in one.
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, size, generator=generator)
    numbers = torch.rand(300, generator=generator, dtype=torch.float64)
    given = logits.clone()
    together = choose_tokens(logits, numbers, temperature=1.0)
    alone = [
        choose_tokens(row[None], number[None], temperature=1.0) for row, number in zip(logits, numbers, strict=True)
    ]
    assert torch.equal(together.tokens, torch.cat([choice.tokens for choice in alone]))
    assert torch.equal(together.logprobs, torch.cat([choice.logprobs for choice in alone]))
    assert torch.equal(logits, given)
