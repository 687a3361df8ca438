"""The metrics of a step, as flat dictionaries of floats; `objective/*` and `ppo/*` use AlpacaFarm's names.

Every rank has the rollouts of all ranks, so their metrics need no collective operation. Training statistics
are in `step_stats`. Means are over masked tokens or over sequences, never over padding. Writing the metrics is in
`tracking.run_log`.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import kl_penalty, masked_mean, masked_var
from alpaca_ppo.functional.groups import informative_rows
from alpaca_ppo.functional.kl import LOG_RATIO_LIMIT
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.ppo.trained_rows import trained_mask, with_reward
from alpaca_ppo.types import Rollouts


@dataclass
class RolloutCounts:
    """What was sampled for a step and is not in its rollouts, over all ranks."""

    sampling_rounds: int = 0
    """Rounds of fresh prompts (`dynamic_sampling`)."""
    redrawn_prompts: int = 0
    """Fresh prompts in these rounds."""
    discarded_tokens: int = 0
    """Tokens of responses to prompts that fresh ones have replaced."""
    uninformative_prompts: int = 0
    """Prompts in the step's rollouts whose responses all have the same score."""
    extra_prompts: int = 0
    """How much further than by the step's own prompts the sequence of prompts has moved."""

    logged: dict[str, list[float]] = field(default_factory=dict)
    """Sum and number of the values of each metric that reward functions have logged."""

    def stats(self, args: PPOConfig) -> dict[str, float]:
        """The metrics of a step, as far as the options and the reward functions can change them."""
        stats = self.logged_means()
        if args.dynamic_sampling:
            stats["objective/sampling_rounds"] = float(self.sampling_rounds)
            stats["objective/redrawn_prompts"] = float(self.redrawn_prompts)
            stats["objective/uninformative_prompts"] = float(self.uninformative_prompts)
            stats["tokens/discarded"] = float(self.discarded_tokens)
            stats["objective/extra_prompts"] = float(self.extra_prompts)
        return stats

    def logged_means(self) -> dict[str, float]:
        """Of what reward functions have logged, the means: all that an evaluation counts, which replaces no prompts."""
        return {f"reward/{name}": total / number for name, (total, number) in self.logged.items()}


