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


def plot_rows(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Writes the curves of the main rows (mean, range of seeds), and all runs as points of KL and right steps."""
    figure, (curves, points) = pyplot.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    for number, (name, runs) in enumerate(outcomes.items()):
        main = name in MAIN
        if main:
            by_step = list(zip(*(run.curve for run in runs), strict=True))
            steps = range(1, len(by_step) + 1)
            curves.plot(steps, [fmean(step) for step in by_step], color=f"C{number}", linewidth=2, label=name)
            lowest, highest = ([choose(step) for step in by_step] for choose in (min, max))
            curves.fill_between(steps, lowest, highest, color=f"C{number}", alpha=0.15, linewidth=0)
        points.scatter(
            [run.kl for run in runs],
            [run.right for run in runs],
            color=f"C{number}" if main else "#999999",
            marker="o" if main else f"${number - len(MAIN) + 1}$",
            s=50,
            label=name,
        )
    curves.set(title="During the run (mean and range of the seeds)", xlabel="PPO step", ylabel="right steps (%)")
    points.set(
        title="Held-out prompts, after the run", xlabel="KL to the pretrained model (nats)", ylabel="right steps (%)"
    )
    for axis in (curves, points):
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    pyplot.close(figure)
    # 128 colours make the file a third as large.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
