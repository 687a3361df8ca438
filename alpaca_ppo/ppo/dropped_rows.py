"""Responses that are left out of a step because their reward failed (`failed_rewards: drop`), because no source scored
them (`drop_unscored`), or because that left them without another response to compare with; and responses that give no
gradient (`mask_truncated`).

A rank scores and evaluates the first like all others, so that ranks stay in lockstep. They are taken out of the global
rollouts, on every rank alike. The second stay in the rollouts, where others are compared with them, and are taken out
of optimizer steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list, gather_rows
from alpaca_ppo.rewards.batch import RowFailure
from alpaca_ppo.types import Rollouts

_MAX_SHOWN = 8


class DroppedRows(NamedTuple):
    """The responses left out of one rollout, over all ranks."""

    num_dropped: int = 0
    num_sampled: int = 0
    errors: Sequence[str] = ()
    """Of some of those whose reward failed."""
    num_alone: int = 0
    """How many of the dropped responses have a reward, but no other response to their prompt to be compared with."""

    def __str__(self) -> str:
        shown = "\n".join(f"- {error}" for error in self.errors[:_MAX_SHOWN])
        num_failed = self.num_dropped - self.num_alone
        more = num_failed - min(len(self.errors), _MAX_SHOWN)
        rest = f"\nand {more} more" if more else ""
        why = "because their reward failed"
        if self.num_alone:
            why = (
                f"{num_failed} because their reward failed and {self.num_alone} because no other response to their "
                "prompt was left to compare them with"
            )
        return f"{self.num_dropped} of {self.num_sampled} responses dropped, {why}:\n{shown}{rest}"


def trained_mask(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B, R) bool, True = a token that gives a gradient: the `response_mask`, with `mask_truncated` without the rows
    that did not stop.
    """
    mask = rollouts["response_mask"]
    return mask & rollouts["stopped"].unsqueeze(1) if args.mask_truncated else mask


def trained_rows(rollouts: Rollouts, rows: Tensor, args: PPOConfig) -> Tensor:
    """Those of `rows` (int64 indices) that give a gradient; none, perhaps."""
    return rows[rollouts["stopped"][rows]] if args.mask_truncated else rows


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
        own = rows["dropped"]
        rows["dropped"] = torch.where(own > 0, own, greedy["dropped"].repeat_interleave(n))


def gather_kept_rows(
    rows: dict[str, Tensor] | None,
    failures: Sequence[RowFailure],
    accelerator: Accelerator,
    *,
    samples_per_prompt: int,
    compares_group: bool = False,
    may_be_empty: bool = False,
) -> tuple[dict[str, Tensor] | None, DroppedRows]:
    """The rows of all ranks that are not `dropped`, as `gather_rows` returns them, and what was left out.

    Args:
        rows: as for `gather_rows`, with `dropped` (B_rank,) int64 if any may be: 0 for a row to keep, k > 0 for one
            whose error is `failures[k - 1]`.
        failures: errors of this rank, those of dummies among them.
        accelerator: of the run.
        samples_per_prompt: rows per prompt, before any is dropped.
        compares_group: also leave out a row of several to a prompt (`prompt_ids`) if all others with a token
            (`response_mask`) were dropped. Its advantage would be its bare score.
        may_be_empty: return rows of length 0, rather than raise, if all are dropped.

    Raises:
        ValueError: on every rank, when all rows are dropped, unless they may be: the first failure of a rank's rows, or
            the text of other ranks' if it has none.
    """
    size = next(iter(rows.values())).size(0) if rows else 0
    # Absent if a subclass has a `_score` of its own.
    dropped = (rows or {}).get("dropped", torch.zeros(size, dtype=torch.int64))
    count = int((dropped > 0).sum())
    # All samples of a prompt may have the error of its greedy response.
    own = [failures[number - 1] for number in dict.fromkeys(dropped.tolist()) if number]
    report: Any = None if rows is None else (count, size, [str(error) for error in own[:_MAX_SHOWN]])
    reports = gather_list(report, accelerator)
    if any(part is None for part in reports):
        return gather_rows(rows, accelerator, samples_per_prompt=samples_per_prompt), DroppedRows()
    everywhere = DroppedRows(
        num_dropped=sum(part[0] for part in reports),
        num_sampled=sum(part[1] for part in reports),
        errors=[error for part in reports for error in part[2]],
    )
    all_failed = everywhere.num_sampled > 0 and everywhere.num_dropped == everywhere.num_sampled
    if all_failed and not may_be_empty:
        _raise_failure(own, everywhere)
    # The rewards of a rank without any other row may differ in shape from those of ranks where a source scored tokens.
    given = {} if count == size and not all_failed else {**(rows or {}), "dropped": dropped}
    gathered = gather_rows(given if size else {}, accelerator, samples_per_prompt=samples_per_prompt)
    assert gathered is not None, "no rank was interrupted"
    kept = gathered.pop("dropped") == 0
    if compares_group and samples_per_prompt > 1:
        alone = _left_alone(gathered["prompt_ids"], gathered["response_mask"].any(dim=1), kept)
        kept &= ~alone
        num_alone = int(alone.sum())
        everywhere = everywhere._replace(num_dropped=everywhere.num_dropped + num_alone, num_alone=num_alone)
        if num_alone and not may_be_empty and not bool(kept.any()):
            _raise_failure(own, everywhere)
    return {key: value[kept] for key, value in gathered.items()}, everywhere


def _left_alone(prompt_ids: Tensor, has_tokens: Tensor, kept: Tensor) -> Tensor:
    """(B,) bool: the kept rows with tokens whose prompt has no other such row, and has rows that are not kept."""
    _, group = torch.unique(prompt_ids, return_inverse=True)
    member = kept & has_tokens
    members, missing = (torch.bincount(group[rows], minlength=len(group))[group] for rows in (member, ~kept))
    return member & (members == 1) & (missing > 0)


def _raise_failure(own: Sequence[RowFailure], everywhere: DroppedRows) -> NoReturn:
    if own:
        raise own[0]
    raise ValueError(str(everywhere))
