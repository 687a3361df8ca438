"""Which rows make a chunk or a micro-batch: hand-worked cases, and that no row is lost or counted twice."""

from functools import partial

import pytest
import torch

from alpaca_ppo.ppo.batch_packing import (
    chunks_by_length,
    chunks_by_tokens,
    plan_equal_rows,
    plan_micro_batches,
    plan_packed_micro_batches,
    plan_padded_micro_batches,
    row_lengths,
)
from tests.tiny_runs import tiny_config


def test_the_length_of_a_row_counts_the_holes_before_its_last_token():
    mask = torch.tensor([[True, False, True], [True, False, False]])
    assert row_lengths(torch.tensor([[0, 1], [1, 1]]), mask) == [1 + 3, 2 + 1]


def tokens(lengths, rows):
    return sum(lengths[i] for i in rows)


def cells(lengths, rows):
    """What rows cost that are padded to the longest."""
    return len(rows) * max((lengths[i] for i in rows), default=0)


def test_chunks_hold_rows_of_like_length():
    assert chunks_by_length([3, 9, 1, 7, 5], 2) == [[1, 3], [4, 0], [2]]


def test_chunks_by_tokens_keep_the_order_and_the_samples_of_a_prompt_together():
    # Groups of 7, 3, 8 and 9 tokens; the last is more than the first budget, and its rows are divided.
    lengths = [3, 4, 1, 2, 4, 4, 5, 4]
    assert chunks_by_tokens(lengths, 8, group=2) == [[0, 1], [2, 3], [4, 5], [6], [7]]
    assert chunks_by_tokens(lengths, 11, group=2) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert chunks_by_tokens([5, 5, 5], 10, group=1) == [[0, 1], [2]]
    assert chunks_by_tokens([], 10, group=1) == []


PLANS = {
    "tokens": partial(plan_packed_micro_batches, max_tokens=16),
    "groups": partial(plan_packed_micro_batches, max_tokens=16, groups=[row // 4 for row in range(24)]),
    "padded": partial(plan_padded_micro_batches, max_tokens=16),
}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 12, 13, 24])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plan_gives_each_row_to_one_rank_and_every_rank_as_many_micro_batches(kind, rows, ranks):
    lengths = [(7 * i) % 11 + 1 + 10 * (i == 3) for i in range(rows)]
    plan = PLANS[kind](lengths, num_ranks=ranks)
    assert len(plan) == ranks and len({len(part) for part in plan}) == 1
    assert sorted(row for part in plan for batch in part for row in batch) == list(range(rows))
    batches = [batch for part in plan for batch in part]
    # The row of 21 tokens is alone.
    cost = cells if kind == "padded" else tokens
    assert all(cost(lengths, batch) <= 16 or batch == [3] for batch in batches)


