"""The learning curves of the comparison: a picture for each task."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from examples.defaults.records import Run, runs_of
from examples.defaults.tasks import TASKS


def plot_task(runs: Sequence[Run], task: str, rows: Sequence[str], path: Path) -> None:
    """Writes the mean curve of each of `rows` that has runs of `task`, in a band of all its seeds."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        curves = [run["curve"] for run in runs_of(runs, row, task)]
        if not curves:
            continue
        responses = [point[0] for point in curves[0]]
        each = [np.interp(responses, [point[0] for point in curve], [point[2] for point in curve]) for curve in curves]
        scores = list(zip(*each, strict=True))
        (line,) = axes.plot(responses, [fmean(of_seeds) for of_seeds in scores], marker="o", markersize=3, label=row)
        low, high = [min(of_seeds) for of_seeds in scores], [max(of_seeds) for of_seeds in scores]
        axes.fill_between(responses, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("responses sampled")
    axes.set_ylabel(TASKS[task].unit)
    axes.set_title(TASKS[task].title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
