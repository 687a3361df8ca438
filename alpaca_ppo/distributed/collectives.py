"""All collective operations of the package: gathering rollouts and statistics, synchronizing ranks, reporting
their errors.

Other modules see either one rank's rows or the global batch and do not depend on the number of processes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

T = TypeVar("T")
_DRAIN_SECONDS = 0.5
"""How long gloo's threads get to release their tensors; they need a few milliseconds."""


def rank_share(items: Sequence[T], accelerator: Accelerator) -> list[T]:
    """This rank's items: every `num_processes`-th one, so that a ragged batch is divided as evenly as possible."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def drain_collectives(accelerator: Accelerator) -> None:
    """Waits until all ranks are here and gloo's threads have finished the last collective, so that a process may exit.

    The threads drop references to tensors, for which they need the interpreter's lock. Neither interpreter shutdown
    nor the destructor of DDP's reducer releases the lock, so a process that exits too early aborts or hangs:
    https://github.com/pytorch/pytorch/issues/56297 and pull request 179291. Remove this once torch releases the lock
    in both places.
    """
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        time.sleep(_DRAIN_SECONDS)


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """Synchronizes the ranks at the end of the block; if any rank raised inside, all ranks raise, so none hangs.

    The block itself must not contain collectives.

    Raises:
        RuntimeError: on the ranks that did not fail; names the rank that did, and its error.
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
    """Writes the traceback of an exception to where the launcher reads it, so that its final report shows the cause.

    torchrun and `accelerate launch` end the other processes themselves. Without a launcher this does nothing.
    """
    try:
        yield
    except Exception as error:
        # A rank whose peer has died fails in a collective, which is a consequence and not the cause.
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
    """The largest of the ranks' numbers: one all-reduce of one integer, cheap enough for every micro-batch."""
    if accelerator.num_processes == 1:
        return number
    everywhere = torch.tensor(number, device=accelerator.device)
    torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MAX)
    return int(everywhere)


def gather_list(item: T, accelerator: Accelerator | PartialState) -> list[T]:
    """The item of each rank, in rank order, on every rank."""
    if accelerator.num_processes == 1:
        return [item]
    gathered: list[T] = gather_object([item])
    return gathered


def on_main_process(compute: Callable[[], T], accelerator: Accelerator) -> T:
    """What `compute` returns on the main process, on every rank; the others wait for it, at most `ddp_timeout`.

    Raises:
        Exception: what `compute` raised; on the other ranks a RuntimeError that names its error.
    """
    with raise_on_all_ranks(accelerator):
        result: Any = compute() if accelerator.is_main_process else None
    found: T = gather_list(result, accelerator)[0]
    return found


def pad_to_longest_rank(
    batches: Sequence[T], count: int, make_dummies: Callable[[int], T], accelerator: Accelerator
) -> list[T]:
    """`batches`, and `make_dummies(n)` if the rank with the most prompts has n more than this rank's `count`."""
    missing = max(gather_list(count, accelerator)) - count
    return [*batches, make_dummies(missing)] if missing else list(batches)


def gather_rows(
    rows: dict[str, Tensor] | None, accelerator: Accelerator, *, samples_per_prompt: int
) -> dict[str, Tensor] | None:
    """The global batch, on every rank, on the CPU and in prompt order, whatever the number of ranks.

    Args:
        rows: (B_rank, ...) tensors with the same keys on every rank. Each rank has the prompts that `rank_share` gave
            it, each prompt with its `samples_per_prompt` rows next to each other. A rank without prompts passes an
            empty dictionary; a rank that was interrupted passes None.
        accelerator: of the run.
        samples_per_prompt: rows per prompt.

    Returns:
        None if any rank passed None.

    Raises:
        ValueError: when no rank has rows, or a tensor is (B,) on one rank and (B, R) on another.
    """
    given = gather_list(None if rows is None else {key: value.cpu() for key, value in rows.items()}, accelerator)
    if any(part is None for part in given):
        return None
    parts = {rank: part for rank, part in enumerate(given) if part}
    if not parts:
        raise ValueError("prompt_batches is empty on every process; a rollout needs at least one prompt")
    places = []
    for rank, part in parts.items():
        local = torch.arange(len(next(iter(part.values()))))
        prompt, sample = local // samples_per_prompt, local % samples_per_prompt
        places.append((prompt * len(given) + rank) * samples_per_prompt + sample)
    order, nonempty = torch.cat(places).argsort(), list(parts.values())
    for key, first in nonempty[0].items():
        if any(part[key].shape[1:] != first.shape[1:] for part in nonempty):
            shapes = ", ".join(str(tuple(part[key].shape)) for part in nonempty)
            raise ValueError(
                f"{key} differs in shape between processes: {shapes}; return per-token values for every row or for none"
            )
    return {key: torch.cat([part[key] for part in nonempty])[order] for key in nonempty[0]}


def max_over_ranks(values: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """The maximum of each value over the ranks: a phase takes as long as its slowest rank."""
    parts = gather_list(values, accelerator)
    # A rank without prompts has not timed every phase.
    return {key: max(part.get(key, 0.0) for part in parts) for key in {k: None for part in parts for k in part}}