def test_rows_of_a_group_are_in_one_micro_batch_where_that_costs_no_rank_more():
    lengths, groups = [10] * 16, [row // 4 for row in range(16)]
    plan = partial(plan_packed_micro_batches, lengths, max_tokens=80)
    # Of one rank they are whole.
    assert plan(num_ranks=1, groups=groups) == [[[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]]
    # A quarter of each of two ranks' 80 tokens are two rows, and of eight ranks' 20 none.
    for ranks, together in ((2, 2), (8, 1)):
        parts = plan(num_ranks=ranks, groups=groups)
        assert [sum(map(len, part)) for part in parts] == [16 // ranks] * ranks
        of_group = [[groups[row] for row in batch].count(groups[batch[0]]) for part in parts for batch in part]
        assert min(of_group) >= together
    # Parts of at most 30 tokens of a group that is longer.
    assert plan_packed_micro_batches([10] * 5, num_ranks=1, max_tokens=30, groups=[0] * 5) == [[[0, 1, 2], [3, 4]]]


def test_a_plan_by_rows_puts_rows_of_like_length_together():
    # Sorted: 9 7 7 | 5 3 | 2 1, rows of the same length in their order.
    assert plan_equal_rows([1, 7, 3, 7, 5, 2, 9], num_micro_batches=3) == [[[6, 1, 3], [4, 2], [5, 0]]]
    assert plan_equal_rows([4], num_micro_batches=2) == [[[0], []]]


def test_a_plan_by_tokens_takes_the_longest_row_first_and_fills_bins_alike():
    # 36 tokens in 2 * 2 bins of at most 10: 8, 7, 6, 5 open the bins; 4 goes to 5, 3 to 6, 2 to 7, 1 to 8: 9 each.
    # Bins of like cost in the order of their numbers, the first of each pair to the rank that has the least.
    plan = plan_packed_micro_batches([1, 2, 3, 4, 5, 6, 7, 8], num_ranks=2, max_tokens=10)
    assert plan == [[[7, 0], [5, 2]], [[6, 1], [4, 3]]]
    # 9 5 | 4 1: the rank that has taken the 5 takes the 4.
    assert plan_packed_micro_batches([9, 5, 4, 1], num_ranks=2, max_tokens=9) == [[[0], [3]], [[1], [2]]]
    # 12 tokens fit into one bin each, of 6 tokens.
    assert plan_packed_micro_batches([5, 4, 2, 1], num_ranks=2, max_tokens=6) == [[[0, 3]], [[1, 2]]]
    # 3 3 2 2 2 would be 7 and 5 in two bins, so a budget of 6 needs a third: 3 | 3 | 2, then 2 to 2, and 2 to a 3.
    assert plan_packed_micro_batches([3, 3, 2, 2, 2], num_ranks=1, max_tokens=6) == [[[0, 4], [2, 3], [1]]]


def test_a_padded_plan_has_the_least_cost_that_so_many_micro_batches_allow():
    # At most 12 cells: 6 6 | 2 2 2 2 2 2 with 12 and 12 is a plan of two; no two runs cost less.
    lengths = [6, 6, 2, 2, 2, 2, 2, 2]
    assert plan_padded_micro_batches(lengths, num_ranks=1, max_tokens=14) == [[[0, 1], [2, 3, 4, 5, 6, 7]]]
    # Rows that fill a micro-batch exactly share it.
    assert plan_padded_micro_batches([2, 2, 2, 2], num_ranks=1, max_tokens=4) == [[[0, 1], [2, 3]]]
    # At most 12 cells would be 4 4 2 | 2 2 2, but 4 4 | 2 2 2 2 has 8 and 8.
    assert plan_padded_micro_batches([4, 4, 2, 2, 2, 2], num_ranks=2, max_tokens=12) == [[[0, 1]], [[2, 3, 4, 5]]]
    # At most 10 cells would be 6 | 6 | 2 2 2 2 2 | 2; of four runs on two ranks none need cost more than 6.
    plan = plan_padded_micro_batches(lengths, num_ranks=2, max_tokens=10)
    assert sorted(cells(lengths, batch) for part in plan for batch in part) == [6, 6, 6, 6]


def test_rows_are_counted_only_where_one_process_pads_them():
    lengths = [9, 9, 3, 3, 3, 3, 3, 3]

    def plan(padding_free, num_ranks=2, **settings):
        args = tiny_config("unused", **{"step_batch_size": 8, **settings})
        return plan_micro_batches(lengths, args, padding_free=padding_free, num_ranks=num_ranks)

    # Budgets of 3 * (4 + 5) = 27 tokens hold the 18 of each rank.
    assert [[sum(lengths[i] for i in rows) for rows in part] for part in plan(True)] == [[18], [18]]
    assert plan(False) == [[[0, 1]], [[2, 3, 4, 5, 6, 7]]]
    # ceil(8 / 3 rows) = 3 micro-batches.
    assert plan(False, 1) == [[[0, 1, 2], [3, 4, 5], [6, 7]]]
    # A batch of the critic that is larger than the policy's has no more rows in a micro-batch.
    assert plan(False, 1, step_batch_size=4, critic_step_batch_size=8) == plan(False, 1)
    assert plan(False, 1, max_tokens_per_micro_batch=27) == [[[0, 1], [2, 3, 4, 5, 6, 7]]]
    assert len(plan(True, 1, max_tokens_per_micro_batch=11)[0]) == 4
