"""The only caller of collectives: gathering rollouts and statistics, waiting, and choosing this rank's share.

Everything else sees either one rank's rows or the global batch, and does not know how many processes there are.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

T = TypeVar("T")
_LETTING_GO = 0.5
"""Seconds; the threads need some milliseconds of a processor."""


def rank_share(items: Sequence[T], accelerator: Accelerator) -> list[T]:
    """This rank's items: every `num_processes`-th, so that a ragged batch is spread over the ranks."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def drain_collectives(accelerator: Accelerator) -> None:
    """Waits for all ranks, and until gloo's threads have let go of the last collective: a process may end after it.

    The threads drop references to tensors, for which they need the interpreter's lock. Neither the end of the
    interpreter nor the destructor of DDP's reducer gives it to them, and a process that ends too soon is aborted or
    hangs: https://github.com/pytorch/pytorch/issues/56297 and pull request 179291 there. To be removed when torch gives
    up the lock in both places.
    """
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        time.sleep(_LETTING_GO)


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Waits at its end for all ranks; where one of them raised inside, all do, so that none waits for it in vain.

    Nothing inside may wait for other ranks.

    Raises:
        RuntimeError: on the ranks that did not fail themselves; names the one that did, and its error.
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
            raise RuntimeError(f"process {rank} stopped, and this one with it. {cause}")


def any_rank(flag: bool, accelerator: Accelerator) -> bool:
    """Whether `flag` is True on any rank; the same answer on every one."""
    return bool(largest(int(flag), accelerator))


def largest(number: int, accelerator: Accelerator) -> int:
    """The largest of the ranks' numbers. One small message: cheap enough for every micro-batch."""
    if accelerator.num_processes == 1:
        return number
    everywhere = torch.tensor(number, device=accelerator.device)
    torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MAX)
    return int(everywhere)


def gather_list(item: T, accelerator: Accelerator) -> list[T]:
    """What each rank passed, in rank order, on every rank."""
    if accelerator.num_processes == 1:
        return [item]
    gathered: list[T] = gather_object([item])
    return gathered


def pad_to_longest_rank(
    batches: Sequence[T], count: int, filler: Callable[[int], T], accelerator: Accelerator
) -> list[T]:
    """`batches` with `filler(n)` added where other ranks have n prompts more than the `count` of this one."""
    missing = max(gather_list(count, accelerator)) - count
    return [*batches, filler(missing)] if missing else list(batches)


def gather_rows(
    rows: dict[str, Tensor] | None, accelerator: Accelerator, *, samples_per_prompt: int
) -> dict[str, Tensor] | None:
    """The global batch on every rank, on the CPU, in the order of the prompts whatever the number of ranks; None where
    a rank has given up its part.

    Args:
        rows: (B_rank, ...) tensors with the same keys on every rank; ranks hold the prompts that `rank_share` gave
            them, each with its `samples_per_prompt` rows next to one another. A rank without rows passes an empty
            dictionary, and None says that it gives up.
        accelerator: of the run.
        samples_per_prompt: rows of each prompt.

    Raises:
        ValueError: when no rank has rows, or a tensor has (B,) rows on one rank and (B, R) on another.
    """
    given = gather_list(None if rows is None else {key: value.cpu() for key, value in rows.items()}, accelerator)
    parts = [part for part in given if part is not None]
    if len(parts) < len(given):
        return None
    world = len(parts)
    places = []
    for rank, part in enumerate(parts):
        local = torch.arange(next(iter(part.values())).size(0) if part else 0)
        prompt, sample = local // samples_per_prompt, local % samples_per_prompt
        places.append((prompt * world + rank) * samples_per_prompt + sample)
    order = torch.cat(places).argsort()
    filled = [part for part in parts if part]
    if not filled:
        raise ValueError("there is no prompt in prompt_batches on any process; a rollout needs at least one")
    for key, first in filled[0].items():
        if any(part[key].shape[1:] != first.shape[1:] for part in filled):
            shapes = ", ".join(str(tuple(part[key].shape)) for part in filled)
            raise ValueError(f"{key} differs in shape between processes: {shapes}; score every row's tokens, or none's")
    return {key: torch.cat([part[key] for part in filled])[order] for key in filled[0]}


def max_over_ranks(values: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """The largest of each value over the ranks: a phase lasts as long as its slowest rank."""
    parts = gather_list(values, accelerator)
    # A rank without prompts has not measured every phase.
    return {key: max(part.get(key, 0.0) for part in parts) for key in {k: None for part in parts for k in part}}
