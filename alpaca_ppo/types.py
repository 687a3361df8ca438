"""The two dictionaries that travel through the trainer, with each key's shape and meaning.

B counts sequences, Q prompt columns, R response columns. Entry t of every (B, R) tensor belongs to the action
`responses[:, t]`. What stands outside `response_mask` is zero. The module holds no behaviour.
"""

from typing import Any, NotRequired, Required, TypedDict

from torch import Tensor


class PromptBatch(TypedDict):
    """Prompts of one device batch, left-padded."""

    queries: Tensor
    """(B, Q) int64 token ids, left-padded."""
    query_attn_masks: Tensor
    """(B, Q) int64, 1 = a real token. It comes from the prompts' lengths, never from comparing with the pad id."""
    prompt_ids: Tensor
    """(B,) int64 index of the prompt in the dataset: the key of its sampling randomness."""
    rows: list[dict[str, Any]]
    """The B dataset rows, every column as the dataset has it; `prompt` is what the reward functions see."""


class Rollouts(TypedDict, total=False):
    """The global rollouts of one step, on the CPU. A subclass may add tensors with the same leading size."""

    queries: Required[Tensor]
    """(B, Q) int64, left-padded."""
    query_attn_masks: Required[Tensor]
    """(B, Q) int64."""
    prompt_ids: Required[Tensor]
    """(B,) int64 dataset index of the prompt."""
    sample_ids: Required[Tensor]
    """(B,) int64: which of the prompt's `num_return_sequences` samples this row is."""
    responses: Required[Tensor]
    """(B, R) int64, right-padded; R is `response_len` whatever was sampled."""
    response_mask: Required[Tensor]
    """(B, R) bool: a token the policy chose, the stop token included."""
    stopped: Required[Tensor]
    """(B,) bool: False where no stop token came within `response_len`."""
    rollout_logprobs: Required[Tensor]
    """(B, R) float32: the sampler's log-probabilities, in nats."""
    logprobs: Required[Tensor]
    """(B, R) float32: the old policy's, by the trainer's own forward pass (`old_policy: rollout`: the sampler's)."""
    ref_logprobs: Required[Tensor]
    """(B, R) float32: the reference policy's."""
    entropies: NotRequired[Tensor]
    """(B, R) float32: entropy of the policy's distribution at each step, in nats; not with `old_policy: rollout`."""
    ref_entropies: NotRequired[Tensor]
    """(B, R) float32: the reference policy's entropy; without a reference, `ref_logprobs` is `logprobs` instead."""
    values: NotRequired[Tensor]
    """(B, R) float32: value of the state before the action; only where there is a critic, like the next one."""
    value_means: NotRequired[Tensor]
    """(B, R) float32: mean of the distribution that a critic learns; equal to `values` without a risk level."""
    scores: Required[Tensor]
    """(B,) float32: sum of the reward sources before any penalty."""
    scores_by_source: Required[Tensor]
    """(B, sources) float32: each reward source's own score, NaN where it had no opinion."""
    baseline_scores: NotRequired[Tensor]
    """(B,) float32: reward of the prompt's greedy response, for remax."""
    rewards: Required[Tensor]
    """(B,) float32 after the penalty for a missing stop token, or (B, R) per token."""
    shaped_rewards: Tensor
    """(B, R) float32, set by `_shape_reward`."""
    non_score_rewards: Tensor
    """(B, R) float32, set by `_shape_reward`: the KL penalty alone."""
    kl: Tensor
    """(B, R) float32, set by `_shape_reward`: the per-token KL estimate, in nats."""
    advantages: Tensor
    """(B, R) float32, set by `_estimate_advantage`."""
    returns: Tensor
    """(B, R) float32, set by `_estimate_advantage`."""
    loss_weights: NotRequired[Tensor]
    """(B, R) float32, set by `step_with_rollouts` for `old_policy: correct`: importance weights of the tokens."""
    value_taus: NotRequired[Tensor]
    """(K,), only in the batch that `compute_loss` gets: quantile levels of the critic's predictions, where its head
    samples them (iqn)."""
    denominator: NotRequired[Tensor]
    """Scalar, only in the batch that `compute_loss` gets: tokens or sequences of the whole optimizer-step batch."""
