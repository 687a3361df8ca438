"""The metrics of a step, as flat dictionaries of floats; `objective/*` and `ppo/*` use AlpacaFarm's names.

Every rank has the rollouts of all ranks, so their metrics need no collective operation. `StepStats` combines the
statistics of micro-batches, optimizer steps and ranks. Means are over masked tokens or over sequences, never over
padding. `tracking.run_log` writes the metrics.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.distributed.optimizer import Part
from alpaca_ppo.functional import informative_rows, kl_penalty, masked_mean, masked_var
from alpaca_ppo.functional.kl import LOG_RATIO_LIMIT
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.ppo.row_masks import gradient_mask, with_reward
from alpaca_ppo.types import Rollouts

_DIGITS = {"mismatch/logprob_abs_mean": 4, "mismatch/k3": 5, "mismatch/ratio_max": 2}
# Every how many steps the metrics include entropies, which cost time.
ENTROPY_STEPS = 10


class StepRecord:
    """Timings and logged values of a step or an evaluation.

    Args:
        during: from a phase's name and number of parts to a context manager around it.

    Attributes:
        seconds: wall-clock time by phase.
        logged: sum and number of the values of each metric that reward functions have logged, on all ranks.
        redraw_stats: the metrics of `dynamic_sampling`.
    """

    def __init__(self, during: Callable[[str, int | None], AbstractContextManager[Any]]) -> None:
        self._during = during
        self.seconds: dict[str, float] = {}
        self.logged: dict[str, list[float]] = {}
        self.redraw_stats: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str, parts: int | None = None) -> Iterator[Callable[[int], None]]:
        """Adds the seconds of the block to `phase`; yields a function that counts its `parts`."""
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        synchronize()
        start = time.perf_counter()
        with self._during(phase, parts) as count:
            yield count
        synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def logged_means(self) -> dict[str, float]:
        """The means of `logged`, as `reward/*`."""
        return {f"reward/{name}": total / number for name, (total, number) in self.logged.items()}


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak of allocated tensors on a GPU, otherwise of the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def standard_deviation(values: Tensor) -> float:
    """Returns the standard deviation of `values` (B,) without Bessel's correction: exactly 0 for equal values, NaN for
    none.
    """
    if not len(values):
        return math.nan
    return float(masked_var(values, torch.ones_like(values, dtype=torch.bool), unbiased=False).sqrt())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Returns 1 - Var(returns - values) / Var(returns) over the tokens where `mask` is True, all (B, R); 0 if all
    returns are equal. 1 = perfect but for a constant, 0 = no better than a constant.
    """
    variance = masked_var(returns, mask, unbiased=False)
    if float(variance) == 0.0:
        return 0.0
    return 1.0 - float(masked_var(returns - values, mask, unbiased=False) / variance)


def logs_entropies(step: int) -> bool:
    """Whether the metrics of `step` (from 0) include entropies: those of the first step and, counted from 1, of every
    `ENTROPY_STEPS`-th.
    """
    return step == 0 or (step + 1) % ENTROPY_STEPS == 0


