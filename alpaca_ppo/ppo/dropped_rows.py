"""Responses that are left out of a step because their reward failed (`failed_rewards: drop`).

A rank scores and evaluates them like all others, so that ranks stay in lockstep. They are taken out of the global
rollouts, on every rank alike.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.distributed.collectives import gather_list, gather_rows
from alpaca_ppo.rewards.batch import RowFailure

_MAX_SHOWN = 8


class DroppedRows(NamedTuple):
    """The responses left out of one rollout, over all ranks."""

    num_dropped: int = 0
    num_sampled: int = 0
    errors: Sequence[str] = ()
    """Of some of them."""

    def __str__(self) -> str:
        shown = "\n".join(f"- {error}" for error in self.errors[:_MAX_SHOWN])
        more = self.num_dropped - min(len(self.errors), _MAX_SHOWN)
        rest = f"\nand {more} more" if more else ""
        return (
            f"{self.num_dropped} of {self.num_sampled} responses dropped, because their reward failed:\n{shown}{rest}"
        )


def add_baseline(rows: dict[str, Tensor], greedy: dict[str, Tensor], baseline_scores: Tensor) -> None:
    """Adds the scores (prompts,) of the greedy responses to the rows of the samples; a sample without one is dropped.

    Args:
        rows: the samples, changed in place; each prompt has the same number of rows, next to one another.
        greedy: the greedy responses, one for each prompt.
        baseline_scores: (prompts,), of the greedy responses.
    """
    n = rows["responses"].size(0) // len(baseline_scores)
    rows["baseline_scores"] = baseline_scores.repeat_interleave(n)
    if "dropped" in rows:
        rows["dropped"] = rows["dropped"] | greedy["dropped"].repeat_interleave(n)


def gather_kept_rows(
    rows: dict[str, Tensor] | None,
    failures: Sequence[RowFailure],
    accelerator: Accelerator,
    *,
    samples_per_prompt: int,
) -> tuple[dict[str, Tensor] | None, DroppedRows]:
    """The rows of all ranks that are not `dropped`, as `gather_rows` returns them, and what was left out.

    Args:
        rows: as for `gather_rows`, with `dropped` (B_rank,) bool if any may be.
        failures: the errors of this rank's dropped rows.
        accelerator: of the run.
        samples_per_prompt: rows per prompt, before any is dropped.

    Raises:
        ValueError: on every rank, when all rows are dropped: a rank's first failure, or the text of another rank's.
    """
    size = next(iter(rows.values())).size(0) if rows else 0
    # Absent if a subclass has a `_score` of its own.
    dropped = (rows or {}).get("dropped", torch.zeros(size, dtype=torch.bool))
    count = int(dropped.sum())
    report: Any = None if rows is None else (count, len(dropped), [str(error) for error in failures[:_MAX_SHOWN]])
    reports = gather_list(report, accelerator)
    if any(part is None for part in reports):
        return gather_rows(rows, accelerator, samples_per_prompt=samples_per_prompt), DroppedRows()
    everywhere = DroppedRows(
        num_dropped=sum(part[0] for part in reports),
        num_sampled=sum(part[1] for part in reports),
        errors=[error for part in reports if part[0] for error in part[2]],
    )
    if everywhere.num_sampled and everywhere.num_dropped == everywhere.num_sampled:
        if failures:
            raise failures[0]
        raise ValueError(str(everywhere))
    # The rewards of a rank without any other row may differ in shape from those of ranks where a source scored tokens.
    given = {} if count == size else {**(rows or {}), "dropped": dropped}
    gathered = gather_rows(given, accelerator, samples_per_prompt=samples_per_prompt)
    assert gathered is not None, "no rank was interrupted"
    kept = ~gathered.pop("dropped")
    return {key: value[kept] for key, value in gathered.items()}, everywhere
