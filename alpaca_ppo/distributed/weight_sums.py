"""Checksums of whole tensors, of sharded ones too, by which weights in two places are compared."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that fit into a processor's cache, which is ten times as fast.
_PIECE = 2**18
# Any odd number whose bits look random.
_KEY = 0x9E3779B1


def bit_sum(tensor: Tensor, dtype: torch.dtype | None = None, *, start: int = 0, ordered: bool = True) -> Tensor:
    """The sum of a function of each element's bits and, if `ordered`, its index, as an int64 scalar. The sums of parts
    add up to that of the whole; `start` is the index of the first element there. Floating-point elements are taken as
    `dtype`, if given.
    """
    to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    size = min(_PIECE, tensor.numel())
    keys = (torch.arange(start, start + size + 1, device=tensor.device) * _KEY * ordered).int()
    for piece in tensor.detach().flatten().split(_PIECE):
        bits = piece.to(to).view(_INTEGERS[to.itemsize]) ^ keys[: len(piece)]
        # Not of the bits themselves: small changes of several elements might cancel.
        total += (bits * bits + bits).sum(dtype=torch.int64)
        keys += keys[-1] - keys[0]
    return total


def whole_sums(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, int]:
    """`bit_sum` of each whole tensor, on every rank; all must call it."""
    state, sums = PartialState(), dict[int, Tensor]()
    # A tied tensor, which has several names, is read once.
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        part, start = tensor, 0
        if isinstance(tensor, DTensor):
            # FSDP2; the last ranks' parts may be smaller.
            rows = -(-len(tensor) // state.num_processes)
            part, start = tensor.to_local(), rows * tensor.shape[1:].numel() * state.process_index
        elif hasattr(tensor, "ds_tensor"):
            # ZeRO 3; the last ranks' parts are padded.
            shard = tensor.ds_tensor.flatten()
            start = len(shard) * state.process_index
            part = shard[: max(0, tensor.ds_numel - start)]
        elif not state.is_main_process:
            # Whole on every rank.
            part = tensor.new_empty(0)
        sums[id(tensor)] = bit_sum(part, dtype, start=start).to(state.device)
    total = torch.stack([*sums.values()])
    if state.num_processes > 1:
        torch.distributed.all_reduce(total)
    of_tensor = dict(zip(sums, total.tolist(), strict=True))
    return {name: of_tensor[id(tensor)] for name, tensor in tensors.items()}
