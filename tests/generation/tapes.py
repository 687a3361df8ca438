"""A stand-in for CUDA graphs on a CPU: operators that are recorded once and replayed on the same memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from alpaca_ppo.generation.graphs import Capture, Step

NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing\nmore lines")


class _Tape(TorchDispatchMode):
    """Records operators with the memory of their arguments and results, which later changes of a tensor's `data` and of
    what Python knows do not move.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operators.append((func, *tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, result))))
        return result

    def replay(self) -> None:
        # What autocast and autograd add to an operator is on the tape already.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, result in self._operators:
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    # A view, and what is changed in place, is at its address already.
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Tapes:
    """Takes the place of `CudaCapture`. The memory that a step reads is kept, so an outdated step shows in what it
    computes.

    Args:
        fails_at: the number of the capture, from 1, that raises an error.
        error: that it raises.
    """

    def __init__(self, fails_at: int | None = None, *, error: RuntimeError = NOT_PERMITTED) -> None:
        self.captured = 0
        self._fails_at, self._error = fails_at, error

    def __call__(self) -> Capture:
        return self._capture

    def _capture(self, run: Step) -> Step:
        self.captured += 1
        run()  # A warm-up, as CUDA's.
        tape = _Tape()
        try:
            with tape:
                run()
                if self.captured == self._fails_at:
                    raise self._error
        except RuntimeError:
            # As at the end of `torch.cuda.graph`.
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        return tape.replay
