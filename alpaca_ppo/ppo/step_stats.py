"""The statistics of the optimizer steps on one step's rollouts, combined over micro-batches, optimizer steps and ranks.

The metrics of the rollouts themselves are in `metrics`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.distributed.optimizer import Part


class StatsAccumulator:
    """Combines the statistics of micro-batches exactly. The name of a statistic decides how.

    `loss/*` are divided by the denominator of the whole optimizer-step batch; they are added up, and averaged over
    optimizer steps. For `*_min` and `*_max` the minimum or maximum is kept. All others are means over the micro-batch's
    masked tokens, and are averaged with the number of tokens as weight.
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

    def compute(self, optimizer_steps: int) -> dict[str, float]:
        """Returns the statistics; `loss/*` are averaged over `optimizer_steps`."""
        stats = {name: value / optimizer_steps for name, value in self.parts.items()}
        return stats | {name: total / weight for name, (total, weight) in self.means.items()} | self.extremes

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
    """Scalars by name."""
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
        return {**together.compute(1), **losses, **{name: float(count) for name, count in counts.items()}}
