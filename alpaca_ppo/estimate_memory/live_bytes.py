"""Bytes of live tensors, counted as they are made and freed: real ones, or fake ones, which have a size and no memory.

What a kernel allocates for itself and frees before it returns is not seen, nor what an allocator keeps in reserve.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Inside, counts the storages of all tensors that operations return; views count once.

    Args:
        answers: what to return for an operation instead of running it, for fake tensors, which have no values.
    """

    def __init__(self, answers: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self.peak = 0
        """Most bytes alive at once since the start or the last `restart`."""
        self._answers = answers or {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._answers:
            return self._answers[func]
        result = func(*args, **(kwargs or {}))
        self.see(result)
        return result

    def see(self, tensors: Any) -> None:
        """Counts every tensor in `tensors`, a tensor or a nest of containers, that is not counted yet; none on the meta
        device, which have no memory.
        """
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())

    def see_all(self) -> None:
        """Counts every tensor that Python's garbage collector knows: call it before the work that is measured."""
        gc.collect()
        # By type, not isinstance: that would ask the lazy modules of libraries what they are.
        self.see([thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)])

    def restart(self) -> None:
        """Begins a new peak at what is alive now."""
        self.peak = self.live

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes()
        # Torch keeps one Python object a storage, as long as the storage lives.
        self._storages[key] = weakref.ref(storage, partial(self._gone, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.live -= size
