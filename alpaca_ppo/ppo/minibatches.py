"""Exact batch arithmetic: which prompts a step takes, which rows an optimizer step and a micro-batch take, and how
rows are packed.

Everything is a function of the configuration, the seed and the step, never of the number of processes, so that the
same run comes out on any machine. Nothing here talks to other processes or to a model.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from alpaca_ppo.functional.rng import seeded_permutation


def optimizer_steps(rows: int, step_batch_size: int, ppo_epochs: int) -> int:
    """Optimizer steps that a rollout of `rows` responses gives: ppo_epochs * ceil(rows / step_batch_size)."""
    return ppo_epochs * -(-rows // step_batch_size)


def update_batches(
    rows: int, step_batch_size: int, ppo_epochs: int, key: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """The epoch (from 0) and the rows of each optimizer step: a permutation for each epoch, seeded by `key` and the
    epoch, cut into `step_batch_size`, the last ragged.
    """
    for epoch in range(ppo_epochs):
        for batch in torch.split(seeded_permutation(rows, *key, epoch), step_batch_size):
            yield epoch, batch


def chunks_by_length(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Positions 0..len-1 in chunks of at most `max_rows`, longest first, so that padding within a chunk is small."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[i : i + max_rows] for i in range(0, len(order), max_rows)]


def plan_micro_batches(lengths: Sequence[int], *, num_ranks: int, num_micro_batches: int) -> list[list[list[int]]]:
    """Which positions each rank trains in each micro-batch: `plan[rank][micro_batch]` is a list of positions,
    possibly empty.

    Rows are sorted by length and cut into num_ranks * num_micro_batches runs whose sizes differ by at most one, so
    rows of a micro-batch have near the same length. Ranks take neighbouring runs, in alternating order, so that they
    wait little for each other. Every rank gets the same number of micro-batches, empty ones included, because
    collectives must match.

    Args:
        lengths: tokens (prompt and response) of each row of the optimizer step.
        num_ranks: processes.
        num_micro_batches: accumulation steps, equal on every rank.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets = num_ranks * num_micro_batches
    size, larger = divmod(len(order), buckets)
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    start = 0
    for bucket in range(buckets):
        stop = start + size + (bucket < larger)
        micro, place = divmod(bucket, num_ranks)
        rank = place if micro % 2 == 0 else num_ranks - 1 - place
        plan[rank].append(order[start:stop])
        start = stop
    return plan
