"""The two dictionaries that pass through the trainer, with the shape, dtype and meaning of each key.

B counts sequences, Q prompt columns, R response columns. Entry t of every (B, R) tensor belongs to the action
`responses[:, t]`, and is zero outside `response_mask`. Log-probabilities, entropies and KL are in nats. Scores,
rewards, values, advantages and returns are in reward units.
"""

from typing import Any, NotRequired, Required, TypedDict

from torch import Tensor

EPISODE = "<episode>"
"""The key of a dataset row under which reward sources find its episode, with environments."""


class Queries(TypedDict):
    """B prompts."""

    queries: Tensor
    """(B, Q) int64 token ids, left-padded."""
    query_attn_masks: Tensor
    """(B, Q) int64, 1 = a token of the prompt, 0 = padding; the pad id may occur inside a prompt."""
    prompt_ids: Tensor
    """(B,) int64, index in the dataset, which keys the random numbers of the prompt's responses."""


class PromptBatch(Queries):
    """B prompts with their dataset rows."""

    rows: list[dict[str, Any]]
    """B rows with all columns; `prompt` is the text or messages that reward functions get."""
    num_dummies: NotRequired[int]
    """The number of rows at the end that only keep this rank in step with others, and are left out of the rollouts."""
    sampling_round: NotRequired[int]
    """The round in which `dynamic_sampling` drew them; 0, as without this key, for the step's own prompts."""
    episodes: NotRequired[Any]
    """What answers the responses (`environments.episodes.Episodes`), where there are environments."""


class Rollouts(Queries, total=False):
    """The rollouts of one step from all ranks, on the CPU. A subclass may add tensors with the same leading size."""

    sample_ids: Required[Tensor]
    """(B,) int64, number of the response among the prompt's `num_return_sequences`, from 0."""
    responses: Required[Tensor]
    """(B, R) int64 token ids, right-padded; R is always `response_len`."""
    trained_rows: NotRequired[Tensor]
    """(B,) bool, with `failed_rewards: mask`: False = the reward failed and is 0, or is the only one of its prompt that
    did not fail; the row gives no gradient and is left out of whitening, groups and denominators."""
    response_mask: Required[Tensor]
    """(B, R) bool, True = a token that the policy chose, including the stop token. There may be holes: tokens that
    something else wrote into the response, such as a tool."""
    stopped: Required[Tensor]
    """(B,) bool, True = ended by a stop or truncate token, False = cut off after R tokens."""
    rollout_logprobs: Required[Tensor]
    """(B, R) float32, log-probabilities under the policy, as computed by the sampler."""
    logprobs: Required[Tensor]
    """(B, R) float32, log-probabilities under the old policy: of the trainer's forward pass, or, without `recomputed`,
    a copy of `rollout_logprobs`."""
    recomputed: NotRequired[Tensor]
    """(B,) bool, all True: `logprobs` are of the trainer's forward pass, so sampler and trainer can be compared. Absent
    with `old_policy: rollout`, and in steps in which `auto` takes the sampler's."""
    ref_logprobs: Required[Tensor]
    """(B, R) float32, log-probabilities under the reference policy; without one, a copy of `logprobs`."""
    teacher_logprobs: NotRequired[Tensor]
    """(B, R) float32, log-probabilities under the teacher of a distillation."""
    teacher_top_tokens: NotRequired[Tensor]
    """(B, R) float32, 1 = the token is the teacher's likeliest."""
    entropies: NotRequired[Tensor]
    """(B, R) float32, entropy of the old policy at each token; absent without `recomputed`, and in steps that log no
    entropies (`ppo.metrics.ENTROPY_STEPS`)."""
    ref_entropies: NotRequired[Tensor]
    """(B, R) float32, the same of the reference policy; absent without one, and in steps that log no entropies."""
    values: NotRequired[Tensor]
    """(B, R) float32, the critic's value of the state before the action; absent without a critic."""
    value_means: NotRequired[Tensor]
    """(B, R) float32, means of a distributional critic's return distributions, which `values` are too without a risk
    level; absent for other critics."""
    state_keys: NotRequired[Tensor]
    """(B, 2) int64, with a cached critic: the rank that keeps the states which it reads, and their number there."""
    scores: Required[Tensor]
    """(B,) float32, weighted sum of the reward sources, before penalties."""
    scores_by_source: Required[Tensor]
    """(B, sources) float32, unweighted; NaN where a source returned None or failed."""
    baseline_scores: NotRequired[Tensor]
    """(B,) float32, reward of the prompt's greedy response; only for remax."""
    rewards: Required[Tensor]
    """(B,) float32, or (B, R) if a reward source scores tokens; after penalties for a missing stop and for length."""
    overlong_penalties: NotRequired[Tensor]
    """(B,) float32, at most 0: the penalty for length in `rewards`; with `overlong_buffer_len`."""
    num_turns: NotRequired[Tensor]
    """(B,) int64, turns of the policy; with environments or tools, as the next five."""
    environment_seconds: NotRequired[Tensor]
    """(B,) float32, seconds in calls of the environment and of tools."""
    environment_tokens: NotRequired[Tensor]
    """(B,) int64, tokens between the policy's first and last one that it did not choose."""
    tool_tokens: NotRequired[Tensor]
    """(B, R) bool, True = a token of a tool's result, within a hole of `response_mask`."""
    tool_calls: NotRequired[Tensor]
    """(B,) int64, including failed ones."""
    tool_failures: NotRequired[Tensor]
    """(B,) int64, tool calls that were malformed, of an unknown tool, with wrong arguments, too slow or raised."""
    shaped_rewards: Tensor
    """(B, R) float32, set by `_shape_reward`: reward and KL penalty of each token."""
    non_score_rewards: Tensor
    """(B, R) float32, set by `_shape_reward`: the KL penalty only."""
    kl: Tensor
    """(B, R) float32, set by `_shape_reward`: the KL estimate of each token."""
    advantages: Tensor
    """(B, R) float32, set by `_estimate_advantage`; without a unit if whitened."""
    returns: Tensor
    """(B, R) float32, set by `_estimate_advantage`: the targets of the critic."""
    ratio: NotRequired[Tensor]
    """(B, R) float32, probability of each token under the updated policy, divided by that under the old one; only in
    the rows of which the table of rollouts is made, in steps that log entropies."""
    loss_weights: NotRequired[Tensor]
    """(B, R) float32, set by `step_with_rollouts` with `old_policy: correct`: importance weight of each token."""
    value_taus: NotRequired[Tensor]
    """(K,) float32 in (0, 1), quantile levels of an iqn critic's loss; only in the batch of a loss."""
    positive_tokens: NotRequired[Tensor]
    """Scalar, tokens of successful responses in the whole optimizer-step batch, at least 1; with `positive_nll_coef`,
    and only in the batch of a loss."""
    denominator: NotRequired[Tensor]
    """Scalar, tokens or sequences of the whole optimizer-step batch, by which the loss is divided; only in the batch of
    a loss."""
