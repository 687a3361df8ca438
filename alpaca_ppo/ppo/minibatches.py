"""Which rows of the rollouts give a gradient, and form an optimizer step, a micro-batch, and a chunk of similar length;
and these rows on their way to the device.

The rows of an optimizer step depend on the configuration, the seed and the step, but not on the number of processes, so
a run is the same on any machine. The order of prompts is in `data.schedule`, the padding of rows in
`functional.packing`.

A response whose reward failed (`failed_rewards: mask`), or that this left without another one to compare it with, stays
in the rollouts: it gives no gradient, and is left out of whitening, groups and denominators
(`rollouts["trained_rows"]`). A response that was cut off (`mask_truncated`) only gives no gradient. Without these
options, `trained_rows` is absent and every response is learned from.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import any_rank, gather_list
from alpaca_ppo.distributed.optimizer import Part, StepCounts
from alpaca_ppo.functional.rng import seeded_permutation
from alpaca_ppo.functional.shaping import per_token
from alpaca_ppo.rewards.batch import RowFailure
from alpaca_ppo.types import Rollouts

_MAX_SHOWN = 8


def trained_rows(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B,) bool, True = the response gives a gradient."""
    rows = rollouts.get("trained_rows")
    if rows is None:
        rows = torch.ones(len(rollouts["response_mask"]), dtype=torch.bool)
    return rows & rollouts["stopped"] if args.mask_truncated else rows


def trained_mask(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B, R) bool, True = a token that gives a gradient."""
    return rollouts["response_mask"] & trained_rows(rollouts, args).unsqueeze(1)


def compared_mask(rollouts: Rollouts) -> Tensor:
    """(B, R) bool: the tokens from which advantages are estimated, those of responses that were cut off among them."""
    mask, rows = rollouts["response_mask"], rollouts.get("trained_rows")
    return mask if rows is None else mask & rows.unsqueeze(1)


def with_reward(rollouts: Rollouts) -> Rollouts:
    """The rollouts without the responses that `trained_rows` leaves out."""
    rows = rollouts.get("trained_rows")
    return rollouts if rows is None else {key: value[rows] for key, value in rollouts.items()}  # type: ignore


def add_baseline(rows: dict[str, Tensor], greedy: dict[str, Tensor], baseline_scores: Tensor) -> None:
    """Adds the scores (prompts,) of the greedy responses to the rows of the samples, which are not trained without.

    Args:
        rows: the samples, changed in place; each prompt has the same number of rows, next to one another.
        greedy: the greedy responses, one for each prompt.
        baseline_scores: (prompts,), of the greedy responses.
    """
    n = rows["responses"].size(0) // len(baseline_scores)
    rows["baseline_scores"] = baseline_scores.repeat_interleave(n)
    if "trained_rows" in rows:
        rows["trained_rows"] = rows["trained_rows"] & greedy["trained_rows"].repeat_interleave(n)


def shape_as_on_others(rows: dict[str, Tensor] | None, accelerator: Accelerator) -> dict[str, Tensor] | None:
    """`rows` with rewards (B, R) if another rank has such: one whose rewards all failed has scored no tokens.

    Every rank must call it.
    """
    of_tokens = bool(rows) and rows["rewards"].dim() == 2  # type: ignore[index]
    elsewhere = any_rank(of_tokens, accelerator)
    if not rows or of_tokens or not elsewhere or bool(rows["trained_rows"].any()):
        return rows
    return {**rows, "rewards": per_token(rows["rewards"], rows["response_mask"])}


def leave_out_failures(
    rollouts: Rollouts,
    failures: Sequence[RowFailure],
    accelerator: Accelerator,
    *,
    compares_group: bool,
    may_fail: bool,
) -> str:
    """Takes the responses out of the global `trained_rows` that have a reward but, of several to their prompt, are the
    only ones with one, if the estimator `compares_group`: their advantage would be their bare score. Every rank must
    call it.

    Args:
        rollouts: changed in place.
        failures: of this rank's rewards.
        accelerator: of the run.
        compares_group: whether responses to a prompt are compared.
        may_fail: whether all rewards may have failed.

    Returns:
        what to report: how many responses are not trained, and why; empty if all are.

    Raises:
        ValueError: on every rank, if no response is left, unless `may_fail`; this rank's first failure if it has one.
    """
    rows, alone = rollouts["trained_rows"], torch.zeros_like(rollouts["trained_rows"])
    if compares_group:
        _, group = torch.unique(rollouts["prompt_ids"], return_inverse=True)
        member = rows & rollouts["response_mask"].any(dim=1)
        members, failed = (torch.bincount(group[some], minlength=len(group))[group] for some in (member, ~rows))
        alone = member & (members == 1) & (failed > 0)
    rollouts["trained_rows"] = rows & ~alone
    own = [str(failure) for failure in failures[:_MAX_SHOWN]]
    errors = [error for of_rank in gather_list(own, accelerator) for error in of_rank]
    num_failed, num_alone = int((~rows).sum()), int(alone.sum())
    if not num_failed:
        return ""
    left = f", and {num_alone} because no other response to their prompt has a reward" if num_alone else ""
    shown = "\n".join(f"- {error}" for error in errors[:_MAX_SHOWN])
    text = f"{num_failed} of {len(rows)} responses give no gradient because their reward failed{left}:\n{shown}"
    if may_fail or bool(rollouts["trained_rows"].any()):
        return text
    raise failures[0] if failures else ValueError(text)


class UpdateStep(NamedTuple):
    """An optimizer step of the update on a rollout."""

    part: Part
    """What it trains."""
    rows: Tensor
    """(step batch,) int64, the rows of the global rollouts that it trains on."""
    step: int
    """The run's step, from 0."""
    key: tuple[int, ...]
    """Seeds its random numbers."""


