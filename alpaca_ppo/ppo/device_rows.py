"""Rows of the rollouts on their way from the CPU to the device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What a forward pass reads, in the order of its arguments.
ROW_KEYS = ("queries", "query_attn_masks", "responses", "response_mask")


def row_tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: batch[key] for key in ROW_KEYS}


class DeviceBatch(NamedTuple):
    """Some rows, on the CPU, where lengths are read without waiting for the device, and on the device."""

    host: dict[str, Tensor]
    device: dict[str, Tensor]


def device_batches(
    tensors: Mapping[str, Tensor], batches: Sequence[Sequence[int]], device: torch.device
) -> Iterator[DeviceBatch]:
    """Yields batches of rows, copied to the device at once; each batch is a view of the copy.

    A batch without rows, on a rank that has to make as many forward passes as others, gets one row with an empty
    `response_mask`. `tensors` are (B, ...), on the CPU; `batches` are row indices.
    """
    order = torch.tensor([row for batch in batches for row in batch], dtype=torch.long)
    host = {key: value[order] for key, value in tensors.items()}
    uploaded = {key: upload(value, device) for key, value in host.items()}
    start = 0
    for batch in batches:
        rows = slice(start, start + len(batch))
        start = rows.stop
        if batch:
            views = ({key: value[rows] for key, value in copies.items()} for copies in (host, uploaded))
            yield DeviceBatch(*views)
        else:
            # Copies: a loss may change its batch in place.
            dummy = {key: value[:1].clone() for key, value in tensors.items()}
            dummy["response_mask"] = torch.zeros_like(dummy["response_mask"])
            yield DeviceBatch(dummy, {key: upload(value, device) for key, value in dummy.items()})


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; copied to CUDA from pinned memory, so that the host does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
