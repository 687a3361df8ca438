"""Checks of what the trainer's hooks return, so that an error names the hook at fault instead of showing up in a later
tensor operation.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import zero_outside
from alpaca_ppo.functional.shaping import last_token_index
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.types import PromptBatch, Rollouts

SHAPED = ("shaped_rewards", "non_score_rewards", "kl")
ESTIMATED = ("advantages", "returns")
SAMPLED = ("responses", "response_mask", "rollout_logprobs", "stopped")
SCORED = ("scores", "rewards", "scores_by_source")


def check_full_softmax(sampling_params: SamplingParams) -> None:
    """Checks that training samples from the whole softmax, which is what every log-prob is of.

    Raises:
        ValueError: for `top_k` or `top_p`.
    """
    if sampling_params.top_k is not None or sampling_params.top_p is not None:
        raise ValueError(
            f"the rollouts of training would be sampled with top_k {sampling_params.top_k} and top_p "
            f"{sampling_params.top_p}, but the log-probs of policy, old policy and reference are those of all tokens: "
            "the ratios would be those of another policy than the one that sampled. Leave both None, and use "
            "eval_top_p for evaluation"
        )


def complete_samples(samples: Any, prompts: PromptBatch, sampling_params: SamplingParams) -> dict[str, Tensor]:
    """The checked result of `_generate`, with `queries`, `query_attn_masks`, `prompt_ids` and `sample_ids` added.

    Args:
        samples: returned by the hook; `queries` and `query_attn_masks` default to those of `prompts`.
        prompts: the P prompts that the hook was called with.
        sampling_params: those that the hook was called with; each prompt has its `num_return_sequences` (n) rows next
            to one another.

    Raises:
        ValueError: for a missing key, a shape other than (P * n, R) with R = max_new_tokens, a response without a
            chosen token, or a prompt that is not left-padded, or whose width differs from `prompts`.
        FloatingPointError: for log-probs under the mask that are not finite.
    """
    _check_keys("_generate", samples, SAMPLED)
    n = sampling_params.num_return_sequences
    rows, width = len(prompts["rows"]) * n, prompts["queries"].size(1)
    given = sampling_params.sample_ids
    sample_ids = torch.arange(n).repeat(len(prompts["rows"])) if given is None else torch.tensor(given)
    shapes = dict.fromkeys(SAMPLED, (rows, sampling_params.max_new_tokens)) | {"stopped": (rows,)}
    complete = {
        "queries": prompts["queries"].repeat_interleave(n, dim=0),
        "query_attn_masks": prompts["query_attn_masks"].repeat_interleave(n, dim=0),
        **samples,
        # Always computed from `prompts`; values that the hook returned under these names are ignored.
        "prompt_ids": prompts["prompt_ids"].repeat_interleave(n),
        "sample_ids": sample_ids,
    }
    shapes |= dict.fromkeys(("queries", "query_attn_masks"), (rows, width))
    for key, value in complete.items():
        wanted = shapes.get(key, (rows,))
        if not isinstance(value, Tensor) or value.shape[: len(wanted)] != wanted:
            raise ValueError(
                f"_generate() returned {key} as {_described(value)}; it must be a tensor of shape {wanted}: "
                f"{n} rows for each of the {len(prompts['rows'])} prompts"
            )
    _check_rows(complete)
    return {key: value.cpu() for key, value in complete.items()}


def _check_rows(samples: Mapping[str, Tensor]) -> None:
    mask, attention = samples["response_mask"], samples["query_attn_masks"].bool()
    dtypes = {"responses": torch.long, "queries": torch.long, "response_mask": torch.bool, "stopped": torch.bool}
    for key, dtype in dtypes.items():
        if samples[key].dtype != dtype:
            raise ValueError(f"_generate() returned {key} as {samples[key].dtype}; it must be {dtype}")
    if bool((empty := ~mask.any(dim=1)).any()):
        raise ValueError(
            f"_generate() returned a response_mask without a chosen token in row {int(empty.nonzero()[0])}; every "
            "response needs at least one"
        )
    # Padding right of a token: a True column before a False one.
    if bool((wrong := (attention[:, :-1] & ~attention[:, 1:]).any(dim=1) | ~attention[:, -1]).any()):
        raise ValueError(
            f"_generate() returned query_attn_masks whose row {int(wrong.nonzero()[0])} is not left-padded; a prompt "
            "ends in the last column"
        )
    if not bool(torch.isfinite(samples["rollout_logprobs"][mask]).all()):
        raise FloatingPointError(
            "_generate() returned rollout_logprobs that are not finite under response_mask; nothing was trained on them"
        )


def check_scores(scores: Any, samples: Mapping[str, Tensor], *, num_sources: int) -> dict[str, Tensor]:
    """The checked result of `_score` for the C rows of `samples`; (C, R) rewards are zeroed outside `response_mask`.

    Raises:
        ValueError: for a missing key, a key of the samples, or a shape other than `scores` (C,), `rewards` (C,) or
            (C, R) and `scores_by_source` (C, num_sources).
    """
    _check_keys("_score", scores, SCORED)
    if taken := sorted(set(scores) & set(samples)):
        raise ValueError(f"_score() returned {', '.join(taken)}, which _generate() returned already; use other names")
    rows, width = samples["responses"].shape
    allowed: dict[str, list[tuple[int, ...]]] = {
        "scores": [(rows,)],
        "rewards": [(rows,), (rows, width)],
        "scores_by_source": [(rows, num_sources)],
    }
    for key, value in scores.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if shape not in allowed.get(key, [(rows, *shape[1:])]):
            wanted = " or ".join(str(one) for one in allowed.get(key, [(rows, "...")]))
            raise ValueError(f"_score() returned {key} as {_described(value)}; it must be a tensor of shape {wanted}")
    if scores["rewards"].dim() == 1:
        return dict(scores)
    return {**scores, "rewards": zero_outside(scores["rewards"], samples["response_mask"])}


def per_token(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Rewards (C, R): those of tokens as they are, that of a response (C,) on its last chosen token."""
    if rewards.dim() == 2:
        return rewards
    last = last_token_index(response_mask).unsqueeze(1)
    return rewards.new_zeros(response_mask.shape).scatter(1, last, rewards.unsqueeze(1))


def check_rollouts(rollouts: Any) -> None:
    """Checks that every entry of what `rollout` returned is a tensor with one row for each response.

    Raises:
        ValueError: if one is not; names the entry.
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
    """Checks what `hook` returned and adds it to `rollouts`.

    Args:
        rollouts: changed in place.
        hook: the method's name.
        returned: a dictionary of tensors with one row per response; those in `required` are (B, R).
        required: keys that it must have.

    Raises:
        ValueError: for a missing key, or a tensor of another shape.
        FloatingPointError: for values under the mask that are not finite.
    """
    _check_keys(hook, returned, required)
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


def _check_keys(hook: str, returned: Any, required: tuple[str, ...]) -> None:
    is_mapping = isinstance(returned, Mapping)
    if not is_mapping or (missing := [key for key in required if key not in returned]):
        found = f"a dict without {', '.join(missing)}" if is_mapping else _described(returned)
        raise ValueError(f"{hook}() returned {found}; it must return a dict with {', '.join(required)}")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    return f"a {type(value).__name__}"
