"""Random numbers: the published generator, uniform and independent along each coordinate; seeded permutations."""

import functools

import pytest
import torch
from torch import Tensor

from alpaca_ppo.functional.rng import seeded_generator, seeded_permutation, stream_keys, uniforms

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# A chi-square of 63 degrees of freedom leaves this interval with probability 2e-4 (Wilson and Hilferty:
# 63 * (1 - 2/567 +- 3.719 * sqrt(2/567))^3). Numbers that are too even are as suspicious as uneven ones.
CHI2_63 = (29.4, 113.7)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@functools.cache
def numbers(coordinate: str, count: int = 8192) -> Tensor:
    """`count` numbers that differ in one coordinate alone."""
    if coordinate == "position":
        keys = stream_keys(seed=1, step=2, prompt_ids=torch.tensor([3]), num_return_sequences=1)
        return torch.cat([uniforms(keys, position) for position in range(count)])
    if coordinate == "sample":
        return uniforms(stream_keys(seed=1, step=2, prompt_ids=torch.tensor([3]), num_return_sequences=count), 5)
    if coordinate == "prompt":
        return uniforms(stream_keys(seed=1, step=2, prompt_ids=torch.arange(count), num_return_sequences=1), 5)
    one = torch.tensor([3])
    coordinates = [{"seed": 1, "step": 2, coordinate: value} for value in range(count)]
    return uniforms(torch.cat([stream_keys(**c, prompt_ids=one, num_return_sequences=1) for c in coordinates]), 5)


def chi_square(cells: Tensor) -> float:
    counts = torch.bincount(cells, minlength=64).double()
    expected = len(cells) / 64
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_generator_is_splitmix64() -> None:
    # The first outputs for seed 1234567, as its author's C program prints them.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    for position, output in enumerate(published):
        assert uniforms(torch.tensor([1234567]), position).item() == ((output >> 12) + 0.5) / 2**52


def splitmix64(state: int, counter: int) -> int:
    """Output `counter` of the generator in Python's own integers."""
    x = (state + (counter + 1) * GOLDEN) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def test_a_key_is_the_generator_started_by_each_coordinate_in_turn() -> None:
    # Pinned, because the same run must come out of a later version too.
    keys = stream_keys(seed=-7, step=11, prompt_ids=torch.tensor([5, 2**40]), num_return_sequences=2)
    prompts = [splitmix64(splitmix64(splitmix64(-7 & MASK, 0), 11), prompt) for prompt in (5, 2**40)]
    assert keys.tolist() == [signed(splitmix64(prompt, sample)) for prompt in prompts for sample in range(2)]


def test_a_later_round_has_keys_of_its_own_and_the_first_has_those_without_rounds() -> None:
    # Round r takes output -r of the generator that the step seeded, before the prompt's.
    step = splitmix64(splitmix64(9, 0), 4)
    for number in (1, 2):
        keys = stream_keys(seed=9, step=4, sampling_round=number, prompt_ids=torch.tensor([3]), num_return_sequences=1)
        assert keys.item() == signed(splitmix64(splitmix64(splitmix64(step, -number), 3), 0))
    rounds = [
        stream_keys(seed=9, step=4, sampling_round=r, prompt_ids=torch.arange(9), num_return_sequences=2).tolist()
        for r in range(4)
    ]
    assert len(set(sum(rounds, []))) == 4 * 18
    assert rounds[0] == stream_keys(seed=9, step=4, prompt_ids=torch.arange(9), num_return_sequences=2).tolist()


def test_uniforms_reach_neither_zero_nor_one() -> None:
    # The output function maps 0 to 0, so the key -GOLDEN gives the smallest number. The key of the largest is found by
    # running the function backwards from 2^64 - 1.
    x = MASK
    x ^= (x >> 31) ^ (x >> 62)
    x = x * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    x ^= (x >> 30) ^ (x >> 60)
    keys = torch.tensor([signed(-GOLDEN & MASK), signed((x - GOLDEN) & MASK)])
    assert uniforms(keys, 0).tolist() == [2.0**-53, 1 - 2.0**-53]


def test_every_coordinate_matters_and_nothing_else_does() -> None:
    seen: set[float] = set()
    for seed in (-1, 0, 1, 2**63 + 5):
        for step in range(3):
            keys = stream_keys(seed=seed, step=step, prompt_ids=torch.arange(4), num_return_sequences=3)
            for position in range(3):
                seen.update(uniforms(keys, position).tolist())
    assert len(seen) == 4 * 3 * 4 * 3 * 3
    alone = stream_keys(seed=0, step=1, prompt_ids=torch.tensor([2]), num_return_sequences=2)
    among = stream_keys(seed=0, step=1, prompt_ids=torch.tensor([0, 2, 1]), num_return_sequences=3)
    assert alone.tolist() == among[3:5].tolist()


@pytest.mark.parametrize("coordinate", ["seed", "step", "prompt", "sample", "position"])
def test_numbers_are_uniform_along_each_coordinate(coordinate: str) -> None:
    low, high = CHI2_63
    assert low < chi_square((numbers(coordinate) * 64).long()) < high


@pytest.mark.parametrize("coordinate", ["seed", "step", "prompt", "sample", "position"])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_numbers_are_independent_of_their_neighbours(coordinate: str, lag: int) -> None:
    values = (numbers(coordinate) * 8).long().unflatten(0, (-1, 2, lag))
    low, high = CHI2_63
    assert low < chi_square((values[:, 0] * 8 + values[:, 1]).flatten()) < high


def test_a_seeded_generator_repeats_its_numbers_for_the_same_key_alone() -> None:
    # Pinned, because the same run must come out of a later version too: (0 * 1_000_003 + 6) * 1_000_003 + 8 for (5, 7).
    assert seeded_generator(5, 7).initial_seed() == 6 * 1_000_003 + 8
    draws = [torch.rand(3, generator=seeded_generator(*key)).tolist() for key in ((5, 7), (5, 7), (7, 5), (5,))]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2] and draws[0] != draws[3]


def test_a_permutation_depends_on_its_whole_key() -> None:
    assert sorted(seeded_permutation(50, 1, 2).tolist()) == list(range(50))
    assert torch.equal(seeded_permutation(50, 1, 2), seeded_permutation(50, 1, 2))
    keys = [(1, 2), (2, 1), (0, 3), (3, 0), (3,), (1, 2, 0)]
    assert len({tuple(seeded_permutation(50, *key).tolist()) for key in keys}) == len(keys)


def test_rows_have_positions_of_their_own() -> None:
    keys, positions = torch.tensor([5, -7, 1 << 40]), torch.tensor([0, 9, 3])
    each = [uniforms(key[None], int(position)) for key, position in zip(keys, positions, strict=True)]
    assert torch.equal(uniforms(keys, positions), torch.cat(each))
