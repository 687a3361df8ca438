"""Collation: from single prompts to one left-padded batch. Sorting and chunking by length are in `ppo.minibatches`."""

from collections.abc import Sequence
from typing import Any

import torch

from alpaca_ppo.types import PromptBatch


def collate_prompts(
    items: Sequence[dict[str, Any]], indices: Sequence[int], *, pad_token_id: int, query_len: int
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

    Raises:
        ValueError: if `items` and `indices` differ in length, or a prompt has more than `query_len` tokens.
    """
    if len(items) != len(indices):
        raise ValueError(
            f"items ({len(items)}) and indices ({len(indices)}) differ in length; give one index per prompt"
        )
    queries = torch.full((len(items), query_len), pad_token_id, dtype=torch.int64)
    masks = torch.zeros((len(items), query_len), dtype=torch.int64)
    for row, (item, index) in enumerate(zip(items, indices, strict=True)):
        ids = item["input_ids"]
        if len(ids) > query_len:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, more than query_len ({query_len}); "
                "use the query_len that the prompts were prepared with"
            )
        start = query_len - len(ids)
        queries[row, start:] = torch.tensor(ids, dtype=torch.int64)
        masks[row, start:] = 1
    return PromptBatch(
        queries=queries,
        query_attn_masks=masks,
        prompt_ids=torch.tensor(indices, dtype=torch.int64),
        rows=[item["row"] for item in items],
    )
