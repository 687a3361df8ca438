"""Counts the bytes of live tensors, real or fake, as they are allocated and freed.

Does not see what a kernel allocates and frees internally, nor what an allocator keeps in reserve. torch's own
`torch.distributed._tools.mem_tracker.MemTracker` is private and cannot restart its peak between two passes.
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
    """Inside, counts the storages of all tensors that operations return, each storage once.

    Args:
        answers: results to return for some operations instead of running them; fake tensors have no values.
    """

    def __init__(self, answers: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.live = 0
        """Bytes of the tensors alive now."""
        self.peak = 0
        """Maximum of `live` since the start or the last `restart`."""
        self._answers = answers or {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._answers:
            return self._answers[func]
        result = func(*args, **(kwargs or {}))
        self.track(result)
        return result

    def track(self, tensors: Any) -> None:
        """Counts the tensors in `tensors`, nested containers, that are not counted yet.

        Tensors on the meta device have no memory and are skipped.
        """
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())

    def track_all(self) -> None:
        """Counts every tensor known to Python's garbage collector; call it before the work to be measured."""
        gc.collect()
        # Not isinstance, which would trigger the imports of lazily loaded library modules.
        self.track([thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)])

    def reset_peak(self) -> None:
        """Resets `peak` to the bytes alive now."""
        self.peak = self.live

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes()
        # torch keeps one Python object per storage for as long as the storage lives.
        self._storages[key] = weakref.ref(storage, partial(self._on_freed, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _on_freed(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.live -= size
