"""The figure of a run: what it has learned, how far it went, and what its critic knows."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#777777"


def plot_run(metrics: Sequence[Mapping[str, Any]], best_of: float, path: Path) -> None:
    """Writes three panels by step: the reward in training and held out, with the mark `best_of`; KL; the critic."""
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    curves = (
        (0, "objective/scores", "training prompts", BLUE, "-"),
        (0, "eval/scores", "held-out topics", ORANGE, "o-"),
        (1, "objective/kl_sum_seq", "training prompts", BLUE, "-"),
        (1, "eval/kl_sum_seq", "held-out topics", ORANGE, "o-"),
        (2, "ppo/val/explained_variance", "training prompts", BLUE, "-"),
    )
    for panel, key, label, colour, style in curves:
        points = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
        if points:
            axes[panel].plot(*zip(*points, strict=True), style, color=colour, label=label)
    axes[0].axhline(best_of, color=GREY, linestyle="--", label="best of 8 before training")
    titles = ("Reward: share of the words", "Distance from the start", "Critic: explained variance of the returns")
    units = ("reward of an answer", "KL, nats per answer", "share (1 = perfect)")
    for axis, title, unit in zip(axes, titles, units, strict=True):
        axis.set(title=title, xlabel="PPO step", ylabel=unit)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend()
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    pyplot.close(figure)
    # 128 colours make the file a third as large.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
