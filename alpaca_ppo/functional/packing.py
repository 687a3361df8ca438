"""Prompts and responses as a causal model reads them: rows that are moved to the left and trimmed, or laid end to end
without padding.

Queries (B, Q) are left-padded, responses (B, R) right-padded. Which rows go together into a batch is decided elsewhere
(`ppo.batch_packing`), and how a model attends to rows in one sequence in `models.packed_attention`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.shaping import response_lengths


class Span(NamedTuple):
    """A part of a sequence without padding: `length` tokens that see each other causally, and the prefix before them,
    which several spans may share.
    """

    start: int  # the column of its first token
    length: int
    prefix_start: int = 0  # the column of the first token of the prefix
    prefix_length: int = 0  # 0 = no prefix


class RowLayout(NamedTuple):
    """How a model reads rows.

    Attributes:
        padding_free: rows lie end to end. Their indices are computed on the CPU: rows on another device are copied
            there, which waits for the device.
        share_prompts: a prompt that several rows have is kept once; only with `padding_free`.
    """

    padding_free: bool = False
    share_prompts: bool = False


PADDED = RowLayout()


class PackedRows(NamedTuple):
    """Rows of prompt and response that start at column 0; or, with `spans`, as one sequence without padding.

    Attributes:
        input_ids: (B, L) int64; L = longest prompt + response - 1 (the last response token predicts nothing). With
            `spans` (1, T): all tokens of all rows.
        rows: (N,) int64, the row of each of the N tokens under response_mask.
        states: (N,) int64, the column in `input_ids` of the hidden state that chose the token.
        actions: (N,) int64, the column of the token in `responses`.
        position_ids: (1, T) int64 with `spans`, positions that start at 0 in each row.
        spans: what the tokens of the one sequence see; None for separate rows.
    """

    input_ids: Tensor
    rows: Tensor
    states: Tensor
    actions: Tensor
    position_ids: Tensor | None = None
    spans: tuple[Span, ...] | None = None


def pack_rows(
    queries: Tensor,
    query_attn_masks: Tensor,
    responses: Tensor,
    response_mask: Tensor,
    *,
    layout: RowLayout = PADDED,
    device: torch.device | None = None,
) -> PackedRows:
    """Prompt + response of each row, left-aligned, without the columns that no row needs; or as one sequence.

    What a causal model computes at a token does not depend on the tokens to its right, so left-aligned rows need
    neither an attention mask nor position ids, and results cannot depend on padding. Holes in `response_mask` (tokens
    that the policy did not choose) stay in the row; the columns after the last masked token are dropped.

    Args:
        queries: (B, Q) int64.
        query_attn_masks: (B, Q), 1 = real.
        responses: (B, R) int64.
        response_mask: (B, R) bool, True = a token the policy chose.
        layout: separate rows, or one sequence.
        device: of the result; None = that of `queries`.

    Raises:
        ValueError: when the prompt of a row is empty: no hidden state would predict its first response token.
    """
    device = device or queries.device
    if layout.padding_free:
        queries, query_attn_masks, response_mask = queries.cpu(), query_attn_masks.cpu(), response_mask.cpu()
    prompt_lengths = query_attn_masks.long().sum(dim=1)
    if bool((prompt_lengths == 0).any()):
        row = int((prompt_lengths == 0).nonzero()[0])
        raise ValueError(f"query_attn_masks has no real token in row {row}; a prompt needs at least one token")
    both = torch.cat([queries, responses.to(queries.device)], dim=1)
    if layout.padding_free:
        return _one_sequence(both, prompt_lengths, response_mask, layout.share_prompts, device)
    lengths = response_lengths(response_mask)
    # A row without a response (a dummy, where ranks must make the same number of passes) costs one column.
    kept = torch.where(lengths > 0, prompt_lengths + lengths - 1, 1)
    width = int(kept.max())
    source = torch.arange(width, device=queries.device) + (queries.size(1) - prompt_lengths).unsqueeze(1)
    inside = torch.arange(width, device=queries.device) < kept.unsqueeze(1)
    input_ids = both.gather(1, source.clamp_max(both.size(1) - 1)).where(inside, 0)
    rows, actions = response_mask.nonzero(as_tuple=True)
    states = prompt_lengths[rows] - 1 + actions
    return PackedRows(input_ids.to(device), rows.to(device), states.to(device), actions.to(device))


def _one_sequence(
    both: Tensor, prompt_lengths: Tensor, response_mask: Tensor, share_prompts: bool, device: torch.device
) -> PackedRows:
    """`both` (B, Q + R), queries and responses, as one sequence on `device`. The arguments are on the CPU.

    Rows without a response are left out. If that leaves none (a dummy, where ranks must make the same number of
    passes), one token stays.
    """
    prompt_columns = both.size(1) - response_mask.size(1)
    prompts, lengths = prompt_lengths.tolist(), response_lengths(response_mask).tolist()
    # Rows of equal length become neighbours, so that their attention is one batch.
    order = sorted((row for row in range(len(lengths)) if lengths[row]), key=lambda row: -prompts[row] - lengths[row])
    groups: dict[Any, list[int]] = {}
    for row in order:
        prompt_tokens = both[row, prompt_columns - prompts[row] : prompt_columns]
        groups.setdefault(prompt_tokens.numpy().tobytes() if share_prompts else row, []).append(row)
    spans: list[Span] = []
    # The row and the position in it from which each span is copied.
    origins: list[tuple[int, int]] = []
    # The column of the state that chose the first token of each row's response, and of the one that chose the second.
    first_state, second_state = torch.zeros(len(lengths), dtype=torch.long), torch.zeros(len(lengths), dtype=torch.long)
    end = 0
    for group in groups.values():
        start, prompt = end, prompts[group[0]]
        end += prompt
        for row in group:
            first_state[row], second_state[row] = start + prompt - 1, end
            end += lengths[row] - 1
        # The response of a row without others of its prompt lies in the prompt's span.
        alone = len(group) == 1
        spans.append(Span(start, end - start if alone else prompt))
        origins.append((group[0], 0))
        for row in group:
            if lengths[row] > 1 and not alone:
                spans.append(Span(int(second_state[row]), lengths[row] - 1, start, prompt))
                origins.append((row, prompt))
    if not spans:
        spans, origins, end = [Span(0, 1)], [(0, 0)], 1
    sizes = torch.tensor([span.length for span in spans])
    origin_rows, origin_positions = torch.tensor(origins).T
    offsets = torch.arange(end) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    positions = origin_positions.repeat_interleave(sizes) + offsets
    # The index of each row's first prompt token in the flattened `both`.
    row_starts = torch.arange(len(lengths)) * both.size(1) + prompt_columns - prompt_lengths
    ids = both.flatten()[row_starts[origin_rows].repeat_interleave(sizes) + positions]
    rows, actions = response_mask.nonzero(as_tuple=True)
    states = torch.where(actions == 0, first_state[rows], second_state[rows] + actions - 1)
    # One copy to the device instead of five.
    parts = [ids, positions, rows, states, actions]
    ids, positions, rows, states, actions = torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
    return PackedRows(ids.unsqueeze(0), rows, states, actions, positions.unsqueeze(0), tuple(spans))
