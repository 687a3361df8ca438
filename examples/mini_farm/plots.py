"""Three figures: the curves of PPO runs, the over-optimisation of a long run, and two programs at equal KL."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from examples.mini_farm.evaluation import Summary  # noqa: E402

PROXY, GOLD, KL = "objective/scores", "objective/scores/gold", "objective/kl_sum_seq"
BLUE, GOLDEN, GREY, RED = "#2c6fbb", "#c98a00", "#777777", "#b3322c"
Metrics = Sequence[Mapping[str, Any]]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the steps of a PPO run, from its metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def smooth(numbers: Sequence[float], *, window: int = 5) -> list[float]:
    """Returns the running mean over the last `window` steps, or over fewer at the start."""
    return [sum(part) / len(part) for part in (numbers[max(0, i + 1 - window) : i + 1] for i in range(len(numbers)))]


def gold_at(metrics: Metrics, kl: float) -> float | None:
    """Returns a run's gold score where its KL first reaches `kl` nats; None if it never does.

    Both are means over 5 steps, and interpolated between two steps linearly.
    """
    kls, golds = (smooth([row[key] for row in metrics]) for key in (KL, GOLD))
    for i, reached in enumerate(kls):
        if reached >= kl:
            if i == 0:
                return golds[0]
            share = (kl - kls[i - 1]) / (reached - kls[i - 1])
            return golds[i - 1] + share * (golds[i] - golds[i - 1])
    return None


def gold_within(metrics: Metrics, kl: float) -> float:
    """Returns a run's highest gold score where its KL is at most `kl` nats, or at its first step.

    Unlike `gold_at`, it counts what a run gains after its KL has come back. Both are means over 5 steps.
    """
    kls, golds = (smooth([row[key] for row in metrics]) for key in (KL, GOLD))
    return max([golds[0], *(gold for reached, gold in zip(kls, golds, strict=True) if reached <= kl)])


def plot_run(runs: Mapping[str, Metrics], summaries: Sequence[Summary], path: Path) -> None:
    """Writes the curves of `runs`: rewards, KL, length and explained variance by step, and gold by KL.

    The last panel also has the points of the table.
    """
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    figure.suptitle("PPO in the laptop laboratory (thin: each step, thick: mean of 5 steps)", fontsize=14)
    panels = (
        (PROXY, "Reward model's score (what PPO maximises)", "score", BLUE),
        (GOLD, "Annotators' gold score (never seen by PPO)", "score", GOLDEN),
        (KL, "KL to the supervised model", "nats per answer", RED),
        ("objective/response_length", "Length of the answers", "tokens", BLUE),
        ("ppo/val/explained_variance", "Critic: explained variance of the returns", "share (1 = perfect)", BLUE),
    )
    for axis, (key, title, unit, colour) in zip(axes.flat, panels, strict=False):
        _curves(axis, runs, key, colour)
        axis.set(title=title, xlabel="PPO step", ylabel=unit)
    _gold_against_kl(axes.flat[5], runs, summaries)
    _save(figure, path)


def plot_overoptimisation(metrics: Metrics, path: Path) -> None:
    """Writes proxy and gold of one long run by step and by KL, both relative to the supervised model."""
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5.2), layout="constrained", sharey=True)
    figure.suptitle("A long run under a weak KL penalty: what PPO maximises, and what is wanted", fontsize=14)
    steps, kl = [row["step"] for row in metrics], smooth([row[KL] for row in metrics])
    for key, label, colour in ((PROXY, "proxy: reward model", BLUE), (GOLD, "gold: annotators", GOLDEN)):
        gain = [row[key] - metrics[0][key] for row in metrics]
        axes[0].plot(steps, gain, color=colour, alpha=0.25, linewidth=1)
        axes[0].plot(steps, smooth(gain), color=colour, linewidth=2.5, label=label)
        axes[1].scatter(kl, smooth(gain), color=colour, s=14, label=label)
    gold = smooth([row[GOLD] for row in metrics])
    best = max(range(len(gold)), key=gold.__getitem__)
    axes[0].axvline(steps[best], color=GOLDEN, linestyle=":", label=f"gold is highest: step {steps[best]}")
    axes[1].axvline(kl[best], color=GOLDEN, linestyle=":", label=f"gold is highest: {kl[best]:.0f} nats")
    axes[0].set(title="Over time (thin: each step, thick: mean of 5 steps)", xlabel="PPO step")
    axes[0].set_ylabel("gain over the supervised model (score)")
    axes[1].set(title="Against the distance travelled", xlabel="KL to the supervised model (nats per answer)")
    for axis in axes:
        axis.axhline(0, color=GREY, linewidth=0.8)
        axis.grid(alpha=0.25)
        axis.legend()
    _save(figure, path)


def plot_frontier(programs: Mapping[str, Sequence[Metrics]], summaries: Sequence[Summary], path: Path) -> None:
    """Writes gold against KL along the runs of at most three programs, and gold by step.

    Args:
        programs: the runs of each program, one for each seed.
        summaries: the held-out lines: the supervised model, best-of-n, then a line for each run, whose method begins
            with the program's name.
        path: the file.
    """
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 6), layout="constrained", sharey=True)
    figure.suptitle("Gold score (thin: a seed, mean of 5 steps; thick: mean of the seeds)", fontsize=14)
    # Told apart without colour, too: by the line, the marker and the brightness.
    styles = (("#1b3a6b", "-", "o", "full"), ("#e08a1e", "--", "s", "none"), ("#5a9a72", ":", "^", "none"))
    for (name, runs), (colour, line, marker, fill) in zip(programs.items(), styles, strict=False):
        golds = [smooth([row[GOLD] for row in metrics]) for metrics in runs]
        for metrics, gold in zip(runs, golds, strict=True):
            axes[0].plot(smooth([row[KL] for row in metrics]), gold, line, color=colour, alpha=0.35, linewidth=1)
            axes[1].plot([row["step"] for row in metrics], gold, line, color=colour, alpha=0.35, linewidth=1)
        mean = _mean_frontier(runs)
        axes[0].plot(*mean, line, color=colour, linewidth=3, label=f"{name}, highest up to a KL")
        shared = [fmean(step) for step in zip(*golds, strict=False)]
        axes[1].plot(range(1, len(shared) + 1), shared, line, color=colour, linewidth=3, label=name)
        points = [summary for summary in summaries[2:] if summary.method.startswith(name)]
        axes[0].errorbar(
            [point.kl for point in points],
            [point.gold for point in points],
            yerr=[2 * point.gold_error for point in points],
            fmt=marker,
            fillstyle=fill,
            color=colour,
            markersize=8,
            capsize=3,
            label=f"{name}, held-out ± 2 s.e.",
        )
    for point, marker in zip(summaries[:2], ("D", "*"), strict=True):
        axes[0].plot(point.kl, point.gold, marker, color="black", markersize=8, label=point.method)
    # In Gao et al. (arXiv:2210.10760), gold is a function of the root of the KL.
    axes[0].set_xscale("function", functions=(lambda kl: abs(kl) ** 0.5, lambda root: root**2))
    axes[0].set_xlim(left=0)
    ticks = [tick for tick in (0.25, 1, 2, 4, 6, 9, 12, 16, 25, 36, 49, 64, 100) if tick <= axes[0].get_xlim()[1]]
    axes[0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[0].set(
        title="Against KL",
        xlabel="KL to the supervised model (nats per answer, scale of its root)",
        ylabel="annotators' gold score",
    )
    axes[1].set(title="Over time", xlabel="rollouts")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.legend(loc="lower right")
    _save(figure, path)


def _mean_frontier(runs: Sequence[Metrics]) -> tuple[list[float], list[float]]:
    """Returns KLs that all runs reached, and the mean over the runs of the highest gold score up to each."""
    farthest = min(max(smooth([row[KL] for row in metrics])) for metrics in runs)
    kls = [kl for root in range(201) if (kl := (0.05 * root) ** 2) <= farthest]
    return kls, [fmean(gold_within(metrics, kl) for metrics in runs) for kl in kls]


def _shade(number: int, runs: Mapping[str, Metrics], alone: str) -> str:
    """Returns the colour of a run in all panels; `alone` if it is the only one."""
    return alone if len(runs) == 1 else f"C{number}"


def _curves(axis: Axes, runs: Mapping[str, Metrics], key: str, colour: str) -> None:
    for number, (name, metrics) in enumerate(runs.items()):
        steps, numbers = [row["step"] for row in metrics], [row[key] for row in metrics]
        shade = _shade(number, runs, colour)
        axis.plot(steps, numbers, color=shade, alpha=0.25, linewidth=1)
        axis.plot(steps, smooth(numbers), color=shade, linewidth=2.5, label=name)
    axis.grid(alpha=0.25)
    if len(runs) > 1:
        axis.legend()


def _gold_against_kl(axis: Axes, runs: Mapping[str, Metrics], summaries: Sequence[Summary]) -> None:
    shades = {name: _shade(number, runs, BLUE) for number, name in enumerate(runs)}
    for name, metrics in runs.items():
        path = [smooth([row[key] for row in metrics]) for key in (KL, GOLD)]
        axis.plot(*path, color=shades[name], linewidth=1.5, alpha=0.5)
    for summary in summaries:
        axis.errorbar(
            summary.kl,
            summary.gold,
            yerr=2 * summary.gold_error,
            fmt="D" if summary.method in runs else "o" if summary.kl == 0 else "s",
            color=shades.get(summary.method, "black" if summary.kl == 0 else RED),
            markersize=8,
            capsize=4,
            label=summary.method,
        )
    axis.set(
        title="Gold score against KL (points: held-out ± 2 s.e.)",
        xlabel="KL to the supervised model (nats per answer)",
        ylabel="score",
    )
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right")


def _save(figure: Any, path: Path) -> None:
    """Writes a PNG with 128 colours, which is a third of the size."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
