"""Rows of prompt and response, left-aligned and trimmed: what a causal model needs neither mask nor positions for."""

from typing import NamedTuple

import torch
from torch import Tensor


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions that count real tokens from 0, 0 on padding: `attention_mask` (B, T), 1 = real, gives (B, T)."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0)


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