class Timers:
    """Wall-clock seconds by phase.

    Args:
        during: returns a context manager in which a phase, given by name and number of parts, takes place.
    """

    def __init__(
        self,
        during: Callable[[str, int | None], AbstractContextManager[Any]] = lambda *_: nullcontext(lambda parts: None),
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._during = during

    @contextmanager
    def measure(self, phase: str, parts: int | None = None) -> Iterator[Callable[[int], None]]:
        """Adds the seconds spent inside the block to `phase`; yields a function that counts its `parts`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        with self._during(phase, parts) as count:
            yield count
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory in GiB: of allocated tensors on a GPU, of the process's resident set otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def standard_deviation(values: Tensor) -> float:
    """Returns the standard deviation of `values` (B,), without Bessel's correction: exactly 0 if all are equal, NaN if
    there are none.
    """
    if not len(values):
        return math.nan
    return float(masked_var(values, torch.ones_like(values, dtype=torch.bool), unbiased=False).sqrt())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Returns 1 - Var(returns - values) / Var(returns) over masked tokens; 0 if all returns are equal.

    1 is a perfect critic, 0 one that is no better than a constant.
    """
    variance = masked_var(returns, mask, unbiased=False)
    if float(variance) == 0.0:
        return 0.0
    return 1.0 - float(masked_var(returns - values, mask, unbiased=False) / variance)


def logs_entropies(step: int, args: PPOConfig) -> bool:
    """Whether the metrics of `step` (from 0) include entropies: the first step's, and every `entropy_logging_steps`-th.

    As with `logging_steps`, steps are counted from 1, so that trackers get both if one is a multiple of the other.
    """
    return step == 0 or (step + 1) % args.entropy_logging_steps == 0


@torch.no_grad()
def mismatch_stats(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns `mismatch/*`: how the trainer's log-probs differ from the sampler's, for the same policy.

    The mean absolute difference and k3 are in nats per token. If `mask` is empty, the largest ratio is 0.

    Args:
        logprobs: (B, R), from the trainer's forward pass, before the policy was updated.
        rollout_logprobs: (B, R), from the sampler.
        mask: (B, R) bool, True = a token that the policy chose.
    """
    difference = logprobs - rollout_logprobs
    return {
        "mismatch/logprob_abs_mean": masked_mean(difference.abs(), mask),
        "mismatch/k3": masked_mean(kl_penalty(logprobs, rollout_logprobs, "k3"), mask),
        "mismatch/ratio_max": torch.where(mask, difference, -torch.inf).max().clamp_max(LOG_RATIO_LIMIT).exp(),
    }


def objective_stats(rollouts: Rollouts, *, source_names: Sequence[str]) -> dict[str, float]:
    """Returns `objective/*` and `mismatch/*` of a step: rewards, KL and entropies in nats, lengths in tokens.

    Entropies are there if `rollouts` has them, the mismatch if the trainer has evaluated the policy (`recomputed`).

    Args:
        rollouts: the step's rollouts, with shaped rewards.
        source_names: names of the columns of `scores_by_source`. The mean of a source is over the rows that it scored.
    """
    of_responses, rollouts = response_stats(rollouts), with_reward(rollouts)
    mask = rollouts["response_mask"]
    by_source = rollouts["scores_by_source"].nanmean(dim=0).tolist()
    spreads = [standard_deviation(column[~column.isnan()]) for column in rollouts["scores_by_source"].unbind(dim=1)]
    stats = {
        **{f"objective/scores/{name}": mean for name, mean in zip(source_names, by_source, strict=True)},
        **{f"objective/scores_std/{name}": spread for name, spread in zip(source_names, spreads, strict=True)},
        **group_stats(rollouts),
        "objective/kl_sum_seq": float(rollouts["kl"].sum(dim=1).mean()),
        "objective/kl_avg_seq": float(masked_mean(rollouts["kl"], mask)),
        "objective/shaped_rewards": float(rollouts["shaped_rewards"].sum(dim=1).mean()),
        "objective/non_score_rewards": float(rollouts["non_score_rewards"].sum(dim=1).mean()),
        **{f"objective/{name}": value for name, value in of_responses.items()},
    }
    if "ref_entropies" in rollouts:
        stats["objective/ref_entropies"] = float(masked_mean(rollouts["ref_entropies"], mask))
    if "overlong_penalties" in rollouts:
        stats["objective/overlong_penalty"] = float(rollouts["overlong_penalties"].mean())
    if "baseline_scores" in rollouts:
        stats["objective/baseline_scores"] = float(rollouts["baseline_scores"].mean())
    if "entropies" in rollouts:
        stats["objective/entropies"] = float(masked_mean(rollouts["entropies"], mask))
    if "recomputed" not in rollouts:
        return stats
    mismatch = mismatch_stats(rollouts["logprobs"], rollouts["rollout_logprobs"], mask)
    return stats | {name: float(value) for name, value in mismatch.items()}


def group_stats(rollouts: Rollouts) -> dict[str, float]:
    """Returns how much the responses to a prompt differ; nothing if no prompt has more than one.

    `objective/identical_responses` is the share of responses that equal another one to the same prompt,
    `objective/uniform_groups` the share of prompts whose responses all have the same score.
    """
    groups = rollouts["prompt_ids"].unique(return_inverse=True)[1]
    sizes = groups.bincount()
    if not sizes.numel() or int(sizes.max()) < 2:
        return {}
    mask = rollouts["response_mask"]
    tokens = torch.where(mask, rollouts["responses"], -1)
    _, which, counts = torch.cat([groups.unsqueeze(1), tokens], dim=1).unique(
        dim=0, return_inverse=True, return_counts=True
    )
    several = sizes > 1
    uniform = torch.zeros_like(sizes).scatter(0, groups, (~informative_rows(rollouts["scores"], groups)).long())
    return {
        "objective/identical_responses": float((counts[which] > 1)[several[groups]].float().mean()),
        "objective/uniform_groups": float(uniform[several].float().mean()),
    }


def advantage_stats(rollouts: Rollouts, args: PPOConfig) -> dict[str, float]:
    """Returns `ppo/returns/*`, `ppo/advantages/*` and, with a critic, `ppo/val/*` of a step, over the tokens that give
    a gradient.
    """
    mask, returns = trained_mask(rollouts, args), rollouts["returns"]
    stats = {
        "ppo/returns/mean": float(masked_mean(returns, mask)),
        "ppo/returns/var": float(masked_var(returns, mask, unbiased=False)),
        "ppo/advantages/mean": float(masked_mean(rollouts["advantages"], mask)),
        "ppo/advantages/abs_max": float(torch.where(mask, rollouts["advantages"], 0).abs().max()),
    }
    if "values" in rollouts:
        values = rollouts["values"]
        stats |= {
            "ppo/val/mean": float(masked_mean(values, mask)),
            "ppo/val/var": float(masked_var(values, mask, unbiased=False)),
            # Of a distributional critic, by the means of its distributions, which no risk level shifts.
            "ppo/val/explained_variance": explained_variance(rollouts.get("value_means", values), returns, mask),
        }
    if "value_means" in rollouts:
        stats["ppo/val/distribution_mean"] = float(masked_mean(rollouts["value_means"], mask))
    return stats


def response_stats(rollouts: Rollouts) -> dict[str, float]:
    """Returns what steps and evaluations measure of the responses that have a reward: rewards, lengths in tokens, the
    means of what episodes counted, and how many responses have none (`masked_rows`).
    """
    every, rollouts = rollouts, with_reward(rollouts)
    stats = {
        "rewards": float(sequence_scores(rollouts["rewards"]).mean()),
        "scores": float(rollouts["scores"].mean()),
        "scores_std": standard_deviation(rollouts["scores"]),
        "response_length": float(rollouts["response_mask"].sum(dim=1).float().mean()),
        "truncated_fraction": float((~rollouts["stopped"]).float().mean()),
    }
    if "num_turns" in rollouts:
        stats["turns"] = float(rollouts["num_turns"].float().mean())
        for name in ("environment_tokens", "tool_calls"):
            stats[name] = float(rollouts[name].float().mean())
        if calls := int(rollouts["tool_calls"].sum()):
            stats["tool_failure_rate"] = int(rollouts["tool_failures"].sum()) / calls
    if "trained_rows" in every:
        stats["masked_rows"] = float((~every["trained_rows"]).sum())
    return stats


def evaluation_stats(rollouts: Rollouts) -> dict[str, float]:
    """Returns metrics of an evaluation, without `eval/`: `response_stats`, and the KL to the reference: the k1 estimate
    in nats, summed over a response.
    """
    scored = with_reward(rollouts)
    kl = (scored["logprobs"] - scored["ref_logprobs"]).sum(dim=1)
    return {**response_stats(rollouts), "kl_sum_seq": float(kl.mean())}


def throughput_stats(rollouts: Rollouts, phases: Mapping[str, float]) -> dict[str, float]:
    """Returns `time/*` in seconds, `tokens/*` and `memory/*` of a step.

    Args:
        rollouts: the step's rollouts.
        phases: seconds by phase, and `memory/*` in GiB, which are returned unchanged.
    """
    seconds = {name: value for name, value in phases.items() if not name.startswith("memory/")}
    sampled = int(rollouts["response_mask"].sum())
    tokens = sampled + int(rollouts["query_attn_masks"].sum())
    stats = {name: value for name, value in phases.items() if name not in seconds}
    if "environment_seconds" in rollouts:
        stats["time/environment_calls"] = float(rollouts["environment_seconds"].mean())
    stats |= {f"time/{phase}": value for phase, value in seconds.items()}
    stats["time/step"] = sum(seconds.values())
    stats["tokens/sampled"] = float(sampled)
    stats["tokens/per_second"] = tokens / max(stats["time/step"], 1e-9)
    stats["tokens/sampled_per_second"] = sampled / max(seconds.get("rollout", 0.0), 1e-9)
    return stats
