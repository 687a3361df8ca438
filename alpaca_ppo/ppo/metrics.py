"""The metrics of a step, as flat dictionaries of floats; `objective/*` and `ppo/*` use AlpacaFarm's names.

Every rank has the rollouts of all ranks, so their metrics need no collective operation. What the optimizer steps
measure is combined over micro-batches, optimizer steps and ranks by `StepStats`. Means are over masked tokens or over
sequences, never over padding. Writing the metrics is in `tracking.run_log`.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.distributed.optimizer import Part
from alpaca_ppo.functional import kl_penalty, masked_mean, masked_var
from alpaca_ppo.functional.groups import informative_rows
from alpaca_ppo.functional.kl import LOG_RATIO_LIMIT
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.ppo.row_masks import gradient_mask, with_reward
from alpaca_ppo.types import Rollouts

_DIGITS = {"mismatch/logprob_abs_mean": 4, "mismatch/k3": 5, "mismatch/ratio_max": 2}
ENTROPY_STEPS = 10
"""Steps between two whose metrics include entropies, which cost time."""


class Timers:
    """Wall-clock seconds by phase.

    Args:
        during: returns a context manager in which a phase, given by name and number of parts, takes place.
    """

    def __init__(self, during: Callable[[str, int | None], AbstractContextManager[Any]]) -> None:
        self.seconds: dict[str, float] = {}
        self._during = during

    @contextmanager
    def measure(self, phase: str, parts: int | None = None) -> Iterator[Callable[[int], None]]:
        """Adds the seconds spent inside the block to `phase`; yields a function that counts its `parts`."""
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        synchronize()
        start = time.perf_counter()
        with self._during(phase, parts) as count:
            yield count
        synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class StepRecord:
    """What is measured while a step or an evaluation is made, apart from its rollouts and losses.

    Args:
        during: as for `Timers`.
    """

    def __init__(self, during: Callable[[str, int | None], AbstractContextManager[Any]]) -> None:
        self.timers = Timers(during)
        self.logged: dict[str, list[float]] = {}
        """Sum and number of the values of each metric that reward functions have logged, on all ranks."""
        self.drawn: dict[str, float] = {}
        """The metrics of what `dynamic_sampling` has drawn."""

    def logged_means(self) -> dict[str, float]:
        """The means of what reward functions have logged, as `reward/*`."""
        return {f"reward/{name}": total / number for name, (total, number) in self.logged.items()}


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


def logs_entropies(step: int) -> bool:
    """Whether the metrics of `step` (from 0) include entropies: the first step's, and every `ENTROPY_STEPS`-th.

    As with `logging_steps`, steps are counted from 1.
    """
    return step == 0 or (step + 1) % ENTROPY_STEPS == 0


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


def mismatch_of(rollouts: Rollouts) -> dict[str, float]:
    """Returns `mismatch/*` of rollouts that the trainer has evaluated.

    Where environments answer, which rows the sampler computes together depends on when they do, and so do the last
    digits of its log-probs: to a tenth of what rounding explains, equal runs have equal numbers, and decide alike.
    """
    stats = mismatch_stats(rollouts["logprobs"], rollouts["rollout_logprobs"], rollouts["response_mask"])
    found = {name: float(value) for name, value in stats.items()}
    if "environment_tokens" not in rollouts or not bool(rollouts["environment_tokens"].any()):
        return found
    return {name: round(found[name], digits) for name, digits in _DIGITS.items()}


def objective_stats(rollouts: Rollouts, *, source_names: Sequence[str]) -> dict[str, float]:
    """Returns `objective/*` and `mismatch/*` of a step: rewards, KL and entropies in nats, lengths in tokens.

    Entropies are there if `rollouts` has them, the mismatch if the trainer has evaluated the policy (`recomputed`).

    Args:
        rollouts: the step's rollouts, with shaped rewards.
        source_names: names of the columns of `scores_by_source`. The mean of a source is over the rows that it scored.
    """
    scored = with_reward(rollouts)
    by_source = scored["scores_by_source"]
    means = by_source.nanmean(dim=0).tolist()
    spreads = [standard_deviation(column[~column.isnan()]) for column in by_source.unbind(dim=1)]
    stats = {
        **{f"objective/scores/{name}": mean for name, mean in zip(source_names, means, strict=True)},
        **{f"objective/scores_std/{name}": spread for name, spread in zip(source_names, spreads, strict=True)},
        "objective/kl_sum_seq": float(scored["kl"].sum(dim=1).mean()),
        "objective/kl_avg_seq": float(masked_mean(scored["kl"], scored["response_mask"])),
        "objective/shaped_rewards": float(scored["shaped_rewards"].sum(dim=1).mean()),
        "objective/non_score_rewards": float(scored["non_score_rewards"].sum(dim=1).mean()),
        **{f"objective/{name}": value for name, value in response_stats(scored).items()},
    }
    for name in ("entropies", "ref_entropies"):
        if name in scored:
            stats[f"objective/{name}"] = float(masked_mean(scored[name], scored["response_mask"]))
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
            # Of a distributional critic, by the means of its distributions, which no risk level shifts.
            "ppo/val/explained_variance": explained_variance(rollouts.get("value_means", values), returns, mask),
        }
    if "value_means" in rollouts:
        stats["ppo/val/distribution_mean"] = float(masked_mean(rollouts["value_means"], mask))
    return stats


def response_stats(scored: Rollouts) -> dict[str, float]:
    """Returns what steps and evaluations measure of responses that have a reward: rewards, lengths in tokens, and the
    means of what episodes counted.
    """
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


def evaluation_stats(rollouts: Rollouts) -> dict[str, float]:
    """Returns metrics of an evaluation, without `eval/`: `response_stats`, how many responses have no reward
    (`masked_rows`), and the KL to the reference: the k1 estimate in nats, summed over a response.
    """
    scored = with_reward(rollouts)
    kl = (scored["logprobs"] - scored["ref_logprobs"]).sum(dim=1)
    stats = {**response_stats(scored), "kl_sum_seq": float(kl.mean())}
    if "trained_rows" in rollouts:
        stats["masked_rows"] = float((~rollouts["trained_rows"]).sum())
    return stats


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


class StatsAccumulator:
    """Combines the statistics of micro-batches exactly. The name of a statistic decides how.

    `loss/*` are divided by the denominator of the whole optimizer-step batch; they are added up. For `*_min`
    and `*_max` the minimum or maximum is kept. All others are means over the micro-batch's masked tokens, and are
    averaged with the number of tokens as weight.
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.means: dict[str, tuple[float, float]] = {}
        self.extremes: dict[str, float] = {}

    def add(self, stats: Mapping[str, Tensor | float], tokens: int) -> None:
        """Adds the statistics of one micro-batch.

        Args:
            stats: scalars by name.
            tokens: the number of masked tokens of the micro-batch. With 0, only `loss/*` are added.

        Raises:
            ValueError: for a statistic that is not a scalar.
        """
        numbers = [torch.as_tensor(value).detach().double() for value in stats.values()]
        for name, number in zip(stats, numbers, strict=True):
            if number.dim():
                raise ValueError(f"the statistic {name!r} of a loss has shape {tuple(number.shape)}; return a scalar")
        # A single transfer for all of them, because every .item() synchronizes with the device.
        device = next((number.device for number in numbers if number.device.type != "cpu"), torch.device("cpu"))
        values = torch.stack([number.to(device) for number in numbers]).tolist() if numbers else []
        for name, value in zip(stats, values, strict=True):
            if name.startswith("loss/"):
                self.parts[name] = self.parts.get(name, 0.0) + value
            elif tokens and name.endswith(("_min", "_max")):
                self._extreme(name, value)
            elif tokens:
                self._mean(name, value * tokens, tokens)

    def add_padding(self, lengths: Sequence[int], *, padded: bool) -> None:
        """Adds a micro-batch with rows of `lengths` tokens to `padding_fraction`: `padded` to the longest, or not."""
        positions = len(lengths) * max(lengths, default=0) if padded else sum(lengths)
        if positions:
            self._mean("padding_fraction", (1.0 - sum(lengths) / positions) * positions, positions)

    def merge(self, other: "StatsAccumulator") -> None:
        """Adds the statistics of other micro-batches."""
        for name, value in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        for name, (total, weight) in other.means.items():
            self._mean(name, total, weight)
        for name, value in other.extremes.items():
            self._extreme(name, value)

    def compute(self) -> dict[str, float]:
        """Returns the statistics, of `loss/*` the sums."""
        return self.parts | {name: total / weight for name, (total, weight) in self.means.items()} | self.extremes

    def _mean(self, name: str, total: float, weight: float) -> None:
        before = self.means.get(name, (0.0, 0.0))
        self.means[name] = (before[0] + total, before[1] + weight)

    def _extreme(self, name: str, value: float) -> None:
        choose = min if name.endswith("_min") else max
        self.extremes[name] = choose(self.extremes.get(name, value), value)


