"""Rows of a rollout on their way to the device: copied once for all batches that are made of them.

Which rows form a batch is decided in `minibatches`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW_KEYS = ("queries", "query_attn_masks", "responses", "response_mask")
"""What a forward pass reads, in the order of its arguments."""


def row_tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of `batch` that a forward pass of `ActorCritic` reads, in the order of its arguments."""
    return {key: batch[key] for key in ROW_KEYS}


class DeviceBatch(NamedTuple):
    """Some rows, twice."""

    host: dict[str, Tensor]
    """On the CPU; lengths are read from these, so that the device need not be waited for."""
    device: dict[str, Tensor]
    """On the device."""


class DeviceRows:
    """Batches of rows as views of tensors that are brought into the batches' order, and copied to the device, once.

    A batch without rows has one row with an empty `response_mask`: where ranks must make the same passes, some of them
    have nothing to train on or to evaluate.

    Args:
        tensors: (B, ...) each, on the CPU; with a `response_mask`.
        batches: the rows of each batch.
        device: of the model.
    """

    def __init__(self, tensors: Mapping[str, Tensor], batches: Sequence[Sequence[int]], device: torch.device) -> None:
        self._tensors, self._sizes, self._device = tensors, [len(batch) for batch in batches], device
        order = torch.tensor([row for batch in batches for row in batch], dtype=torch.long)
        self._host = {key: value[order] for key, value in tensors.items()}
        self._uploaded = {key: upload(value, device) for key, value in self._host.items()}

    def __iter__(self) -> Iterator[DeviceBatch]:
        start = 0
        for size in self._sizes:
            rows = slice(start, start + size)
            start += size
            if not size:
                yield self._dummy()
                continue
            host, device = ({key: value[rows] for key, value in of.items()} for of in (self._host, self._uploaded))
            yield DeviceBatch(host, device)

    def _dummy(self) -> DeviceBatch:
        # Copies: a loss may change its batch in place.
        host = {key: value[:1].clone() for key, value in self._tensors.items()}
        host["response_mask"] = torch.zeros_like(host["response_mask"])
        return DeviceBatch(host, {key: upload(value, self._device) for key, value in host.items()})


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; from the CPU to CUDA through pinned memory, so that the host does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
