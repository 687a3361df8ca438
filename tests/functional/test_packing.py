"""Rows that are left-aligned and trimmed, worked out by hand."""

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.functional.packing import RowLayout, Span, pack_rows


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


ROWS = (
    torch.tensor([[0, 0, 5], [6, 7, 8], [0, 0, 5], [0, 0, 5]]),
    torch.tensor([[0, 0, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]]),
    torch.tensor([[11, 12, 13], [14, 0, 0], [15, 0, 0], [16, 17, 18]]),
    torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool),
)


def test_rows_without_padding_lie_end_to_end_longest_first():
    packed = pack_rows(*ROWS, layout=RowLayout(padding_free=True))
    # Inputs: row 0 has 5 11 12, row 1 has 6 7 8, row 3 has 5 16 17; row 2 has no response and is left out.
    assert packed.input_ids.tolist() == [[5, 11, 12, 6, 7, 8, 5, 16, 17]]
    assert packed.position_ids.tolist() == [[0, 1, 2] * 3]
    assert packed.spans == (Span(0, 3), Span(3, 3), Span(6, 3))
    assert packed.rows.tolist() == [0, 0, 1, 3, 3, 3]
    assert packed.actions.tolist() == [0, 2, 0, 0, 1, 2]
    # The state before the token: 5, 12; 8; 5, 16, 17.
    assert packed.input_ids[0, packed.states].tolist() == [5, 12, 8, 5, 16, 17]


def test_a_shared_prompt_lies_there_once_and_its_responses_behind_it():
    packed = pack_rows(*ROWS, layout=RowLayout(padding_free=True, share_prompts=1))
    assert packed.input_ids.tolist() == [[5, 11, 12, 16, 17, 6, 7, 8]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 1, 2, 0, 1, 2]]
    assert packed.spans == (Span(0, 1), Span(1, 2, 0, 1), Span(3, 2, 0, 1), Span(5, 3))
    # Both first tokens are chosen by the state of the shared prompt's last token.
    assert packed.states.tolist() == [0, 2, 7, 0, 3, 4]
    # Responses of one token leave nothing but the prompt.
    short = pack_rows(*(part[[0, 0]] for part in ROWS[:3]), torch.eye(3, dtype=torch.bool)[[0, 0]],
        layout=RowLayout(padding_free=True, share_prompts=1))  # fmt: skip
    assert short.input_ids.tolist() == [[5]] and short.states.tolist() == [0, 0]


def test_without_any_response_one_token_stays():
    dummy = pack_rows(*ROWS[:3], torch.zeros(4, 3, dtype=torch.bool), layout=RowLayout(padding_free=True))
    assert dummy.input_ids.tolist() == [[5]] and dummy.spans == (Span(0, 1),)
    assert dummy.states.numel() == dummy.rows.numel() == 0


def test_an_empty_prompt_is_refused_by_row():
    with pytest.raises(ValueError, match="no real token in row 1"):
        pack_rows(
            torch.zeros(2, 3, dtype=torch.long),
            torch.tensor([[0, 0, 1], [0, 0, 0]]),
            torch.zeros(2, 2, dtype=torch.long),
            torch.ones(2, 2, dtype=torch.bool),
        )
