"""Divides rows of different lengths into chunks (forward passes without gradients) or micro-batches (an update), with
little padding and equal work for each process.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional.shaping import response_lengths

# `plan[rank][micro_batch]` is a list of row indices, possibly empty; every rank has the same number of micro-batches,
# because collective operations must match.
Plan = list[list[list[int]]]


def row_lengths(query_attn_masks: Tensor, response_mask: Tensor) -> list[int]:
    """The tokens of each row's prompt (B, Q) and response (B, R), holes included."""
    return (query_attn_masks.long().sum(dim=1) + response_lengths(response_mask)).tolist()


def chunks_by_length(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """The indices of `lengths` in chunks of at most `max_rows`, longest first, for passes with padding."""
    order = _longest_first(lengths)
    return [order[i : i + max_rows] for i in range(0, len(order), max_rows)]


def chunks_by_tokens(lengths: Sequence[int], max_tokens: int, *, group: int) -> list[list[int]]:
    """The indices of `lengths` in chunks of at most `max_tokens` tokens, in their order, for passes without padding.

    `group` neighbouring rows, the samples of a prompt, stay in one chunk unless they exceed `max_tokens`. A single row
    that exceeds it is a chunk of its own.
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


def plan_micro_batches(
    lengths: Sequence[int], args: PPOConfig, *, padding_free: bool, num_ranks: int, groups: Sequence[int] | None = None
) -> Plan:
    """The micro-batches of each rank from the tokens of each row.

    With `padding_free`, rows are laid end to end; otherwise they are padded to the longest of their micro-batch. For
    `groups` see `plan_packed_micro_batches`.
    """
    max_tokens = args.micro_batch_tokens
    if padding_free:
        return plan_packed_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens, groups=groups)
    if args.max_tokens_per_micro_batch is None and num_ranks == 1:
        # A smaller batch has as many micro-batches as the policy's full one; a larger batch of the critic has more.
        rows = max(len(lengths), args.step_batch_size)
        return plan_equal_rows(lengths, num_micro_batches=-(-rows // args.step_per_device_batch_size))
    return plan_padded_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)


def plan_packed_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, groups: Sequence[int] | None = None
) -> Plan:
    """Micro-batches of at most `max_tokens` tokens without padding; a longer row is a micro-batch of its own.

    As few as longest-processing-time-first scheduling allows (Graham 1969: the longest remaining row goes to the bin
    with the fewest tokens), about equally full. Rows with the same number in `groups` stay together as far as they fit
    into `max_tokens` and, with several ranks, into a quarter of a rank's share of the tokens.
    """
    share = sum(lengths) // (4 * num_ranks) if num_ranks > 1 else max_tokens
    units = _units(lengths, groups, min(max_tokens, share))
    unit_lengths = [sum(lengths[row] for row in unit) for unit in units]
    order = _longest_first(unit_lengths)
    count = max(1, -(-sum(lengths) // (num_ranks * max_tokens)))
    while True:
        bins, costs = _fill_bins(order, unit_lengths, num_ranks * count)
        if all(cost <= max_tokens or len(numbers) == 1 for numbers, cost in zip(bins, costs, strict=True)):
            return _deal([[row for number in numbers for row in units[number]] for numbers in bins], costs, num_ranks)
        count += 1


def _units(lengths: Sequence[int], groups: Sequence[int] | None, max_tokens: int) -> list[list[int]]:
    """The rows of each of `groups` in parts of at most `max_tokens` tokens, or of one row; without groups each row."""
    parts: dict[int, list[list[int]]] = {}
    for row, length in enumerate(lengths):
        of_group = parts.setdefault(row if groups is None else groups[row], [])
        if of_group and sum(lengths[other] for other in of_group[-1]) + length <= max_tokens:
            of_group[-1].append(row)
        else:
            of_group.append([row])
    return [part for of_group in parts.values() for part in of_group]


def plan_padded_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> Plan:
    """Micro-batches of rows of similar length, each of at most `max_tokens` tokens with padding, or of one row.

    There are as few of them as possible, and the largest is then as small as possible. The number of rows is not
    limited: a limit would leave micro-batches of short rows small.
    """
    order = _longest_first(lengths)
    budgets = range(1, max_tokens + 1)
    most = -(-max(1, len(_cut_runs(order, lengths, max_tokens))) // num_ranks) * num_ranks
    # The smallest budget for which as many micro-batches are enough.
    smallest = bisect_left(budgets, True, key=lambda budget: len(_cut_runs(order, lengths, budget)) <= most)
    bins = _cut_runs(order, lengths, budgets[smallest])
    bins += [[] for _ in range(most - len(bins))]
    return _deal(bins, [len(rows) * max((lengths[i] for i in rows), default=0) for rows in bins], num_ranks)


def plan_equal_rows(lengths: Sequence[int], *, num_micro_batches: int) -> Plan:
    """Micro-batches for one process with equally many rows (the first ones may have one more), of similar length."""
    return [[rows.tolist() for rows in np.array_split(_longest_first(lengths), num_micro_batches)]]


def _longest_first(costs: Sequence[int]) -> list[int]:
    """The indices of `costs`, the largest first, equal ones in their order."""
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def _fill_bins(order: Sequence[int], lengths: Sequence[int], num_bins: int) -> tuple[list[list[int]], list[int]]:
    """The indices and the tokens of each bin, if each index in `order` goes to the bin with the fewest tokens."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    for index in order:
        emptiest = tokens.index(min(tokens))
        bins[emptiest].append(index)
        tokens[emptiest] += lengths[index]
    return bins, tokens


def _cut_runs(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cuts `order` (longest first) into runs of at most `max_tokens` tokens with padding, or of one row."""
    runs: list[list[int]] = []
    for row in order:
        if not runs or (len(runs[-1]) + 1) * lengths[runs[-1][0]] > max_tokens:
            runs.append([])
        runs[-1].append(row)
    return runs


def _deal(bins: Sequence[list[int]], costs: Sequence[int], num_ranks: int) -> Plan:
    """Deals bins of similar cost as the ranks' i-th micro-batches, the costliest to the rank with the lowest total."""
    order = _longest_first(costs)
    plan: Plan = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, i in zip(ranks, order[start : start + num_ranks], strict=True):
            plan[rank].append(bins[i])
            totals[rank] += costs[i]
    return plan
