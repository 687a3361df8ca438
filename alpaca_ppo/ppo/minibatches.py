"""Which rows of the rollouts form an optimizer step, a micro-batch, and a chunk of similar length.

The rows of an optimizer step depend on the configuration, the seed and the step, but not on the number of processes, so
a run is the same on any machine. The order of prompts is in `data.schedule`, the padding of rows in
`functional.packing`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from alpaca_ppo.functional.rng import seeded_permutation


def optimizer_steps(rows: int, step_batch_size: int, ppo_epochs: int) -> int:
    """Returns the optimizer steps of a rollout of `rows` responses: ppo_epochs * ceil(rows / step_batch_size)."""
    return ppo_epochs * -(-rows // step_batch_size)


def update_batches(
    rows: int, step_batch_size: int, ppo_epochs: int, key: tuple[int, ...]
) -> Iterator[tuple[int, Tensor]]:
    """Yields the epoch (from 0) and the rows (int64 indices) of each optimizer step.

    Each epoch is a permutation of all rows, seeded by `key` and the epoch, and split into batches of `step_batch_size`;
    the last batch may be smaller.
    """
    for epoch in range(ppo_epochs):
        for batch in torch.split(seeded_permutation(rows, *key, epoch), step_batch_size):
            yield epoch, batch


def chunks_by_length(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Returns the indices of `lengths` in chunks of at most `max_rows`, longest first, so that chunks need little
    padding.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[i : i + max_rows] for i in range(0, len(order), max_rows)]


def plan_micro_batches(lengths: Sequence[int], *, num_ranks: int, num_micro_batches: int) -> list[list[list[int]]]:
    """Returns the rows that each rank trains on: `plan[rank][micro_batch]` is a list of indices, possibly empty.

    Rows are sorted by length and split into num_ranks * num_micro_batches buckets whose sizes differ by at most one, so
    the rows of a micro-batch have similar lengths. The ranks' i-th micro-batches are neighbouring buckets, in
    alternating order, so that ranks rarely wait for each other. Every rank gets the same number of micro-batches,
    including empty ones, because collective operations must match.

    Args:
        lengths: tokens (prompt and response) of each row of the optimizer step.
        num_ranks: number of processes.
        num_micro_batches: gradient accumulation steps, equal on every rank.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_buckets = num_ranks * num_micro_batches
    size, num_larger = divmod(len(order), num_buckets)
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    start = 0
    for bucket in range(num_buckets):
        stop = start + size + (bucket < num_larger)
        micro_batch, offset = divmod(bucket, num_ranks)
        rank = offset if micro_batch % 2 == 0 else num_ranks - 1 - offset
        plan[rank].append(order[start:stop])
        start = stop
    return plan
