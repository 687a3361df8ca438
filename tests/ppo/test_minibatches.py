"""Batch arithmetic: hand-worked cases, and that nothing is lost or counted twice."""

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.functional.packing import pack_rows, position_ids
from alpaca_ppo.functional.rng import seeded_permutation
from alpaca_ppo.ppo.minibatches import chunks_by_length, optimizer_steps, plan_micro_batches, update_batches


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_a_permutation_depends_on_its_whole_key():
    assert sorted(seeded_permutation(50, 1, 2).tolist()) == list(range(50))
    assert torch.equal(seeded_permutation(50, 1, 2), seeded_permutation(50, 1, 2))
    keys = [(1, 2), (2, 1), (0, 3), (3, 0), (3,), (1, 2, 0)]
    assert len({tuple(seeded_permutation(50, *key).tolist()) for key in keys}) == len(keys)


def test_an_epoch_visits_every_prompt_once_and_epochs_differ():
    # 10 prompts, 4 a step: steps of 4, 4, 2 in each of two epochs.
    schedule = PromptSchedule(10, 4, seed=0, total_epochs=2)
    steps = [schedule.indices(step) for step in range(schedule.num_steps)]
    assert [len(step) for step in steps] == [schedule.rows(i) for i in range(6)] == [4, 4, 2, 4, 4, 2]
    assert sorted(sum(steps[:3], [])) == sorted(sum(steps[3:], [])) == list(range(10))
    assert steps[:3] != steps[3:]
    assert [schedule.epoch_at(step) for step in range(7)] == [0.0, 0.4, 0.8, 1.0, 1.4, 1.8, 2.0]


def test_episodes_end_within_an_epoch_where_they_are_told():
    # 10 + 7 prompts at 4 a step: 4, 4, 2 | 4, 3.
    schedule = PromptSchedule(10, 4, seed=0, total_episodes=17)
    assert [len(schedule.indices(step)) for step in range(schedule.num_steps)] == [4, 4, 2, 4, 3]
    assert [schedule.rows(step) for step in range(schedule.num_steps)] == [4, 4, 2, 4, 3]
    assert schedule.epoch_at(5) == 1.7


def test_fewer_episodes_than_a_step_make_one_short_step():
    schedule = PromptSchedule(10, 8, seed=0, total_episodes=3)
    assert [schedule.rows(step) for step in range(schedule.num_steps)] == [3] == [len(schedule.indices(0))]


def test_a_schedule_without_prompts_or_with_two_totals_is_refused():
    with pytest.raises(ValueError, match="no prompt left"):
        PromptSchedule(0, 4, seed=0, total_epochs=1)
    with pytest.raises(ValueError, match="exactly one of total_epochs"):
        PromptSchedule(10, 4, seed=0, total_epochs=1, total_episodes=5)


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


def test_packed_rows_start_at_column_zero_and_end_before_the_last_response_token():
    packed = pack_rows(
        torch.tensor([[0, 0, 5], [6, 7, 8]]),
        torch.tensor([[0, 0, 1], [1, 1, 1]]),
        torch.tensor([[11, 12, 13], [14, 0, 0]]),
        torch.tensor([[1, 0, 1], [1, 0, 0]], dtype=torch.bool),
    )
    # Row 0: prompt 5, response 11 12 13 (12 a hole): inputs 5 11 12. Row 1: 6 7 8 chooses 14.
    assert packed.input_ids.tolist() == [[5, 11, 12], [6, 7, 8]]
    assert packed.rows.tolist() == [0, 0, 1]
    assert packed.actions.tolist() == [0, 2, 0]
    assert packed.states.tolist() == [0, 2, 2]


def test_packing_drops_columns_that_no_row_needs():
    queries, masks = torch.zeros(2, 100, dtype=torch.long), torch.zeros(2, 100, dtype=torch.long)
    queries[:, -2:], masks[:, -2:] = 4, 1
    responses = torch.zeros(2, 300, dtype=torch.long)
    response_mask = torch.zeros(2, 300, dtype=torch.bool)
    response_mask[:, :3] = True
    assert pack_rows(queries, masks, responses, response_mask).input_ids.shape == (2, 4)
    queries[:, -9:], masks[:, -9:] = 4, 1
    dummy = pack_rows(queries[:1], masks[:1], responses[:1], torch.zeros(1, 300, dtype=torch.bool))
    assert dummy.input_ids.shape == (1, 1)
    assert dummy.rows.numel() == 0
    assert_close(dummy.input_ids, torch.tensor([[4]]))


def test_an_empty_prompt_is_refused_by_row():
    with pytest.raises(ValueError, match="no real token in row 1"):
        pack_rows(
            torch.zeros(2, 3, dtype=torch.long),
            torch.tensor([[0, 0, 1], [0, 0, 0]]),
            torch.zeros(2, 2, dtype=torch.long),
            torch.ones(2, 2, dtype=torch.bool),
        )
