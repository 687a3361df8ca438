"""The figure of the table: how soon each row learns each game."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean

import matplotlib
from PIL import Image

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from examples.games.pipeline import Experiment  # noqa: E402
from examples.games.results import Outcome, demonstrated  # noqa: E402
from examples.games.rows import BEST, BY_TOKEN, BY_TURN, GRPO, TURN_REWARDS  # noqa: E402
from examples.mini_farm.plots import smooth  # noqa: E402

# Okabe and Ito's colours, which the colour-blind can tell apart; without their yellow, which is faint on white.
_ROWS = (TURN_REWARDS, BY_TURN, BY_TOKEN, GRPO, BEST)
COLOURS = dict(zip(_ROWS, ("#000000", "#0072B2", "#E69F00", "#CC79A7", "#009E73"), strict=True))
Outcomes = Mapping[str, Sequence[Outcome]]


def plot_games(games: Mapping[str, tuple[Experiment, Outcomes]], path: Path) -> None:
    """Writes a panel for each game: turns of the guessing game, right answers with the calculator, by games played."""
    figure, panels = pyplot.subplots(1, len(games), figsize=(7 * len(games), 6), layout="constrained", squeeze=False)
    for axis, (name, (experiment, outcomes)) in zip(panels[0], games.items(), strict=True):
        by_turns = experiment.game.counts_turns
        for row, runs in outcomes.items():
            _draw(axis, row, runs, experiment, by_turns=by_turns)
        player = demonstrated(experiment)[0]
        levels = [("demonstrations", player.turns if by_turns else player.won, ":")]
        levels.append(("optimal play", experiment.game.optimal_turns if by_turns else 100.0, "--"))
        for label, level, style in levels:
            axis.axhline(level, color="#777777", linestyle=style, linewidth=1.2)
            axis.annotate(label, (0.8, level), xycoords=("axes fraction", "data"), ha="center", va="bottom", fontsize=9)
        measure = "turns of a game" if by_turns else "right answers (%)"
        axis.set(title=name, xlabel="games played (mean and range of the seeds, over 10 steps)", ylabel=measure)
        axis.grid(alpha=0.25)
    # The first game has the rows of the others too.
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    pyplot.close(figure)
    # 128 colours make the file a third as large.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)


def _draw(axis: Axes, row: str, runs: Sequence[Outcome], experiment: Experiment, *, by_turns: bool) -> None:
    colour = COLOURS[row]
    if row == BEST:
        level = fmean(run.play.turns if by_turns else run.play.won for run in runs)
        axis.plot(experiment.sizes.total_episodes, level, "D", color=colour, label=f"{row} (held-out games)")
        return
    curves = [smooth([turns if by_turns else 100 * score for score, turns in run.curve], window=10) for run in runs]
    by_step = list(zip(*curves, strict=True))
    played = [experiment.sizes.rollout_batch_size * (step + 1) for step in range(len(by_step))]
    axis.plot(played, [fmean(step) for step in by_step], color=colour, linewidth=2, label=row)
    lowest, highest = ([choose(step) for step in by_step] for choose in (min, max))
    axis.fill_between(played, lowest, highest, color=colour, alpha=0.12, linewidth=0)
