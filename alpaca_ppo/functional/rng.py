"""Random numbers that depend only on integer keys, never on how often or in which order they are drawn.

`stream_keys` and `uniforms` give each sampled token its random number, a function of (seed, step, round, prompt,
sample, position). They use a counter-based generator, SplitMix64, in int64 tensor operations, which wrap around in the
same way on every device. It has no state, so batch, rank and order of generation change no token.

`seeded_generator` and `seeded_permutation` serve what is drawn once for all ranks, such as the order of the prompts.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def stream_keys(
    *,
    seed: int,
    step: int,
    prompt_ids: Tensor,
    num_return_sequences: int,
    sampling_round: int = 0,
    sample_ids: Tensor | None = None,
) -> Tensor:
    """The key of each response's stream of random numbers, (B * num_return_sequences,) int64, prompt-major.

    Each coordinate selects one output of a generator that the coordinates before it seeded, so neighbouring tuples
    get unrelated keys.

    Args:
        seed: any integer.
        step: of the rollout.
        prompt_ids: (B,) int64, index of each prompt in its dataset.
        num_return_sequences: samples of each prompt.
        sampling_round: from 0; each round has other keys.
        sample_ids: (B,) int64, with `num_return_sequences` 1: which of its prompt's samples each row is; None numbers
            the samples of each prompt from 0.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), its output function.
    """
    # Scrambled first, as seeds may be neighbours.
    state = _next(torch.tensor(_signed(seed), device=prompt_ids.device), 0)
    state = _next(state, step)
    if sampling_round:
        # Outputs that no prompt takes, because prompts count from 0.
        state = _next(state, -sampling_round)
    if sample_ids is not None:
        return _next(_next(state, prompt_ids), sample_ids)
    samples = torch.arange(num_return_sequences, device=prompt_ids.device)
    return _next(_next(state, prompt_ids).unsqueeze(1), samples).flatten()


def uniforms(keys: Tensor, position: Tensor | int) -> Tensor:
    """The random number of each stream at a response position: (N,) float64 in the open interval (0, 1).

    `keys` are (N,) int64; `position` is the same for all rows, or (N,) int64, one for each.
    """
    # The upper 52 bits plus a half: the finest grid whose midpoints float64 holds exactly.
    return (_shift_right(_next(keys, position), 12).double() + 0.5) * 2.0**-52


def seeded_generator(*key: int) -> torch.Generator:
    """A generator on the CPU, seeded only by the integers in `key`."""
    state = 0
    for part in key:
        # A linear mix modulo a Mersenne prime gives (0, 1) and (1, 0) different seeds; a sum would not.
        state = (state * 1_000_003 + part + 1) % (2**61 - 1)
    return torch.Generator().manual_seed(state)


def seeded_permutation(size: int, *key: int) -> Tensor:
    """A permutation of range(size) that is a function of only the integers in `key`; (size,) int64 on the CPU."""
    return torch.randperm(size, generator=seeded_generator(*key))


def _next(state: Tensor, counter: Tensor | int) -> Tensor:
    """Output number `counter` (from 0) of SplitMix64 started at `state`; both int64, broadcast."""
    golden = _signed(_GOLDEN)
    x = state + (_signed((counter + 1) * golden) if isinstance(counter, int) else (counter + 1) * golden)
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIERS[1])
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # The shift of int64 is arithmetic: it fills the upper bits with the sign.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same low 64 bits as `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