def optimizer_steps(rows: int, step_batch_size: int, passes: int) -> int:
    """Returns the optimizer steps of a rollout of `rows` responses: passes * ceil(rows / step_batch_size)."""
    return passes * -(-rows // step_batch_size)


def step_counts(rows: int, args: PPOConfig, *, critic_only: bool) -> StepCounts:
    """Returns how many optimizer steps `plan_updates` plans for the same arguments."""
    critic = optimizer_steps(rows, args.critic_batch_rows, args.critic_passes) if args.uses_critic else 0
    policy = 0 if critic_only else optimizer_steps(rows, args.step_batch_size, args.ppo_epochs)
    joint = not critic_only and not args.separate_critic_steps
    return StepCounts(policy if joint else policy + critic, policy, critic)


def plan_updates(rows: int, args: PPOConfig, step: int, *, critic_only: bool) -> list[UpdateStep]:
    """Returns the optimizer steps of the update on a rollout of `rows` responses, in their order.

    Each epoch is a permutation of all rows, the same for policy and critic, split into batches, of which the last may
    be smaller. If the critic takes separate steps, all of them come first. Then no step of the policy is between the
    rollout, where the advantages' values were computed, and the steps of the critic that reads the policy's base model;
    and `target_kl_stop` ends the policy's steps without taking any from the critic.

    Args:
        rows: of the global rollouts.
        args: of the run.
        step: of the run, from 0.
        critic_only: leaves the policy's steps out.
    """
    kinds: list[tuple[Part, int, int]] = []
    if args.separate_critic_steps or critic_only:
        kinds.append(("critic", args.critic_batch_rows, args.critic_passes))
    if not critic_only:
        kinds.append(("policy" if args.separate_critic_steps else "both", args.step_batch_size, args.ppo_epochs))
    batches = [
        (part, epoch, batch)
        for part, size, epochs in kinds
        for epoch in range(epochs)
        for batch in torch.split(seeded_permutation(rows, args.seed, step, epoch), size)
    ]
    return [
        UpdateStep(part, batch, step, (args.seed, step, epoch, number))
        for number, (part, epoch, batch) in enumerate(batches)
    ]


def chunks_by_length(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Returns the indices of `lengths` in chunks of at most `max_rows`, longest first, so that chunks need little
    padding.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[i : i + max_rows] for i in range(0, len(order), max_rows)]


def chunks_by_tokens(lengths: Sequence[int], max_tokens: int, *, group: int) -> list[list[int]]:
    """Returns the indices of `lengths` in chunks of at most `max_tokens` tokens, in their order, for passes without
    padding.

    The rows of a group of `group` neighbours (the samples of a prompt) are in one chunk, unless they alone exceed
    `max_tokens`.
    """
    chunks: list[list[int]] = []
    tokens = 0
    for start in range(0, len(lengths), group):
        rows = list(range(start, min(start + group, len(lengths))))
        fit = sum(lengths[row] for row in rows) <= max_tokens
        for part in [rows] if fit else [[row] for row in rows]:
            more = sum(lengths[row] for row in part)
            if not chunks or tokens + more > max_tokens:
                chunks.append([])
                tokens = 0
            chunks[-1] += part
            tokens += more
    return chunks


Plan = list[list[list[int]]]
"""`plan[rank][micro_batch]` is a list of row indices, possibly empty; every rank has the same number of micro-batches,
because collective operations must match."""


def plan_micro_batches(lengths: Sequence[int], args: PPOConfig, *, padding_free: bool, num_ranks: int) -> Plan:
    """Returns the micro-batches of each rank for rows of `lengths` tokens (in the pass where each has the most), under
    the run's budget: the same on every rank.
    """
    if padding_free:
        return plan_packed_micro_batches(lengths, num_ranks=num_ranks, max_tokens=args.micro_batch_tokens)
    if args.max_tokens_per_micro_batch is None and num_ranks == 1:
        # On one process nobody waits for others. The number of a full step batch, also for a smaller last one.
        return plan_equal_rows(lengths, num_micro_batches=-(-args.step_batch_size // args.step_per_device_batch_size))
    return plan_padded_micro_batches(lengths, num_ranks=num_ranks, max_tokens=args.micro_batch_tokens)


def plan_packed_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> Plan:
    """Returns the rows that each rank trains on, in micro-batches of at most `max_tokens` tokens without padding.

    The number of micro-batches is the smallest for which longest-processing-time-first scheduling (Graham 1969: the
    longest row that is left goes to the bin with the fewest tokens) exceeds no budget, so bins are about equally full.
    A row of more than `max_tokens` tokens is a micro-batch of its own.

    Args:
        lengths: tokens of each row of the optimizer step, in the pass where it has the most.
        num_ranks: number of processes.
        max_tokens: the budget of a micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(lengths) // (num_ranks * max_tokens)))
    while True:
        bins = _longest_first(order, lengths, num_ranks * count)
        costs = [sum(lengths[i] for i in rows) for rows in bins]
        if all(cost <= max_tokens or len(rows) == 1 for rows, cost in zip(bins, costs, strict=True)):
            return _deal(bins, costs, num_ranks)
        count += 1


def plan_padded_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> Plan:
    """As `plan_packed_micro_batches`, for rows that are padded to the longest of their micro-batch, which then costs
    its rows times the longest of them.

    There are as few micro-batches as possible, with rows of similar length together, and the largest costs the least
    that so many of them allow. No bound on the number of rows: with one, micro-batches of short rows would cost less.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = -(-max(1, len(_runs(order, lengths, max_tokens))) // num_ranks)
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_runs(order, lengths, middle)) <= num_ranks * count:
            high = middle
        else:
            low = middle + 1
    bins = _runs(order, lengths, high)
    bins += [[] for _ in range(num_ranks * count - len(bins))]
    return _deal(bins, [len(rows) * max((lengths[i] for i in rows), default=0) for rows in bins], num_ranks)


def plan_equal_rows(lengths: Sequence[int], *, num_micro_batches: int) -> Plan:
    """Returns the rows of one process in `num_micro_batches` micro-batches of equally many rows (the first ones may
    have one more), those of similar length together.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    size, num_larger = divmod(len(order), num_micro_batches)
    bounds = [i * size + min(i, num_larger) for i in range(num_micro_batches + 1)]
    return [[order[start:stop] for start, stop in pairwise(bounds)]]


def _longest_first(order: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """The rows of `order`, longest first, each in the bin that has the fewest tokens at that moment."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, i) for i in range(num_bins)]
    for row in order:
        tokens, i = heap[0]
        bins[i].append(row)
        heapq.heapreplace(heap, (tokens + lengths[row], i))
    return bins


def _runs(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """`order`, longest first, cut into runs whose rows times longest is at most `max_tokens`, or that have one row."""
    runs: list[list[int]] = []
    for row in order:
        if not runs or (len(runs[-1]) + 1) * lengths[runs[-1][0]] > max_tokens:
            runs.append([])
        runs[-1].append(row)
    return runs


def _deal(bins: Sequence[list[int]], costs: Sequence[int], num_ranks: int) -> Plan:
    """Deals bins of like cost to the ranks' i-th micro-batches, the costliest to the rank that has the least so far."""
    order = sorted(range(len(bins)), key=lambda i: (-costs[i], i))
    plan: Plan = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, i in zip(ranks, order[start : start + num_ranks], strict=True):
            plan[rank].append(bins[i])
            totals[rank] += costs[i]
    return plan


ROW_KEYS = ("queries", "query_attn_masks", "responses", "response_mask")
"""What a forward pass reads, in the order of its arguments."""


def row_tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of `batch` that a forward pass of `ActorCritic` reads, in the order of its arguments."""
    return {key: batch[key] for key in ROW_KEYS}


class DeviceBatch(NamedTuple):
    """Some rows, on the CPU and on the device."""

    host: dict[str, Tensor]
    """Lengths are read from these, so that the device need not be waited for."""
    device: dict[str, Tensor]


class DeviceRows:
    """Batches of rows as views of tensors that are brought into the batches' order, and copied to the device, once.

    A batch without rows has one row with an empty `response_mask`: where ranks must make the same passes, some of them
    have nothing to train on or to evaluate.

    Args:
        tensors: (B, ...) each, on the CPU; with a `response_mask`.
        batches: the rows of each batch.
        device: of the model.
    """

    def __init__(self, tensors: Mapping[str, Tensor], batches: Sequence[Sequence[int]], device: torch.device) -> None:
        self._tensors, self._sizes, self._device = tensors, [len(batch) for batch in batches], device
        order = torch.tensor([row for batch in batches for row in batch], dtype=torch.long)
        self._host = {key: value[order] for key, value in tensors.items()}
        self._uploaded = {key: upload(value, device) for key, value in self._host.items()}

    def __iter__(self) -> Iterator[DeviceBatch]:
        start = 0
        for size in self._sizes:
            rows = slice(start, start + size)
            start += size
            if size:
                host, device = ({key: value[rows] for key, value in of.items()} for of in (self._host, self._uploaded))
            else:
                # Copies: a loss may change its batch in place.
                host = {key: value[:1].clone() for key, value in self._tensors.items()}
                host["response_mask"] = torch.zeros_like(host["response_mask"])
                device = {key: upload(value, self._device) for key, value in host.items()}
            yield DeviceBatch(host, device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; from the CPU to CUDA through pinned memory, so that the host does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
