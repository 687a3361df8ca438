"""The figure of the demonstration: true and learned distribution functions, with means and tail means below."""

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import torch
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from examples.critics.distributions import DISTRIBUTIONS, TAIL, Predictions, ReturnDistribution  # noqa: E402

COLOURS = {"scalar": "#777777", "c51": "#2c6fbb", "hl_gauss": "#2e8b57", "quantile": "#c98a00", "iqn": "#b3322c"}
_MARKERS = {"c51": "", "hl_gauss": ".", "quantile": "o", "iqn": "x"}
_RANGES = {"steady": (0.8, 5.2), "gamble": (-3.0, 6.5), "costly": (-7.5, 0.0)}


def plot_distributions(predictions: Predictions, path: Path) -> None:
    """Writes a PNG with a column for each distribution.

    The upper row shows the distribution functions of the first seed, the lower row the means and tail means of all
    seeds; true values are grey.
    """
    figure, axes = pyplot.subplots(
        2, len(DISTRIBUTIONS), figsize=(15, 7.5), layout="constrained", sharex="col", height_ratios=(3, 1.3)
    )
    title = "Return distributions learned by critics: a scalar critic cannot tell the left one from the middle one"
    figure.suptitle(title, fontsize=14)
    for column, (name, distribution) in enumerate(DISTRIBUTIONS.items()):
        _plot_functions(axes[0, column], name, distribution, predictions)
        _plot_means(axes[1, column], name, distribution, predictions)
        axes[0, column].set(title=f'"{name}": {distribution.formula}', xlim=_RANGES[name])
        axes[1, column].set(xlabel="return")
    axes[0, 0].set_ylabel("probability of a lower return")
    axes[0, 0].legend(loc="upper left")
    drawn = BytesIO()
    figure.savefig(drawn, dpi=90)
    pyplot.close(figure)
    # Reduced to 128 colours, the file is a third of the size.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)


def _plot_functions(axis: Axes, name: str, distribution: ReturnDistribution, predictions: Predictions) -> None:
    returns = torch.linspace(*_RANGES[name], 400, dtype=torch.float64)
    axis.plot(returns, distribution.cdf(returns), color="black", linewidth=5, alpha=0.25, label="true")
    for kind, marker in _MARKERS.items():
        prediction = predictions[kind, name][0]
        if prediction.returns is None or prediction.levels is None:
            continue
        style: dict[str, Any] = {"color": COLOURS[kind], "label": kind, "markersize": 5.5, "linewidth": 1.6}
        if marker:
            axis.plot(prediction.returns, prediction.levels, marker, fillstyle="none", markevery=2, **style)
        else:
            axis.step(prediction.returns, prediction.levels, where="post", **style)
    axis.grid(alpha=0.25)


def _plot_means(axis: Axes, name: str, distribution: ReturnDistribution, predictions: Predictions) -> None:
    """Plots a line for each true value, and a row for each critic with a point for each seed."""
    for true, text in ((distribution.tail_mean(1.0), "mean"), (distribution.tail_mean(TAIL), f"{TAIL:.0%} CVaR")):
        axis.axvline(true, color="black", linewidth=5, alpha=0.25)
        axis.annotate(text, (true, -0.75), ha="center", va="center", fontsize=9)
    for height, (kind, colour) in enumerate(COLOURS.items()):
        of_critic = predictions[kind, name]
        tails = [prediction.tail_mean for prediction in of_critic if prediction.tail_mean is not None]
        axis.plot(
            [prediction.mean for prediction in of_critic], [height] * len(of_critic), "D", color=colour, alpha=0.6
        )
        axis.plot(tails, [height] * len(tails), "s", color=colour, alpha=0.6)
    axis.set(ylim=(len(COLOURS) - 0.5, -1.2), yticks=range(len(COLOURS)), yticklabels=list(COLOURS))
    axis.grid(alpha=0.25)
