"""One row of the table with one seed: `python -m examples.long_horizon.row --row VAPO --seed 1`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from alpaca_ppo.config.parser import parse_args
from examples.long_horizon.pipeline import Experiment, HorizonArguments
from examples.long_horizon.results import Outcome, outcome_of
from examples.long_horizon.rows import ROWS, VAPO


@dataclass(frozen=True)
class RowArguments:
    """Which run to make."""

    row: str = field(default=VAPO, metadata={"help": f"One of: {'; '.join(ROWS)}."})
    seed: int = field(default=1, metadata={"help": "Seed of the run."})


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Runs the missing stages, prints the results of the run, and returns them."""
    arguments, sizes = parse_args([RowArguments, HorizonArguments], argv)
    outcome = outcome_of(Experiment(sizes).run(arguments.row, seed=arguments.seed))
    print(
        f"{arguments.row}, seed {arguments.seed}: {outcome.right:.1f} % of the held-out steps right (before: "
        f"{outcome.right_before:.1f} %), {outcome.kl:.1f} nats from the pretrained model, {outcome.seconds:.0f} s, "
        f"{outcome.seconds_per_step:.2f} s a step"
    )
    return outcome


if __name__ == "__main__":
    main()
