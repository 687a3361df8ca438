"""The collective operations of the package: rollouts and statistics are gathered, and errors reach every rank."""

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

T = TypeVar("T")
# gloo's threads need a few milliseconds.
_DRAIN_SECONDS = 0.5


def rank_share(items: Sequence[T], accelerator: Accelerator) -> list[T]:
    """This rank's items: every `num_processes`-th one, so that lengths of shares differ by one at most."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def drain_collectives(accelerator: Accelerator) -> None:
    """Waits until all ranks are here and gloo's threads have released their tensors, so that a process may exit.

    Releasing takes the interpreter's lock, which interpreter shutdown and the destructor of DDP's reducer keep: a
    process that exits too early aborts or hangs (https://github.com/pytorch/pytorch/issues/56297 and pull request
    179291). Remove this once torch releases the lock in both.
    """
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        time.sleep(_DRAIN_SECONDS)


def drain_at_exit() -> None:
    """Lets gloo's threads release their tensors when the interpreter exits, however it does: after `drain_collectives`,
    a script may have gathered weights. The ranks do not wait for one another, because one may have died. Destroying the
    group would not stop the threads, because a mesh and DDP keep it.
    """
    if torch.distributed.is_initialized():
        atexit.unregister(time.sleep)
        atexit.register(time.sleep, _DRAIN_SECONDS)


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """Synchronizes the ranks at the end of the block, which must contain no collectives. If one rank raised, the others
    raise a RuntimeError that names it and its error, so that none hangs.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    causes = gather_list(None if failure is None else f"{type(failure).__name__}: {failure}", accelerator)
    if failure is not None:
        raise failure
    for rank, cause in enumerate(causes):
        if cause is not None:
            raise RuntimeError(f"process {rank} failed, so this process stops too. {cause}")


@contextmanager
def record_error() -> Iterator[None]:
    """Writes the traceback of an exception to where a launcher, if there is one, reads it for its final report."""
    try:
        yield
    except Exception as error:
        # A failed collective is the consequence of another rank's death, not the cause.
        if not is_lost_peer(error):
            ErrorHandler().record_exception(error)
        raise


def is_lost_peer(error: Exception) -> bool:
    """Whether `error` is a failed collective, raised because another process has died or never arrived."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "NCCL" in text or "ProcessGroup" in text)


def any_rank(flag: bool, accelerator: Accelerator) -> bool:
    """Whether `flag` is True on any rank; all ranks get the same answer."""
    return bool(max_int_over_ranks(int(flag), accelerator))


def max_int_over_ranks(number: int, accelerator: Accelerator) -> int:
    """The largest of the ranks' numbers, by one all-reduce, cheap enough for every micro-batch."""
    if accelerator.num_processes == 1:
        return number
    everywhere = torch.tensor(number, device=accelerator.device)
    torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MAX)
    return int(everywhere)


def gather_list(item: T, accelerator: Accelerator | PartialState) -> list[T]:
    """The item of each rank, in rank order, on every rank."""
    if accelerator.num_processes == 1:
        return [item]
    return list(gather_object([item]))


def on_main_process(compute: Callable[[], T], accelerator: Accelerator) -> T:
    """What `compute` returns on the main process, on every rank; the others wait at most `ddp_timeout`. For errors see
    `raise_on_all_ranks`.
    """
    with raise_on_all_ranks(accelerator):
        result: Any = compute() if accelerator.is_main_process else None
    return cast(T, gather_list(result, accelerator)[0])


def gather_rows(
    rows: dict[str, Tensor] | None, accelerator: Accelerator, *, samples_per_prompt: int
) -> dict[str, Tensor] | None:
    """The global batch on every rank, on the CPU and in prompt order; None if any rank passed None.

    Args:
        rows: (B_rank, ...) tensors with the same keys on every rank, of its `rank_share` of the prompts, each prompt's
            rows next to each other; empty without prompts, None if the rank was interrupted.

    Raises:
        ValueError: when no rank has rows, or a tensor is (B,) on one rank and (B, R) on another.
    """
    gathered = gather_list(None if rows is None else {key: value.cpu() for key, value in rows.items()}, accelerator)
    if any(part is None for part in gathered):
        return None
    parts = [part for part in gathered if part]
    if not parts:
        raise ValueError("prompt_batches is empty on every process; a rollout needs at least one prompt")
    rows_of_all = {}
    for key, first in parts[0].items():
        if any(part[key].shape[1:] != first.shape[1:] for part in parts):
            shapes = ", ".join(str(tuple(part[key].shape)) for part in parts)
            problem = f"{key} differs in shape between processes: {shapes}"
            raise ValueError(f"{problem}; return per-token values for every row or for none")
        # `rank_share` gave out prompts in turn; the last ranks may have one fewer.
        in_turn = zip_longest(*(part[key].split(samples_per_prompt) for part in parts))
        rows_of_all[key] = torch.cat([prompt for turn in in_turn for prompt in turn if prompt is not None])
    return rows_of_all


def max_over_ranks(values: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """The maximum of each value over the ranks; a rank that lacks it counts as 0."""
    parts = gather_list(values, accelerator)
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: max(part.get(key, 0.0) for part in parts) for key in keys}
