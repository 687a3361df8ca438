"""Every number that decides whether a rule of the doctor finds something, in one table, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """One number, and why it is that one."""

    value: float
    reason: str


LIMITS: dict[str, Limit] = {
    # Rewards
    "constant_reward_spread": Limit(1e-6, "relative to the score; float32 rounds the mean of equal scores below this"),
    "constant_reward_steps": Limit(3, "steps in a row: a pass-or-fail reward may be all 0 in one small step"),
    "vanished_spread_steps": Limit(5, "steps in a row without spread, where there has been some before"),
    "window": Limit(5, "steps that are averaged, so that one unusual batch does not speak for the run"),
    "trend_steps": Limit(15, "policy steps before a trend is judged: three windows"),
    "reward_fall_stds": Limit(0.5, "standard deviations of the first scores; five steps of 32 responses vary by 0.08"),
    "heldout_fall_stds": Limit(
        0.3, "standard deviations below the best; measured healthy runs stay within 0.15, over-optimised ones pass 1"
    ),
    "heldout_fall_errors": Limit(3, "standard errors, where an evaluation has them"),
    "heldout_evaluations": Limit(3, "evaluations: with two, every noisy difference is a fall"),
    "eval_fall_stds": Limit(0.3, "standard deviations below the score before training; healthy runs end above it"),
    "eval_fall_stds_error": Limit(0.5, "standard deviations; of a pass rate around 0.5, a quarter of the prompts"),
    "eval_fall_errors": Limit(3, "standard errors of the difference, as if the two evaluations were independent"),
    "eval_fall_evaluations": Limit(3, "evaluations without standard errors; with them, two can tell a fall from noise"),
    "reward_rise_stds": Limit(0.25, "the trained reward must have risen meanwhile; else nothing was over-optimised"),
    "source_drowned": Limit(0.02, "of the loudest source's standard deviation: 0.04% of the variance"),
    "source_drowned_steps": Limit(20, "first steps that are judged: later, a source may be quiet because it is solved"),
    "model_range_stds": Limit(
        3, "standard deviations of its first scores; in the laboratory, good runs move by 1.2, over-optimised ones by 4"
    ),
    "model_range_stds_error": Limit(8, "no sample of the starting policy is ever there"),
    # Policy
    "policy_still_steps": Limit(10, "policy steps at the full learning rate"),
    "policy_still_update": Limit(1e-5, "nats per token by k3: a log-prob moves by 0.004; healthy first updates: 1e-3"),
    "policy_still_kl": Limit(1e-3, "nats per token to the reference after these steps; healthy runs have 0.02"),
    "policy_frozen_update": Limit(1e-8, "nats per token by k3: rounding in float32 gives 1e-13"),
    "policy_frozen_kl": Limit(1e-4, "nats per token, beside such updates: k1 has a noise of 1e-5 even then"),
    "policy_frozen_kl_alone": Limit(1e-5, "nats per token, where one update a step leaves only this; rounding: 1e-7"),
    "kl_per_token": Limit(0.5, "nats per token; the healthy runs of the laboratory stay below 0.25"),
    "kl_per_token_error": Limit(1.0, "nats per token: each token e times as likely as under the reference"),
    "kl_growth": Limit(5, "times the KL of twenty steps before"),
    "kl_growth_steps": Limit(20, "steps of that comparison"),
    "kl_growth_floor": Limit(0.25, "nats per token; below, every KL grows from 0 by large factors"),
    "negative_kl": Limit(-0.01, "nats per token: k1 of thousands of tokens has a noise of 0.001"),
    "negative_kl_steps": Limit(10, "steps that are averaged"),
    "entropy_collapse": Limit(0.2, "of the first entropy; the laboratory's runs keep 0.6 to 0.9 of it"),
    "entropy_collapse_error": Limit(0.02, "of the first entropy, without any gain in reward: nothing left to explore"),
    "entropy_explosion": Limit(2, "times the first entropy, and half a nat more"),
    "entropy_floor": Limit(0.01, "nats per token; a start below it has no entropy to lose"),
    "length_growth": Limit(2, "times the first lengths, together with the next limit: long reasoning is no fault"),
    "length_growth_truncated": Limit(0.3, "share cut off; healthy runs of the laboratory stay below 0.04"),
    "length_collapse": Limit(0.25, "of the first lengths"),
    "length_empty": Limit(2, "tokens: the stop token and at most one more"),
    "length_empty_start": Limit(8, "tokens at the start; shorter answers may be meant"),
    "all_truncated": Limit(0.9, "share of responses that are cut off, in every step of a window"),
    "truncated_at_start": Limit(0.5, "share at the start; from above it, long responses are the task's or the model's"),
    "grad_spike": Limit(10, "times the median norm of the steps before, and above the norm that is clipped to"),
    "grad_spike_error": Limit(100, "times: a loss that has left its scale, not an unusual batch"),
    "grad_spike_steps": Limit(20, "steps of that median; at least half of them must be there"),
    "clip_high": Limit(0.3, "share of clipped tokens; 0.01 to 0.1 is usual"),
    "clip_high_error": Limit(0.6, "most of the batch gives no gradient"),
    "clip_zero_steps": Limit(20, "policy steps at the full learning rate in which no token was clipped"),
    "update_kl": Limit(0.1, "nats per token between old and new policy; the largest of healthy runs is 0.035"),
    "mismatch_float32": Limit(1e-3, "nats per token; the bound of the run's own warning"),
    "mismatch_half": Limit(0.05, "nats per token in half precision; likewise"),
    "mismatch_error": Limit(0.1, "nats per token; the bound at which mismatch_action: stop ends a run"),
    "first_ratio_float32": Limit(0.01, "float32 rounds a ratio by 1e-5"),
    "first_ratio_half": Limit(3, "bfloat16 may double the ratio of a single unlikely token"),
    "first_ratio_error": Limit(0.1, "in float32: half of PPO's clip range before anything was learned"),
    # Critic
    "critic_useless_steps": Limit(20, "steps in a row with an explained variance below 0: a constant would do better"),
    "critic_harmful": Limit(-1, "explained variance: the critic doubles the variance of the advantages"),
    "critic_offset_stds": Limit(2, "standard deviations of the returns between mean value and mean return"),
    "critic_offset_steps": Limit(10, "steps in a row, after as many for the critic to begin"),
    "critic_spread": Limit(10, "times the variance of the returns"),
    "outside_support": Limit(0.05, "share of returns; the laboratory's C51 runs have at most 0.02"),
    "outside_support_error": Limit(0.5, "most returns cannot be represented"),
    "edge_mass": Limit(0.5, "probability of the outermost atoms: the distribution lies beyond the support"),
    # Data and time
    "duplicate_prompts": Limit(0.1, "share of prompts that another repeats"),
    "duplicate_prompts_least": Limit(20, "prompts; fewer prove nothing"),
    "identical_responses": Limit(0.8, "share of responses that equal another one to the same prompt"),
    "identical_responses_error": Limit(0.98, "sampling gives the same answer every time"),
    "uniform_groups": Limit(0.9, "share of prompts whose responses all score the same: a tenth of the batch is used"),
    "padding": Limit(0.5, "share of the positions that an update computes"),
    "phase_score": Limit(0.5, "share of a step's time; rewards can be computed during sampling"),
    "phase_rollout": Limit(0.9, "share of a step's time; half to three quarters is usual"),
    "phase_logprobs": Limit(0.5, "share of a step's time; it is one forward pass of each model"),
    "phase_update": Limit(0.9, "share of a step's time"),
    "phase_eval": Limit(0.5, "share of the whole time"),
    "phase_seconds": Limit(1.0, "seconds of a step; where steps are shorter, nobody waits"),
}
"""The limits. Those that speak of measured runs were set on the seeds of examples/mini_farm (the laboratory) and
examples/long_horizon, whose metrics are among the tests."""


def limit(name: str) -> float:
    """Returns the number of that name."""
    return LIMITS[name].value


def count(name: str) -> int:
    """Returns the number of that name, which counts steps or rows."""
    return int(LIMITS[name].value)