@torch.no_grad()
def mismatch_stats(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns `mismatch/*`: how the trainer's log-probs (B, R) differ from the sampler's, for the same policy.

    The mean absolute difference and k3 are in nats per token. With an empty `mask` (B, R), True = a token that the
    policy chose, the largest ratio is 0.
    """
    difference = logprobs - rollout_logprobs
    return {
        "mismatch/logprob_abs_mean": masked_mean(difference.abs(), mask),
        "mismatch/k3": masked_mean(kl_penalty(logprobs, rollout_logprobs, "k3"), mask),
        "mismatch/ratio_max": torch.where(mask, difference, -torch.inf).max().clamp_max(LOG_RATIO_LIMIT).exp(),
    }


def mismatch_of(rollouts: Rollouts) -> dict[str, float]:
    """Returns `mismatch/*` of rollouts whose log-probs the trainer has recomputed.

    With environments, the rows of a forward pass of the sampler, and so the last digits of its log-probs, depend on
    timing. The metrics are then rounded, to a tenth of the rounding bound, so that equal runs have equal metrics.
    """
    stats = mismatch_stats(rollouts["logprobs"], rollouts["rollout_logprobs"], rollouts["response_mask"])
    if "environment_tokens" in rollouts and bool(rollouts["environment_tokens"].any()):
        return {name: round(float(stats[name]), digits) for name, digits in _DIGITS.items()}
    return {name: float(value) for name, value in stats.items()}


def objective_stats(rollouts: Rollouts, *, source_names: Sequence[str]) -> dict[str, float]:
    """Returns `objective/*`, `teacher/*` and `mismatch/*` of a step; KL and entropies in nats, lengths in tokens.

    Entropies and `teacher/*` are included if `rollouts` has their tensors, the mismatch if the trainer has `recomputed`
    the log-probs.

    `source_names` are those of the columns of `scores_by_source`, whose means are over the rows that a source scored.
    """
    scored = with_reward(rollouts)
    mask, by_source = scored["response_mask"], scored["scores_by_source"]
    means = by_source.nanmean(dim=0).tolist()
    stds = [standard_deviation(column[~column.isnan()]) for column in by_source.unbind(dim=1)]
    stats = {
        **{f"objective/scores/{name}": mean for name, mean in zip(source_names, means, strict=True)},
        **{f"objective/scores_std/{name}": std for name, std in zip(source_names, stds, strict=True)},
        "objective/kl_sum_seq": float(scored["kl"].sum(dim=1).mean()),
        "objective/kl_avg_seq": float(masked_mean(scored["kl"], mask)),
        "objective/shaped_rewards": float(scored["shaped_rewards"].sum(dim=1).mean()),
        "objective/non_score_rewards": float(scored["non_score_rewards"].sum(dim=1).mean()),
        **{f"objective/{name}": value for name, value in response_stats(scored).items()},
    }
    for name in ("entropies", "ref_entropies"):
        if name in scored:
            stats[f"objective/{name}"] = float(masked_mean(scored[name], mask))
    stats |= {f"teacher/{name}": value for name, value in teacher_stats(scored).items()}
    if "overlong_penalties" in scored:
        stats["objective/overlong_penalty"] = float(scored["overlong_penalties"].mean())
    if "baseline_scores" in scored:
        stats["objective/baseline_scores"] = float(scored["baseline_scores"].mean())
    if "trained_rows" in rollouts:
        stats["objective/masked_rows"] = float((~rollouts["trained_rows"]).sum())
    if "recomputed" in scored:
        stats |= mismatch_of(scored)
    return stats | group_stats(scored)


def group_stats(rollouts: Rollouts) -> dict[str, float]:
    """Returns how much the responses to a prompt differ; empty if no prompt has several.

    `objective/identical_responses` is the share of responses that equal another one to the same prompt,
    `objective/uniform_groups` the share of prompts whose responses all have the same score.
    """
    _, groups = rollouts["prompt_ids"].unique(return_inverse=True)
    several = groups.bincount() > 1
    if not bool(several.any()):
        return {}
    tokens = torch.where(rollouts["response_mask"], rollouts["responses"], -1)
    responses = torch.cat([groups.unsqueeze(1), tokens], dim=1)
    _, distinct, counts = responses.unique(dim=0, return_inverse=True, return_counts=True)
    repeated = counts[distinct] > 1
    uniform_rows = ~informative_rows(rollouts["scores"], groups)
    uniform = torch.zeros_like(several).scatter(0, groups, uniform_rows)
    return {
        "objective/identical_responses": float(repeated[several[groups]].float().mean()),
        "objective/uniform_groups": float(uniform[several].float().mean()),
    }


def advantage_stats(rollouts: Rollouts, args: PPOConfig) -> dict[str, float]:
    """Returns `ppo/returns/*`, `ppo/advantages/*` and, with a critic, `ppo/val/*`, over tokens that give a gradient."""
    mask, returns = gradient_mask(rollouts, args), rollouts["returns"]
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
            # A distributional critic's values may depend on a risk level, the means of its distributions do not.
            "ppo/val/explained_variance": explained_variance(rollouts.get("value_means", values), returns, mask),
        }
    if "value_means" in rollouts:
        stats["ppo/val/distribution_mean"] = float(masked_mean(rollouts["value_means"], mask))
    return stats


def response_stats(scored: Rollouts) -> dict[str, float]:
    """Returns the metrics that steps and evaluations share, of responses that have a reward; lengths are in tokens."""
    num_tokens = scored["response_mask"].sum(dim=1)
    stats = {
        "rewards": float(sequence_scores(scored["rewards"]).mean()),
        "scores": float(scored["scores"].mean()),
        "scores_std": standard_deviation(scored["scores"]),
        "response_length": float(num_tokens.float().mean()),
        "truncated_fraction": float((~scored["stopped"]).float().mean()),
        "empty_fraction": float((scored["stopped"] & (num_tokens == 1)).float().mean()),
    }
    if "num_turns" in scored:
        stats["turns"] = float(scored["num_turns"].float().mean())
        for name in ("environment_tokens", "tool_calls"):
            stats[name] = float(scored[name].float().mean())
        if calls := int(scored["tool_calls"].sum()):
            stats["tool_failure_rate"] = int(scored["tool_failures"].sum()) / calls
    return stats


def teacher_stats(rollouts: Rollouts) -> dict[str, float]:
    """Returns, if there is a teacher, `teacher/*` without the prefix: the KL of the policy to it (k1), in nats per
    token and per response, and the share of tokens that are the teacher's likeliest.
    """
    if "teacher_logprobs" not in rollouts:
        return {}
    mask, kl = rollouts["response_mask"], rollouts["logprobs"] - rollouts["teacher_logprobs"]
    return {
        "kl": float(masked_mean(kl, mask)),
        "kl_sum_seq": float(kl.sum(dim=1).mean()),
        "top_token": float(masked_mean(rollouts["teacher_top_tokens"], mask)),
    }


def evaluation_stats(rollouts: Rollouts) -> dict[str, float]:
    """Returns metrics of an evaluation, without `eval/`: `response_stats`, the number of responses without a reward
    (`masked_rows`), the KL to the reference (k1) in nats, summed over a response, and `teacher_*` (`teacher_stats`).
    """
    scored = with_reward(rollouts)
    kl = (scored["logprobs"] - scored["ref_logprobs"]).sum(dim=1)
    stats = {**response_stats(scored), "kl_sum_seq": float(kl.mean())}
    stats |= {f"teacher_{name}": value for name, value in teacher_stats(scored).items()}
    if "trained_rows" in rollouts:
        stats["masked_rows"] = float((~rollouts["trained_rows"]).sum())
    return stats


def throughput_stats(rollouts: Rollouts, measured: Mapping[str, float]) -> dict[str, float]:
    """Returns `time/*` in seconds, `tokens/*` and `memory/*` of a step. `measured` holds the seconds of each phase and
    `memory/*` in GiB.
    """
    stats = {name: value for name, value in measured.items() if name.startswith("memory/")}
    seconds = {phase: value for phase, value in measured.items() if phase not in stats}
    sampled = int(rollouts["response_mask"].sum())
    tokens = sampled + int(rollouts["query_attn_masks"].sum())
    if "environment_seconds" in rollouts:
        stats["time/environment_calls"] = float(rollouts["environment_seconds"].mean())
    stats |= {f"time/{phase}": value for phase, value in seconds.items()}
    stats["time/step"] = sum(seconds.values())
    stats["tokens/sampled"] = float(sampled)
    stats["tokens/per_second"] = tokens / max(stats["time/step"], 1e-9)
    stats["tokens/sampled_per_second"] = sampled / max(seconds.get("rollout", 0.0), 1e-9)
    return stats


class StatsAccumulator:
    """Combines the statistics of micro-batches exactly, by name: `loss/*`, which are divided by the denominator of the
    whole optimizer step, are added up; of `*_min` and `*_max` the extreme is kept; all others are means over masked
    tokens, and averaged by their number.

    Attributes:
        sums: of `loss/*`.
        means: weighted sum and sum of weights of each mean.
        extremes: minima and maxima.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.means: dict[str, tuple[float, float]] = {}
        self.extremes: dict[str, float] = {}

    def add(self, stats: Mapping[str, Tensor | float], tokens: int) -> None:
        """Adds the statistics, at least one, of a micro-batch with `tokens` response tokens; of one without tokens only
        `loss/*`.

        Raises:
            ValueError: for a statistic that is not a scalar.
        """
        scalars = {name: torch.as_tensor(value, dtype=torch.float64).detach() for name, value in stats.items()}
        for name, scalar in scalars.items():
            if scalar.dim():
                raise ValueError(f"the statistic {name!r} of a loss has shape {tuple(scalar.shape)}; return a scalar")
        # One transfer, since every .item() waits for the device.
        devices = [scalar.device for scalar in scalars.values() if scalar.device.type != "cpu"]
        values = torch.stack([scalar.to(devices[0] if devices else "cpu") for scalar in scalars.values()]).tolist()
        for name, value in zip(scalars, values, strict=True):
            if name.startswith("loss/"):
                self.sums[name] = self.sums.get(name, 0.0) + value
            elif tokens and name.endswith(("_min", "_max")):
                self._extreme(name, value)
            elif tokens:
                self._mean(name, value * tokens, tokens)

    def add_padding(self, lengths: Sequence[int], *, padded: bool) -> None:
        """Adds a micro-batch with rows of `lengths` tokens, `padded` to the longest or not, to `padding_fraction`."""
        positions = len(lengths) * max(lengths, default=0) if padded else sum(lengths)
        if positions:
            self._mean("padding_fraction", (1.0 - sum(lengths) / positions) * positions, positions)

    def merge(self, other: "StatsAccumulator") -> None:
        """Adds the statistics of other micro-batches."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, (total, weight) in other.means.items():
            self._mean(name, total, weight)
        for name, value in other.extremes.items():
            self._extreme(name, value)

    def compute(self) -> dict[str, float]:
        return self.sums | {name: total / weight for name, (total, weight) in self.means.items()} | self.extremes

    def _mean(self, name: str, total: float, weight: float) -> None:
        total_before, weight_before = self.means.get(name, (0.0, 0.0))
        self.means[name] = (total_before + total, weight_before + weight)

    def _extreme(self, name: str, value: float) -> None:
        # Python's `min` and `max` drop a NaN that is not the first.
        choose = np.minimum if name.endswith("_min") else np.maximum
        self.extremes[name] = float(choose(self.extremes.get(name, value), value))


class BatchStats(NamedTuple):
    """Statistics of a micro-batch.

    Attributes:
        stats: of its losses.
        tokens: under the mask.
        lengths: tokens of each row.
        padded: whether rows were padded to the longest.
        fault: what was not finite, and where.
    """

    stats: Mapping[str, Tensor | float]
    tokens: int
    lengths: Sequence[int]
    padded: bool
    fault: str | None = None


class StepStats:
    """This rank's statistics of a step's update.

    Attributes:
        update: the statistics of the optimizer step in progress.
        faults: what was not finite in it.
        skipped: optimizer steps that were not taken because something was not finite.
        empty_updates: planned optimizer steps that were left out because no row of theirs gives a gradient.
        kl_stopped: whether the approximate KL ended the update; the statistics then include a batch that took no step.
    """

    def __init__(self) -> None:
        self.update = StatsAccumulator()
        self.faults: list[str] = []
        self.skipped = 0
        self.empty_updates = 0
        self.kl_stopped = False
        self._by_part: dict[Part, StatsAccumulator] = {}
        self._steps: dict[Part, int] = {}

    @property
    def policy_unchanged(self) -> bool:
        """Whether no optimizer step of the policy has been taken yet."""
        return not any(steps for part, steps in self._steps.items() if part != "critic")

    def add(self, batch: BatchStats) -> None:
        """Adds a micro-batch of the optimizer step in progress.

        While the policy is unchanged since the rollout, this adds how far its ratio is from 1; afterwards it leaves out
        the comparison with the sampler (`mismatch/*`).
        """
        stats: dict[str, Tensor | float] = dict(batch.stats)
        if not self.policy_unchanged:
            stats = {name: value for name, value in stats.items() if not name.startswith("mismatch/")}
        elif {"policy/ratio_max", "policy/ratio_min"} <= stats.keys():
            most, least = (torch.as_tensor(stats[f"policy/ratio_{end}"], dtype=torch.float64) for end in ("max", "min"))
            stats["policy/first_ratio_error_max"] = torch.maximum(most - 1, 1 - least)
        self.update.add(stats, batch.tokens)
        self.update.add_padding(batch.lengths, padded=batch.padded)
        if batch.fault:
            self.faults.append(batch.fault)

    def end_update(self, part: Part, *, skipped: bool = False, stopped: bool = False) -> None:
        """Ends an optimizer step of `part`. Keeps its statistics unless it was `skipped`; counts it unless the KL
        `stopped` it.
        """
        if skipped:
            self.skipped += 1
        else:
            self._by_part.setdefault(part, StatsAccumulator()).merge(self.update)
            self._steps[part] = self._steps.get(part, 0) + int(not stopped)
            self.kl_stopped = stopped
        self.update, self.faults = StatsAccumulator(), []

    def reduce(self, accelerator: Accelerator, *, with_critic: bool) -> dict[str, float]:
        """The statistics of all ranks, and the numbers of optimizer steps. Every rank must call it.

        `loss/*` are averaged over the optimizer steps of each part, and these means added up.
        """
        by_part: dict[Part, StatsAccumulator] = {}
        for by_part_of_rank in gather_list(self._by_part, accelerator):
            for part, stats in by_part_of_rank.items():
                by_part.setdefault(part, StatsAccumulator()).merge(stats)
        together = StatsAccumulator()
        losses: dict[str, float] = {}
        for part, stats in sorted(by_part.items()):
            batches = self._steps[part]
            if self.kl_stopped and part != "critic":
                # The batch whose KL ended the update took no step.
                batches += 1
            for name, value in stats.sums.items():
                losses[name] = losses.get(name, 0.0) + value / batches
            together.merge(stats)
        total = sum(self._steps.values())
        counts = {
            "policy/optimizer_steps": total - self._steps.get("critic", 0),
            "policy/skipped_updates": self.skipped,
            "policy/empty_updates": self.empty_updates,
            "policy/kl_stopped": self.kl_stopped,
        }
        if with_critic:
            counts["val/optimizer_steps"] = total - self._steps.get("policy", 0)
        return {**together.compute(), **losses, **{name: float(count) for name, count in counts.items()}}
