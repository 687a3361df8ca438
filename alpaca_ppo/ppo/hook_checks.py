"""What the trainer's hooks must return, checked where they return it: a mistake in a subclass is named there, not met
as an error of some tensor operation later.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.types import Rollouts

SHAPED = ("shaped_rewards", "non_score_rewards", "kl")
ESTIMATED = ("advantages", "returns")


class NonFiniteUpdate(FloatingPointError):
    """An optimizer step that was refused: weights, optimizer and schedule are as before it.

    Args:
        cause: which loss term of which rank, or the gradient's norm.
        prompt_ids: of the whole batch.
    """

    def __init__(self, cause: str, prompt_ids: Sequence[int]) -> None:
        super().__init__(
            f"{cause}: the update was refused and the weights are as before it. Prompts of the batch: "
            f"{list(prompt_ids)}. Look for a learning_rate that is too high, or for non-finite values in a custom hook"
        )
        self.cause, self.prompt_ids = cause, list(prompt_ids)


def check_rollouts(rollouts: Any) -> None:
    """Every entry of what `rollout` returned must be a tensor with one row for each response.

    Raises:
        ValueError: names the entry that is not.
    """
    if not isinstance(rollouts, dict) or not isinstance(rollouts.get("responses"), Tensor):
        raise ValueError(
            f"rollout() returned {_described(rollouts)}; it must return a dict of tensors, `responses` among them"
        )
    rows = rollouts["responses"].size(0)
    for key, value in rollouts.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or value.size(0) != rows:
            raise ValueError(
                f"rollouts[{key!r}] is {_described(value)}; every entry must be a tensor with one row for each of the "
                f"{rows} responses"
            )


def add_to_rollouts(rollouts: Rollouts, hook: str, returned: Any, required: tuple[str, ...]) -> None:
    """Puts what `hook` returned into `rollouts`.

    Args:
        rollouts: changed in place.
        hook: the method's name.
        returned: a dictionary of tensors with one row a response; what `required` names is (B, R).
        required: keys that it must have.

    Raises:
        ValueError: for a missing key, or a tensor of another shape.
    """
    if not isinstance(returned, Mapping) or (missing := [key for key in required if key not in returned]):
        lacks = f"without {', '.join(missing)}" if isinstance(returned, Mapping) else f"as {_described(returned)}"
        raise ValueError(f"{hook}() returned its result {lacks}; it must return a dict with {', '.join(required)}")
    shape = rollouts["responses"].shape
    for key, value in returned.items():
        wanted = shape if key in required else shape[:1]
        if not isinstance(value, Tensor) or value.shape[: len(wanted)] != wanted:
            raise ValueError(
                f"{hook}() returned {key} as {_described(value)}; it must be a tensor of shape {tuple(wanted)}"
            )
        if key in required and not bool(torch.isfinite(value[rollouts["response_mask"]]).all()):
            raise FloatingPointError(
                f"{hook}() returned {key} with numbers that are not finite under response_mask; nothing was trained on "
                "them. Look at the rewards, and at the log-probs of policy and reference"
            )
    rollouts.update(returned)  # type: ignore[typeddict-item]


def non_finite(loss: Tensor, stats: Mapping[str, Any]) -> str | None:
    """Says which terms (`loss/*` in `stats`) keep `loss` from being finite; None where it is."""
    if bool(torch.isfinite(loss.detach())):
        return None
    terms = {name: float(value) for name, value in stats.items() if name.startswith("loss/") and name != "loss/total"}
    bad = [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]
    return " and ".join(bad or [f"the loss is {float(loss.detach())}"])


def check_loss(loss: Any) -> None:
    """What `compute_loss` returned first must be a number that a gradient flows from.

    Raises:
        ValueError: when it is not.
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
        raise ValueError(
            f"compute_loss() returned its loss as {_described(loss)}; it must be a scalar tensor with a gradient, and "
            "come first in a pair (loss, stats)"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    return f"a {type(value).__name__}"
