"""Checks of what the trainer's hooks return, so that an error names the hook."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from alpaca_ppo.types import PromptBatch, Rollouts

_LOSS_HOOKS = {"policy": "compute_policy_loss", "critic": "compute_value_loss"}
RETURNED = {
    "_shape_reward": ("shaped_rewards", "non_score_rewards", "kl"),
    "_estimate_advantage": ("advantages", "returns"),
}


def complete_samples(samples: Any, prompts: PromptBatch, params: Any) -> dict[str, Tensor]:
    """The checked result of `_generate` on the CPU, with `queries`, `query_attn_masks`, `prompt_ids` and `sample_ids`.

    Args:
        samples: returned by the hook; `queries` and `query_attn_masks` default to those of `prompts`.
        prompts: the P prompts that the hook was called with; each has n neighbouring rows.
        params: the hook's `SamplingParams`: n is `num_return_sequences`, R `max_new_tokens`.

    Raises:
        ValueError: for a missing key, a wrong shape or dtype, a response without a chosen token, or a prompt that is
            not left-padded.
        FloatingPointError: for log-probs under the mask that are not finite.
    """
    n, count = params.num_return_sequences, len(prompts["rows"])
    row_shape, shape = (count * n,), (count * n, params.max_new_tokens)
    prompt_shape = (count * n, prompts["queries"].size(1))
    shapes = {"responses": shape, "response_mask": shape, "rollout_logprobs": shape, "stopped": row_shape}
    complete: Any = samples
    if isinstance(samples, Mapping):
        complete = {
            "queries": prompts["queries"].repeat_interleave(n, dim=0),
            "query_attn_masks": prompts["query_attn_masks"].repeat_interleave(n, dim=0),
            **samples,
            # These replace what the hook returned under the same names.
            "prompt_ids": prompts["prompt_ids"].repeat_interleave(n),
            "sample_ids": torch.tensor(params.sample_ids or [*range(n)] * count, dtype=torch.long),
        }
    _check("_generate", complete, {**shapes, "queries": prompt_shape, "query_attn_masks": prompt_shape}, row_shape)
    mask, attention = complete["response_mask"], complete["query_attn_masks"].bool()
    dtypes = {"responses": torch.long, "queries": torch.long, "response_mask": torch.bool, "stopped": torch.bool}
    for key, dtype in dtypes.items():
        if complete[key].dtype != dtype:
            raise ValueError(f"_generate() returned {key} as {complete[key].dtype}; it must be {dtype}")
    if bool((empty := ~mask.any(dim=1)).any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"_generate() returned a response_mask without a chosen token in row {row}")
    # A True column before a False one is padding to the right of a token.
    right_padded = (attention[:, :-1] & ~attention[:, 1:]).any(dim=1) | ~attention[:, -1]
    if bool(right_padded.any()):
        row = int(right_padded.nonzero()[0])
        raise ValueError(f"_generate() returned query_attn_masks in row {row} that are not left-padded")
    _check_finite("_generate", {"rollout_logprobs": complete["rollout_logprobs"]}, mask)
    return {key: value.cpu() for key, value in complete.items()}


def check_scores(scores: Any, samples: Mapping[str, Tensor], *, num_sources: int) -> dict[str, Tensor]:
    """The checked result of `_score` for the C rows of `samples`; (C, R) rewards are zeroed outside `response_mask`.

    Raises:
        ValueError: for a missing key, one that `samples` has already, or a shape other than `scores` (C,), `rewards`
            (C,) or (C, R), `scores_by_source` (C, num_sources) and (C, ...) of any other tensor.
    """
    rows, width = samples["responses"].shape
    rewards: Any = scores.get("rewards") if isinstance(scores, Mapping) else None
    of_tokens = isinstance(rewards, Tensor) and rewards.dim() == 2
    shape = (rows, width) if of_tokens else (rows,)
    _check("_score", scores, {"scores": (rows,), "rewards": shape, "scores_by_source": (rows, num_sources)}, (rows,))
    if taken := sorted(set(scores) & set(samples)):
        raise ValueError(f"_score() returned {', '.join(taken)}, which _generate() returned already; use other names")
    if not of_tokens:
        return dict(scores)
    return {**scores, "rewards": torch.where(samples["response_mask"], rewards, 0.0)}


def check_rollouts(rollouts: Any) -> Rollouts:
    """The checked result of `rollout`.

    Raises:
        ValueError: unless every entry is a tensor with one row for each response.
    """
    responses = rollouts.get("responses") if isinstance(rollouts, Mapping) else None
    shape = tuple(responses.shape) if isinstance(responses, Tensor) else ()
    _check("rollout", rollouts, {"responses": shape}, shape[:1])
    return cast(Rollouts, rollouts)


def checked(hook: str, returned: Any, rollouts: Rollouts) -> Rollouts:
    """The checked result of `_shape_reward` or `_estimate_advantage`, which `step` adds to `rollouts`.

    Raises:
        ValueError: unless it has the hook's tensors (`RETURNED`) of (B, R), and others of one row for each response.
        FloatingPointError: for values under the mask that are not finite.
    """
    shape, required = tuple(rollouts["responses"].shape), RETURNED[hook]
    _check(hook, returned, dict.fromkeys(required, shape), shape[:1])
    _check_finite(hook, {key: returned[key] for key in required}, rollouts["response_mask"])
    return cast(Rollouts, returned)


def _check(hook: str, returned: Any, shapes: Mapping[str, tuple[int, ...]], rows: tuple[int, ...]) -> None:
    """Checks that `returned` has tensors of `shapes`, and that the first dimension of others is `rows`."""
    if not isinstance(returned, Mapping):
        found = f"a {type(returned).__name__}"
    else:
        missing = [key for key in shapes if key not in returned]
        found = f"a dict without {', '.join(missing)}" if missing else ""
    if found:
        raise ValueError(f"{hook}() returned {found}; it must return a dict with {', '.join(shapes)}")
    for key, value in returned.items():
        wanted = shapes.get(key, rows)
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape is None or (shape if key in shapes else shape[:1]) != wanted:
            found = f"as a {type(value).__name__}" if shape is None else f"of shape {shape}"
            raise ValueError(f"{hook}() returned {key} {found}; it must be a tensor of shape {wanted}")


def _check_finite(hook: str, tensors: Mapping[str, Tensor], mask: Tensor) -> None:
    for key, value in tensors.items():
        if not bool(torch.isfinite(value[mask]).all()):
            raise FloatingPointError(f"{hook}() returned non-finite {key} under response_mask; no step was taken")


def checked_terms(part: str, returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The checked result of the loss hook of policy or critic (`part`): the loss and its statistics.

    Raises:
        ValueError: unless the loss is a scalar with a gradient.
    """
    loss = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else None
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
        raise ValueError(f"{_LOSS_HOOKS[part]}() returned {returned!r:.200}; return (scalar with a gradient, stats)")
    return cast(tuple[Tensor, dict[str, Tensor]], returned)
