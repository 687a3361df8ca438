"""Positions, and rows that are left-aligned and trimmed, worked out by hand."""

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.functional.packing import pack_rows, position_ids


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


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
