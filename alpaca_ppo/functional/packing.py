"""Prompts and responses as a causal model reads them: rows that are moved to the left and trimmed, or laid end to end
without padding.

Queries (B, Q) are left-padded, responses (B, R) right-padded. Which rows go together into a batch is decided elsewhere
(`ppo.batch_packing`), and how a model attends to rows in one sequence in `models.packed_attention`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.shaping import response_lengths


class Span(NamedTuple):
    """A part of a sequence without padding: `length` tokens that see each other causally, and the prefix before them,
    which several spans may share.
    """

    start: int  # the column of its first token
    length: int
    prefix_start: int = 0  # the column of the first token of the prefix, which is a whole span itself
    prefix_length: int = 0  # 0 = no prefix


class RowLayout(NamedTuple):
    """How a model reads rows.

    Attributes:
        padding_free: rows lie end to end. Their indices are computed on the CPU, which waits for rows on another
            device.
        share_prompts: a prompt of at least so many tokens that several rows have is kept once; 0 = none is. Only with
            `padding_free`.
    """

    padding_free: bool = False
    share_prompts: int = 0

    def shares(self, prompt: int) -> bool:
        """Whether a prompt of so many tokens is kept once for several rows."""
        return 0 < self.share_prompts <= prompt


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
        counts: (B,), how many of the N tokens each row has.
    """

    input_ids: Tensor
    rows: Tensor
    states: Tensor
    actions: Tensor
    position_ids: Tensor | None = None
    spans: tuple[Span, ...] | None = None
    counts: tuple[int, ...] = ()


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
    tokens = torch.cat([queries, responses.to(queries.device)], dim=1)
    lengths, counts = response_lengths(response_mask), tuple(response_mask.sum(dim=1).tolist())
    rows, actions = response_mask.nonzero(as_tuple=True)
    if layout.padding_free:
        prompt_end = queries.size(1)
        prompts = [row[prompt_end - length : prompt_end] for row, length in zip(queries, prompt_lengths, strict=True)]
        groups = _rows_by_prompt(prompts, lengths.tolist(), layout)
        spans, span_rows, prompt_ends, response_starts = _lay_out(groups, prompt_lengths.tolist(), lengths.tolist())
        sizes = torch.tensor([span.length for span in spans])
        # The positions of a span continue those of its prefix.
        shifts = torch.tensor([span.prefix_length - span.start for span in spans])
        positions = torch.arange(int(sizes.sum())) + shifts.repeat_interleave(sizes)
        sources = torch.tensor(span_rows).repeat_interleave(sizes)
        ids = tokens[sources, prompt_end - prompt_lengths[sources] + positions]
        states = torch.where(actions == 0, prompt_ends[rows], response_starts[rows] + actions - 1)
        # One copy to the device instead of five.
        parts = [ids, positions, rows, states, actions]
        ids, positions, rows, states, actions = torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
        return PackedRows(ids.unsqueeze(0), rows, states, actions, positions.unsqueeze(0), tuple(spans), counts)
    # A row without a response (a dummy, where ranks must make the same number of passes) costs one column.
    kept = torch.where(lengths > 0, prompt_lengths + lengths - 1, 1)
    width = int(kept.max())
    source = torch.arange(width, device=queries.device) + (queries.size(1) - prompt_lengths).unsqueeze(1)
    inside = torch.arange(width, device=queries.device) < kept.unsqueeze(1)
    input_ids = tokens.gather(1, source.clamp_max(tokens.size(1) - 1)).where(inside, 0)
    states = prompt_lengths[rows] - 1 + actions
    return PackedRows(input_ids.to(device), rows.to(device), states.to(device), actions.to(device), counts=counts)


def _rows_by_prompt(prompts: list[Tensor], lengths: list[int], layout: RowLayout) -> list[list[int]]:
    """The rows that have a response, longest first, in groups that share a prompt."""
    # Rows of equal length become neighbours, so that their attention is one batch.
    order = sorted(range(len(lengths)), key=lambda row: -len(prompts[row]) - lengths[row])
    groups: dict[bytes | int, list[int]] = {}
    for row in order:
        if lengths[row]:
            key = prompts[row].numpy().tobytes() if layout.shares(len(prompts[row])) else row
            groups.setdefault(key, []).append(row)
    return list(groups.values())


def _lay_out(
    groups: list[list[int]], prompt_lengths: list[int], lengths: list[int]
) -> tuple[list[Span], list[int], Tensor, Tensor]:
    """Puts each group's prompt before the responses of its rows, without their last tokens. Without groups (a dummy,
    where ranks must make the same number of passes), one token stays.

    Returns:
        The spans, ordered by column; the row that each span is copied from; the column of each row's last prompt token,
        (B,), whose state chose its first response token; and that of this token, (B,), whose state chose the second.
    """
    spans: list[Span] = []
    span_rows: list[int] = []
    prompt_ends = torch.zeros(len(lengths), dtype=torch.long)
    response_starts = torch.zeros_like(prompt_ends)
    start = 0
    for group in groups:
        prompt_length, is_alone = prompt_lengths[group[0]], len(group) == 1
        # The response of a row without others of its prompt lies in the prompt's span.
        spans.append(Span(start, prompt_length + lengths[group[0]] - 1 if is_alone else prompt_length))
        span_rows.append(group[0])
        end = start + prompt_length
        for row in group:
            prompt_ends[row] = start + prompt_length - 1
            response_starts[row] = end
            if lengths[row] > 1 and not is_alone:
                spans.append(Span(end, lengths[row] - 1, start, prompt_length))
                span_rows.append(row)
            end += lengths[row] - 1
        start = end
    if not groups:
        spans, span_rows = [Span(0, 1)], [0]
    return spans, span_rows, prompt_ends, response_starts
