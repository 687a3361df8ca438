"""Exact batch arithmetic: which prompts a step takes, which rows an optimizer step and a micro-batch take, and how
rows are packed.

Everything is a function of the configuration, the seed and the step, never of the number of processes, so that the
same run comes out on any machine. Nothing here talks to other processes or to a model.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions that count real tokens from 0, 0 on padding: `attention_mask` (B, T), 1 = real, gives (B, T)."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0)


def seeded_generator(*key: int) -> torch.Generator:
    """A generator on the CPU whose numbers are a function of the integers in `key` alone."""
    state = 0
    for part in key:
        # A linear mix modulo a Mersenne prime keeps (0, 1) and (1, 0) apart, which a sum would not.
        state = (state * 1_000_003 + part + 1) % (2**61 - 1)
    return torch.Generator().manual_seed(state)


def seeded_permutation(size: int, *key: int) -> Tensor:
    """A permutation of range(size) that is a function of the integers in `key` alone; (size,) int64 on the CPU."""
    return torch.randperm(size, generator=seeded_generator(*key))


class PromptSchedule:
    """Which dataset indices each step takes: one seeded permutation an epoch, cut into steps, the ragged last one
    included.

    Args:
        num_prompts: prompts in the dataset.
        rollout_batch_size: prompts a step.
        total_epochs: passes over the dataset; or
        total_episodes: prompts in all (exactly one of the two).
        seed: of the permutations.

    Raises:
        ValueError: when the dataset is empty, or not exactly one of the two totals is given.
    """

    def __init__(
        self,
        num_prompts: int,
        rollout_batch_size: int,
        *,
        seed: int,
        total_epochs: int | None = None,
        total_episodes: int | None = None,
    ) -> None:
        if num_prompts < 1:
            raise ValueError(
                "train_dataset has no prompt left to train on (0 rows); check query_len and the file's columns"
            )
        if (total_epochs is None) == (total_episodes is None):
            raise ValueError(
                f"set exactly one of total_epochs ({total_epochs}) and total_episodes ({total_episodes}); null the "
                f"other"
            )
        self.num_prompts, self.rollout_batch_size, self.seed = num_prompts, rollout_batch_size, seed
        self.num_episodes = total_episodes if total_episodes is not None else num_prompts * (total_epochs or 0)
        self._steps_per_epoch = -(-num_prompts // rollout_batch_size)
        epochs, rest = divmod(self.num_episodes, num_prompts)
        self.num_steps = epochs * self._steps_per_epoch + -(-rest // rollout_batch_size)

    def epoch_at(self, step: int) -> float:
        """Passes over the dataset completed when `step` steps are done."""
        epoch, within = divmod(step, self._steps_per_epoch)
        done = epoch * self.num_prompts + min(within * self.rollout_batch_size, self.num_prompts)
        return min(done, self.num_episodes) / self.num_prompts

    def indices(self, step: int) -> list[int]:
        """Dataset indices of `step` (from 0): `rollout_batch_size` of them, fewer in the last step of an epoch.

        Raises:
            ValueError: for a step that the schedule does not have.
        """
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is not one of the schedule's {self.num_steps}; raise total_epochs")
        epoch, within = divmod(step, self._steps_per_epoch)
        start = within * self.rollout_batch_size
        stop = min(start + self.rollout_batch_size, self.num_prompts, self.num_episodes - epoch * self.num_prompts)
        indices: list[int] = seeded_permutation(self.num_prompts, self.seed, epoch)[start:stop].tolist()
        return indices

    def rows(self, step: int) -> int:
        """Number of prompts of `step`, without building the permutation."""
        epoch, within = divmod(step, self._steps_per_epoch)
        start = within * self.rollout_batch_size
        return min(
            self.rollout_batch_size, self.num_prompts - start, self.num_episodes - epoch * self.num_prompts - start
        )


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


class PackedRows(NamedTuple):
    """Rows moved to column 0 and trimmed to the longest one: what a causal model needs neither mask nor positions
    for.
    """

    input_ids: Tensor
    """(B, L) int64; L = longest prompt + response - 1 of these rows (the last response token predicts nothing)."""
    rows: Tensor
    """(N,) int64: row of each of the N tokens under response_mask."""
    states: Tensor
    """(N,) int64: column of the hidden state that chose the token, prompt length - 1 + t."""
    actions: Tensor
    """(N,) int64: column t of the token in `responses`."""


def pack_rows(queries: Tensor, query_attn_masks: Tensor, responses: Tensor, response_mask: Tensor) -> PackedRows:
    """Left-aligns prompt + response of each row and drops the columns that no row needs.

    A causal model's output at a real token does not depend on what stands to its right, so left-aligned rows need no
    attention mask, and positions count from 0 by themselves: results cannot depend on padding. Holes in
    `response_mask` (tokens that the policy did not choose) stay in the sequence; what follows the last masked token
    goes.

    Args:
        queries: (B, Q) int64, left-padded.
        query_attn_masks: (B, Q), 1 = real.
        responses: (B, R) int64, right-padded.
        response_mask: (B, R) bool, True = a token the policy chose.

    Raises:
        ValueError: when a row's prompt is empty: its first response token would have no state.
    """
    prompt_lengths = query_attn_masks.long().sum(dim=1)
    if bool((prompt_lengths == 0).any()):
        raise ValueError(
            f"query_attn_masks has no real token in row {int((prompt_lengths == 0).nonzero()[0])}; a prompt needs at "
            f"least one token"
        )
    columns = torch.arange(responses.size(1), device=responses.device)
    response_lengths = torch.where(response_mask, columns + 1, 0).amax(dim=1)
    # A row without response (a dummy that keeps ranks in step) costs one column, not its prompt.
    kept = torch.where(response_lengths > 0, prompt_lengths + response_lengths - 1, 1)
    width = int(kept.max())
    both = torch.cat([queries, responses], dim=1)
    source = torch.arange(width, device=queries.device) + (queries.size(1) - prompt_lengths).unsqueeze(1)
    inside = torch.arange(width, device=queries.device) < kept.unsqueeze(1)
    input_ids = both.gather(1, source.clamp_max(both.size(1) - 1)).where(inside, 0)
    rows, actions = response_mask.nonzero(as_tuple=True)
    return PackedRows(input_ids, rows, prompt_lengths[rows] - 1 + actions, actions)
