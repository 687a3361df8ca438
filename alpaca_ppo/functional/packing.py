"""Prompts and responses as a causal model reads them: positions that do not count padding, and rows that are moved to
the left and trimmed.

Which rows go together into a batch is decided elsewhere (`ppo.minibatches`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.shaping import response_lengths


class PackedRows(NamedTuple):
    """Rows of prompt and response that start at column 0, as wide as the longest of them."""

    input_ids: Tensor
    """(B, L) int64; L = longest prompt + response - 1 of these rows (the last response token predicts nothing)."""
    rows: Tensor
    """(N,) int64: the row of each of the N tokens under response_mask."""
    states: Tensor
    """(N,) int64: the column of the hidden state that chose the token, prompt length - 1 + t."""
    actions: Tensor
    """(N,) int64: the column t of the token in `responses`."""


def pack_rows(queries: Tensor, query_attn_masks: Tensor, responses: Tensor, response_mask: Tensor) -> PackedRows:
    """Prompt + response of each row, left-aligned, without the columns that no row needs.

    The output of a causal model at a real token does not depend on the tokens to its right. Left-aligned rows therefore
    need neither an attention mask nor position ids, and the results cannot depend on padding. Holes in `response_mask`
    (tokens that the policy did not choose) stay in the sequence; the columns after the last masked token are dropped.

    Args:
        queries: (B, Q) int64, left-padded.
        query_attn_masks: (B, Q), 1 = real.
        responses: (B, R) int64, right-padded.
        response_mask: (B, R) bool, True = a token the policy chose.

    Raises:
        ValueError: when the prompt of a row is empty: no hidden state would predict its first response token.
    """
    prompt_lengths = query_attn_masks.long().sum(dim=1)
    if bool((prompt_lengths == 0).any()):
        raise ValueError(
            f"query_attn_masks has no real token in row {int((prompt_lengths == 0).nonzero()[0])}; a prompt needs at "
            f"least one token"
        )
    lengths = response_lengths(response_mask)
    # A row without a response (a dummy, where ranks must make the same number of passes) costs one column.
    kept = torch.where(lengths > 0, prompt_lengths + lengths - 1, 1)
    width = int(kept.max())
    both = torch.cat([queries, responses], dim=1)
    source = torch.arange(width, device=queries.device) + (queries.size(1) - prompt_lengths).unsqueeze(1)
    inside = torch.arange(width, device=queries.device) < kept.unsqueeze(1)
    input_ids = both.gather(1, source.clamp_max(both.size(1) - 1)).where(inside, 0)
    rows, actions = response_mask.nonzero(as_tuple=True)
    return PackedRows(input_ids, rows, prompt_lengths[rows] - 1 + actions, actions)


def row_lengths(query_attn_masks: Tensor, response_mask: Tensor) -> Tensor:
    """The tokens of prompt and response, holes included: `query_attn_masks` (B, Q), 1 = real, and `response_mask`
    (B, R) bool give (B,) int64.
    """
    return query_attn_masks.long().sum(dim=1) + response_lengths(response_mask)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions that count real tokens from 0, and 0 on padding: `attention_mask` (B, T), 1 = real, gives (B, T)."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0)
