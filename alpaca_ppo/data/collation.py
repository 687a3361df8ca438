"""Collation: from single prompts to one left-padded batch. Sorting and chunking by length are in `ppo.minibatches`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.types import PromptBatch


def collate_prompts(
    items: Sequence[dict[str, Any]],
    indices: Sequence[int],
    *,
    pad_token_id: int,
    query_len: int,
) -> PromptBatch:
    """Returns one batch of B prompts, each padded on the left to `query_len` tokens.

    The width is `query_len` and not the longest prompt of the batch, because the rollouts of all ranks are concatenated
    and must have equal widths. Wider rows cost nothing: the sampler and `pack_rows` drop columns that are padding only.

    Args:
        items: B items of a `PromptDataset`, each with `input_ids` and `row`.
        indices: their B indices in that dataset, which become `prompt_ids`.
        pad_token_id: fills `queries`. It may equal the eos id or occur inside a prompt, because the mask comes from the
            prompts' lengths and not from ids.
        query_len: Q, in tokens.

    Returns:
        queries (B, Q) int64, query_attn_masks (B, Q) int64 (1 = a token of the prompt), prompt_ids (B,) int64, rows (B
        dictionaries).
    """
    assert len(items) == len(indices) and all(len(item["input_ids"]) <= query_len for item in items)
    queries, masks = left_padded([item["input_ids"] for item in items], query_len, pad_token_id)
    return PromptBatch(
        queries=queries,
        query_attn_masks=masks,
        prompt_ids=torch.tensor(indices, dtype=torch.int64),
        rows=[item["row"] for item in items],
    )


def left_padded(rows: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """The ids of `rows`, (B, width) int64, padded on the left, and their masks, (B, width) int64, 1 = a token."""
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    masks = torch.zeros((len(rows), width), dtype=torch.int64)
    for number, row in enumerate(rows):
        start = width - len(row)
        ids[number, start:] = torch.tensor(row, dtype=torch.int64)
        masks[number, start:] = 1
    return ids, masks
