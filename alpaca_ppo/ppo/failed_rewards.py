"""Leaves out responses whose reward failed (`failed_rewards: mask`), in the rollouts of all ranks."""

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.distributed.collectives import any_rank, gather_list
from alpaca_ppo.functional.shaping import per_token
from alpaca_ppo.rewards.batch import RowFailure
from alpaca_ppo.types import Rollouts

_MAX_SHOWN = 8


def rewards_shaped_alike(rows: dict[str, Tensor] | None, accelerator: Accelerator) -> dict[str, Tensor] | None:
    """This rank's `rows`, with rewards (B, R) if those of another rank have that shape. A rank on which all rewards
    failed does not know that the sources score tokens. Every rank must call it.
    """
    per_token_anywhere = any_rank(bool(rows and rows["rewards"].dim() == 2), accelerator)
    if not rows or not per_token_anywhere or bool(rows["trained_rows"].any()):
        return rows
    return {**rows, "rewards": per_token(rows["rewards"], rows["response_mask"])}


def leave_out_failures(
    rollouts: Rollouts, failures: list[RowFailure], accelerator: Accelerator, *, compares_group: bool, may_fail: bool
) -> str:
    """Updates `trained_rows` of the global rollouts in place. Every rank must call it.

    Args:
        rollouts: of all ranks, with `trained_rows` False where a reward failed.
        failures: of this rank.
        compares_group: whether the estimator compares the responses to a prompt. Then a response is also left out if
            the rewards of all others failed: its advantage would be its bare score.
        may_fail: whether all rewards may fail.

    Returns:
        How many responses are left out, and why, as text; empty for none.

    Raises:
        ValueError: on every rank, if no response is left, unless `may_fail`; this rank's first failure if it has one.
    """
    scored = rollouts["trained_rows"]
    incomparable = _only_ones_with_reward(rollouts) if compares_group else torch.zeros_like(scored)
    rollouts["trained_rows"] = scored & ~incomparable
    errors = [str(failure) for failure in failures[:_MAX_SHOWN]]
    errors = [error for errors_of_rank in gather_list(errors, accelerator) for error in errors_of_rank]
    num_failed = int((~scored).sum())
    if not num_failed:
        return ""
    text = f"{num_failed} of {len(scored)} responses give no gradient because their reward failed"
    if bool(incomparable.any()):
        text += f", and {int(incomparable.sum())} because no other response to their prompt has a reward"
    text += ":\n" + "\n".join(f"- {error}" for error in errors[:_MAX_SHOWN])
    if may_fail or bool(rollouts["trained_rows"].any()):
        return text
    raise failures[0] if failures else ValueError(text)


def _only_ones_with_reward(rollouts: Rollouts) -> Tensor:
    """(B,) bool, True = no other response to the row's prompt has a reward, as some failed. Empty ones do not count."""
    scored = rollouts["trained_rows"]
    _, group = torch.unique(rollouts["prompt_ids"], return_inverse=True)
    member = scored & rollouts["response_mask"].any(dim=1)
    members = torch.bincount(group[member], minlength=len(group))[group]
    failed = torch.bincount(group[~scored], minlength=len(group))[group]
    return member & (members == 1) & (failed > 0)
