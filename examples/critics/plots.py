"""The figure of the demonstration: learned distribution functions on the true ones, means and tail means below."""

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import torch
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from examples.critics.laws import LAWS, TAIL, Law, Readings  # noqa: E402

COLOURS = {"scalar": "#777777", "c51": "#2c6fbb", "quantile": "#c98a00", "iqn": "#b3322c"}
_MARKERS = {"c51": "", "quantile": "o", "iqn": "x"}
_RANGES = {"steady": (0.8, 5.2), "gamble": (-3.0, 6.5), "costly": (-7.5, 0.0)}


def plot_laws(readings: Readings, path: Path) -> None:
    """Writes a PNG with a column for each law: distribution functions of the first seed above; below, the means and
    tail means of all seeds against the true ones.
    """
    figure, axes = pyplot.subplots(
        2, len(LAWS), figsize=(15, 7.5), layout="constrained", sharex="col", height_ratios=(3, 1.3)
    )
    title = "What critics learned of the return: laws of equal mean (left, middle) are one to the scalar critic only"
    figure.suptitle(title, fontsize=14)
    for column, (name, law) in enumerate(LAWS.items()):
        _distributions(axes[0, column], name, law, readings)
        _marks(axes[1, column], name, law, readings)
        axes[0, column].set(title=f'"{name}": {law.about}', xlim=_RANGES[name])
        axes[1, column].set(xlabel="return")
    axes[0, 0].set_ylabel("probability of a return below")
    axes[0, 0].legend(loc="upper left")
    drawn = BytesIO()
    figure.savefig(drawn, dpi=90)
    pyplot.close(figure)
    # 128 colours: a third of the size.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)


def _distributions(axis: Axes, name: str, law: Law, readings: Readings) -> None:
    returns = torch.linspace(*_RANGES[name], 400, dtype=torch.float64)
    axis.plot(returns, law.cdf(returns), color="black", linewidth=5, alpha=0.25, label="true law")
    for kind, marker in _MARKERS.items():
        reading = readings[kind, name][0]
        if reading.returns is None or reading.levels is None:
            continue
        style: dict[str, Any] = {"color": COLOURS[kind], "label": kind, "markersize": 5.5, "linewidth": 1.6}
        if marker:
            axis.plot(reading.returns, reading.levels, marker, fillstyle="none", markevery=2, **style)
        else:
            axis.step(reading.returns, reading.levels, where="post", **style)
    axis.grid(alpha=0.25)


def _marks(axis: Axes, name: str, law: Law, readings: Readings) -> None:
    """A line for each true number, a row for each kind of critic, a point for each seed."""
    for true, text in ((law.tail_mean(1.0), "mean"), (law.tail_mean(TAIL), f"{TAIL:.0%} CVaR")):
        axis.axvline(true, color="black", linewidth=5, alpha=0.25)
        axis.annotate(text, (true, -0.75), ha="center", va="center", fontsize=9)
    for height, (kind, colour) in enumerate(COLOURS.items()):
        mine = readings[kind, name]
        tails = [reading.tail_mean for reading in mine if reading.tail_mean is not None]
        axis.plot([reading.mean for reading in mine], [height] * len(mine), "D", color=colour, alpha=0.6)
        axis.plot(tails, [height] * len(tails), "s", color=colour, alpha=0.6)
    axis.set(ylim=(len(COLOURS) - 0.5, -1.2), yticks=range(len(COLOURS)), yticklabels=list(COLOURS))
    axis.grid(alpha=0.25)
