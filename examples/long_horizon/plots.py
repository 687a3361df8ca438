"""The figure of the table: how soon each row learns, and what it reached at which KL."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean

import matplotlib
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

from examples.long_horizon.results import Outcome  # noqa: E402
from examples.long_horizon.rows import MAIN  # noqa: E402

# Okabe and Ito's colours, which the colour-blind can tell apart; without their yellow, which is faint on white.
COLOURS = dict(zip(MAIN, ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#000000"), strict=True))
MARKERS = dict(zip(MAIN, "osD^vX", strict=True))


def plot_rows(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Writes the curves of the main rows (mean, range of seeds), and their runs as points of KL and right steps.

    An ablation is a letter at the mean of its seeds.
    """
    figure, (curves, points) = pyplot.subplots(1, 2, figsize=(14, 7), layout="constrained")
    letters = iter("abcdefgh")
    for name, runs in outcomes.items():
        colour = COLOURS.get(name, "#444444")
        if name in MAIN:
            by_step = list(zip(*(run.curve for run in runs), strict=True))
            steps = range(1, len(by_step) + 1)
            curves.plot(steps, [fmean(step) for step in by_step], color=colour, linewidth=2)
            lowest, highest = ([choose(step) for step in by_step] for choose in (min, max))
            curves.fill_between(steps, lowest, highest, color=colour, alpha=0.12, linewidth=0)
            points.scatter(
                [run.kl for run in runs],
                [run.right for run in runs],
                color=colour,
                marker=MARKERS[name],
                s=50,
                label=name,
            )
        else:
            mean = fmean(run.kl for run in runs), fmean(run.right for run in runs)
            points.scatter(*mean, color=colour, marker=f"${next(letters)}$", s=80, label=name)
    curves.set(title="During the run (mean and range of the seeds)", xlabel="PPO step", ylabel="right steps (%)")
    points.set(
        title="Held-out prompts, after the run", xlabel="KL to the pretrained model (nats)", ylabel="right steps (%)"
    )
    for axis in (curves, points):
        axis.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    pyplot.close(figure)
    # 128 colours make the file a third as large.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
