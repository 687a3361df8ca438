"""Collation: single prompts to one left-padded batch. Sorting and chunking are the trainer's."""

from collections.abc import Sequence
from typing import Any

import torch

from alpaca_ppo.types import PromptBatch


def collate_prompts(
    items: Sequence[dict[str, Any]], indices: Sequence[int], *, pad_token_id: int, query_len: int
) -> PromptBatch:
    """One batch of B prompts, each padded on the left to `query_len` (Q) tokens.

    Args:
        items: B items of a `PromptDataset`, each with `input_ids` and `row`.
        indices: their B indices in that dataset, which become `prompt_ids`.
        pad_token_id: fills `queries`. It may equal the eos id or stand inside a prompt: the mask counts tokens and
            never looks at ids.
        query_len: Q, tokens.

    Returns:
        queries (B, Q) int64, query_attn_masks (B, Q) int64 (1 = a token of the prompt), prompt_ids (B,) int64, rows (B
        dictionaries).

    Raises:
        ValueError: where `items` and `indices` differ in number, or a prompt has more than `query_len` tokens.
    """
    if len(items) != len(indices):
        raise ValueError(
            f"items ({len(items)}) and indices ({len(indices)}) differ in number; give each prompt its index"
        )
    queries = torch.full((len(items), query_len), pad_token_id, dtype=torch.int64)
    masks = torch.zeros((len(items), query_len), dtype=torch.int64)
    for place, (item, index) in enumerate(zip(items, indices, strict=True)):
        ids = item["input_ids"]
        if len(ids) > query_len:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, more than query_len ({query_len}); "
                "use the query_len that the prompts were prepared with"
            )
        start = query_len - len(ids)
        queries[place, start:] = torch.tensor(ids, dtype=torch.int64)
        masks[place, start:] = 1
    return PromptBatch(
        queries=queries,
        query_attn_masks=masks,
        prompt_ids=torch.tensor(indices, dtype=torch.int64),
        rows=[item["row"] for item in items],
    )