@dataclass(frozen=True)
class BatchStats:
    """What the losses of a micro-batch have measured."""

    stats: Mapping[str, Tensor]
    tokens: int
    """Tokens under the mask."""
    lengths: Sequence[int]
    """Tokens of each row."""
    padded: bool
    """Whether rows were padded to the longest of them."""
    fault: str | None = None
    """What was not finite, and where."""


class StepStats:
    """This rank's statistics of a step's update. `update` and `faults` are those of the optimizer step in progress."""

    def __init__(self) -> None:
        self.update = StatsAccumulator()
        self.faults: list[str] = []
        self.skipped = 0
        """Optimizer steps that were not taken because something was not finite."""
        self.kl_stopped = False
        """Whether the approximate KL ended the update: no optimizer step was taken on the last batch counted."""
        self._of_parts: dict[Part, StatsAccumulator] = {}
        self._steps: dict[Part, int] = {}

    @property
    def policy_unchanged(self) -> bool:
        """Whether no optimizer step of the policy has been taken yet."""
        return not any(steps for part, steps in self._steps.items() if part != "critic")

    def add(self, batch: BatchStats) -> None:
        """Adds a micro-batch of the optimizer step in progress.

        If the policy is unchanged since the rollout, this adds how far its probability ratio is from 1; otherwise the
        comparison with the sampler (`mismatch/*`) is left out.
        """
        stats: dict[str, Tensor | float] = dict(batch.stats)
        if not self.policy_unchanged:
            stats = {name: value for name, value in stats.items() if not name.startswith("mismatch/")}
        elif "policy/ratio_max" in stats:
            error = max(float(stats["policy/ratio_max"]) - 1, 1 - float(stats["policy/ratio_min"]))
            stats["policy/first_ratio_error_max"] = error
        self.update.add(stats, batch.tokens)
        self.update.add_padding(batch.lengths, padded=batch.padded)
        self.faults += [batch.fault] if batch.fault else []

    def end_update(self, part: Part, *, taken: bool, skipped: bool) -> None:
        """Ends an optimizer step that trained `part`: counts it, or leaves a `skipped` one out."""
        if skipped:
            self.skipped += 1
        else:
            self._of_parts.setdefault(part, StatsAccumulator()).merge(self.update)
            self._steps[part] = self._steps.get(part, 0) + taken
            self.kl_stopped = not taken
        self.update, self.faults = StatsAccumulator(), []

    def reduce(self, accelerator: Accelerator, *, with_critic: bool) -> dict[str, float]:
        """The statistics of all ranks, and the optimizer steps. Every rank must call it.

        `loss/*` are averaged over the optimizer steps of what they trained, and then added up.
        """
        whole: dict[Part, StatsAccumulator] = {}
        for of_rank in gather_list(self._of_parts, accelerator):
            for part, stats in of_rank.items():
                whole.setdefault(part, StatsAccumulator()).merge(stats)
        together, losses = StatsAccumulator(), dict[str, float]()
        for part, stats in sorted(whole.items()):
            # The last batch of the policy is counted without a step if its KL ended the update.
            steps = self._steps[part] + (self.kl_stopped and part != "critic")
            for name, value in stats.parts.items():
                losses[name] = losses.get(name, 0.0) + value / steps
            together.merge(stats)
        total = sum(self._steps.values())
        counts = {
            "policy/optimizer_steps": total - self._steps.get("critic", 0),
            "policy/skipped_updates": self.skipped,
            "policy/kl_stopped": self.kl_stopped,
        }
        if with_critic:
            counts["val/optimizer_steps"] = total - self._steps.get("policy", 0)
        return {**together.compute(), **losses, **{name: float(count) for name, count in counts.items()}}
