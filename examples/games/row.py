"""One row of the table with one seed: `python -m examples.games.row --game guessing --seed 1`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from alpaca_ppo.config.parser import parse_args
from examples.games.pipeline import Experiment, GamesArguments
from examples.games.results import Outcome, outcome_of
from examples.games.rows import MAIN, ROWS


@dataclass(frozen=True)
class RowArguments:
    """Which run to make.

    Raises:
        ValueError: if there is no such game.
    """

    game: str = field(default="guessing", metadata={"help": f"One of {', '.join(ROWS)}."})
    row: str | None = field(default=None, metadata={"help": "Row of the game's table; null = its first one."})
    seed: int = field(default=1, metadata={"help": "Seed of the run."})

    def __post_init__(self) -> None:
        if self.game not in ROWS:
            raise ValueError(f"there is no game {self.game!r}; choose one of {', '.join(map(repr, ROWS))}")


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Runs the missing stages, prints the results of the run, and returns them."""
    arguments, sizes = parse_args([RowArguments, GamesArguments], argv)
    experiment = Experiment(arguments.game, sizes)
    row = arguments.row or MAIN[arguments.game]
    outcome = outcome_of(experiment, row, arguments.seed)
    play = outcome.play
    print(
        f"{row}, seed {arguments.seed}: {experiment.game.success} {play.won:.1f}, {play.turns:.2f} turns a game "
        f"(optimal play: {experiment.game.optimal_turns:.2f}), {play.kl:.1f} nats from the model of the "
        f"demonstrations, {outcome.seconds:.0f} s"
    )
    return outcome


if __name__ == "__main__":
    main()
