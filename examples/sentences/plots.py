"""The figure of a run: panels by PPO step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#777777"


TRAINING, HELD_OUT = ("training prompts", BLUE, "-"), ("held-out prompts", ORANGE, "o-")


@dataclass(frozen=True)
class Panel:
    """Curves by PPO step."""

    title: str
    unit: str
    training: str
    """A metric of the steps."""
    held_out: str | None = None
    """A metric of the evaluations."""
    mark: float | None = None
    """The best of several answers before training."""


def plot_panels(metrics: Sequence[Mapping[str, Any]], panels: Sequence[Panel], path: Path) -> None:
    """Writes the panels side by side."""
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.6), layout="constrained")
    for axis, panel in zip(axes, panels, strict=True):
        for key, (label, colour, style) in ((panel.training, TRAINING), (panel.held_out, HELD_OUT)):
            points = [(row["step"], row[key]) for row in metrics if key is not None and row.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, label=label)
        if panel.mark is not None:
            axis.axhline(panel.mark, color=GREY, linestyle="--", label="best of 8 before training")
        axis.set(title=panel.title, xlabel="PPO step", ylabel=panel.unit)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend()
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    pyplot.close(figure)
    # 128 colours make the file a third as large.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
