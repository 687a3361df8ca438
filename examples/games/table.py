"""The table: `python -m examples.games.table` makes the runs that are missing, and writes RESULTS.md."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.parser import parse_args
from examples.games.pipeline import Experiment, GamesArguments
from examples.games.plots import plot_games
from examples.games.results import Outcome, margin, outcome_of, reading, table
from examples.games.rows import GROUP, MAIN, ROWS
from examples.games.transcripts import transcripts
from examples.mini_farm.report import machine, notes_of

REPORT = Path(__file__).with_name("RESULTS.md")
TITLES = {"guessing": "A number to be guessed", "calculator": "Sums with a calculator"}
SHOWN = {"guessing": (163, 331), "calculator": (0, 1)}
"""Held-out games that the report shows, chosen before any run."""


@dataclass(frozen=True)
class TableArguments:
    """The games, the seeds, and the report's file.

    Raises:
        ValueError: if there are fewer than two different seeds, or a game is unknown.
    """

    games: list[str] = field(default_factory=lambda: list(ROWS), metadata={"help": "Games to play."})
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds of every row."})
    report: str = field(default=str(REPORT), metadata={"help": "File to write; the figure goes to its folder."})

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < 2:
            raise ValueError(f"seeds is {self.seeds}; a standard error needs at least two different seeds")
        if unknown := sorted(set(self.games) - set(ROWS)):
            raise ValueError(f"there are no games {unknown}; choose among {list(ROWS)}")


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, list[Outcome]]]:
    """Makes the missing runs, seed by seed, writes the report, and returns the results of each game's rows."""
    arguments, sizes = parse_args([TableArguments, GamesArguments], argv)
    experiments = {game: Experiment(game, sizes) for game in arguments.games}
    # Seed by seed, so that a table that is interrupted has some of each row.
    for seed in arguments.seeds:
        for game, experiment in experiments.items():
            for row in ROWS[game]:
                outcome_of(experiment, row, seed)
    outcomes = {
        game: {row: [outcome_of(experiment, row, seed) for seed in arguments.seeds] for row in ROWS[game]}
        for game, experiment in experiments.items()
    }
    report = Path(arguments.report)
    plot_games({game: (experiments[game], outcomes[game]) for game in experiments}, report.with_name("results.png"))
    sections = [_section(experiments[game], outcomes[game], arguments.seeds) for game in experiments]
    text = (
        "# Results of the games\n\n"
        f"Written by `make games`: mean ± standard deviation over {len(arguments.seeds)} seeds, on held-out games, "
        "sampled at temperature 1. A lost game counts with the turns that it had. KL: to the model of the "
        "demonstrations. Explained variance: mean over the last quarter of the steps. Seconds: rollouts and updates, "
        f"or the games and their imitation. The best of {GROUP} games are chosen by their score, which is known only "
        "afterwards: they are no way to play.\n\n"
        "![Turns of a game and right answers, by games played](results.png)\n\n"
        + "\n\n".join(sections)
        + f"\n\nMade on {machine()}, one thread, a machine whose speed varies.\n{notes_of(report)}"
    )
    write_text_atomically(report, text)
    print(f"\n{text}\nWritten: {report}")
    return outcomes


def _section(experiment: Experiment, outcomes: dict[str, list[Outcome]], seeds: list[int]) -> str:
    name, sizes = experiment.name, experiment.sizes
    row = MAIN[name]
    errors = ""
    if name == "guessing":
        errors = (
            f"\n\n{row} is nearer to optimal play than the demonstrations by {margin(experiment, outcomes[row]):.0f} "
            "standard errors."
        )
    return (
        f"## {TITLES[name]}\n\n"
        f"{sizes.total_episodes} games in each run, {sizes.rollout_batch_size} in each step.\n\n"
        f"{table(experiment, outcomes, seeds)}\n\n{reading(experiment, outcomes)}{errors}\n\n"
        f"### What was said\n\n{row}, seed {seeds[0]}.\n\n{transcripts(experiment, row, seeds[0], SHOWN[name])}"
    )


if __name__ == "__main__":
    main()
