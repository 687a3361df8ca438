"""Which rows make an optimizer step and a micro-batch: hand-worked cases, and that no row is lost or counted twice."""

import pytest
import torch

from alpaca_ppo.ppo.minibatches import chunks_by_length, optimizer_steps, plan_micro_batches, update_batches


def test_optimizer_steps_round_up_within_each_epoch():
    # ceil(10 / 4) = 3, twice.
    assert optimizer_steps(10, 4, 2) == 6
    assert optimizer_steps(8, 4, 3) == 6


def test_update_batches_cover_all_rows_once_an_epoch():
    batches = list(update_batches(10, 4, 2, (0, 1)))
    assert [(epoch, len(batch)) for epoch, batch in batches] == [(0, 4), (0, 4), (0, 2), (1, 4), (1, 4), (1, 2)]
    for epoch in range(2):
        assert sorted(torch.cat([rows for e, rows in batches if e == epoch]).tolist()) == list(range(10))


def test_chunks_hold_rows_of_like_length():
    assert chunks_by_length([3, 9, 1, 7, 5], 2) == [[1, 3], [4, 0], [2]]


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 24])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 6), (2, 3), (4, 6)])
def test_a_plan_gives_each_row_to_one_rank_and_every_rank_as_many_micro_batches(rows, ranks, micro):
    lengths = [(7 * i) % 11 + 1 for i in range(rows)]
    plan = plan_micro_batches(lengths, num_ranks=ranks, num_micro_batches=micro)
    assert [len(part) for part in plan] == [micro] * ranks
    assert sorted(row for part in plan for batch in part for row in batch) == list(range(rows))
    sizes = [len(batch) for part in plan for batch in part]
    assert max(sizes) - min(sizes) <= 1


def test_a_plan_puts_rows_of_like_length_together_and_balances_ranks():
    # Sorted: 8 7 | 6 5 | 4 3 | 2 1. First rank 0 takes 8 7 and rank 1 takes 6 5, then rank 1 takes first.
    plan = plan_micro_batches([1, 2, 3, 4, 5, 6, 7, 8], num_ranks=2, num_micro_batches=2)
    assert plan == [[[7, 6], [1, 0]], [[5, 4], [3, 2]]]
