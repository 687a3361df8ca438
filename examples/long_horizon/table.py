"""The table: `python -m examples.long_horizon.table` makes the runs that are missing, and writes RESULTS.md."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.parser import parse_args
from examples.long_horizon.other_rewards import SHARE_TO_PASS
from examples.long_horizon.pipeline import Experiment, HorizonArguments
from examples.long_horizon.plots import plot_rows
from examples.long_horizon.results import Outcome, outcome_of, reading, table, table_of_others
from examples.long_horizon.rows import MAIN, OTHERS, ROWS, VAPO
from examples.mini_farm.report import machine, notes_of

REPORT = Path(__file__).with_name("RESULTS.md")


@dataclass(frozen=True)
class TableArguments:
    """The rows, their seeds, and the report's file.

    Raises:
        ValueError: if there are fewer than two different seeds, a row is unknown, or VAPO is missing.
    """

    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5], metadata={"help": "Seeds of the main rows."})
    ablation_seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds of all others."})
    rows: list[str] = field(default_factory=lambda: list(ROWS), metadata={"help": "Rows to make; VAPO among them."})
    report: str = field(default=str(REPORT), metadata={"help": "File to write; the figure goes to its folder."})

    def __post_init__(self) -> None:
        for name in ("seeds", "ablation_seeds"):
            if len(set(getattr(self, name))) < 2:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; a standard error needs at least two different seeds"
                )
        if unknown := sorted(set(self.rows) - set(ROWS)):
            raise ValueError(f"there are no rows {unknown}; choose among {list(ROWS)}")
        if VAPO not in self.rows:
            raise ValueError(f"rows is {self.rows}; add {VAPO!r}, which the others are compared with")


def main(argv: Sequence[str] | None = None) -> dict[str, list[Outcome]]:
    """Makes the missing runs, seed by seed, writes the report, and returns the results of each row."""
    arguments, sizes = parse_args([TableArguments, HorizonArguments], argv)
    experiment = Experiment(sizes)
    seeds = {name: arguments.seeds if name in MAIN else arguments.ablation_seeds for name in arguments.rows}
    # Seed by seed, so that a table that is interrupted has some of each row.
    for seed in dict.fromkeys([*arguments.seeds, *arguments.ablation_seeds]):
        for name in seeds:
            if seed in seeds[name]:
                experiment.run(name, seed=seed)
    outcomes = {name: [outcome_of(experiment.run(name, seed=seed)) for seed in seeds[name]] for name in seeds}
    report = Path(arguments.report)
    plot_rows({name: runs for name, runs in outcomes.items() if name not in OTHERS}, report.with_name("results.png"))
    before = fmean(run.right_before for run in outcomes[VAPO])
    text = (
        "# Results of the long horizon\n\n"
        f"Written by `make long-horizon`: {experiment.sizes.total_episodes} sampled responses in each run, "
        f"mean ± standard deviation over the seeds ({len(arguments.seeds)} for the main rows, "
        f"{len(arguments.ablation_seeds)} for the ablations). Before the runs {before:.1f} % of the steps are right. "
        "After the run: on held-out prompts, sampled at temperature 1. During the run: mean over the steps, those of "
        "value pretraining included.\n\n"
        f"{table(outcomes)}\n\n{reading(outcomes)}\n\n"
        "## Other options\n\n"
        f"{len(arguments.ablation_seeds)} seeds each; the difference is that to the row beside which an option is set, "
        "± the standard error of the difference of the two means. The options' own settings are defaults or those of a "
        "preset, and were not tuned for this task. In the rows of pass or fail the reward is 1 for a response with at "
        f"least {SHARE_TO_PASS:.0%} right steps and 0 for others. Dynamic sampling trains on as many responses as the "
        "other rows, and samples more. Uneven prompts: 36 prompts, gone through 3.6 times, of which a third are too "
        "hard to pass and a third too easy. True marks: a second reward for marks that say whether their step is "
        "right, of a weight that drowns the grade. The small critic has half the width of the policy and is "
        "pretrained as it is. Pass@k is meant for the best of a group, not for this mean.\n\n"
        f"{table_of_others(outcomes)}\n\n"
        f"Made on {machine()}. Explained variance: mean over the last quarter of the steps. Seconds: rollouts, scoring "
        "and updates, on a machine whose speed varies.\n\n"
        f"![Right steps by PPO step, and by KL](results.png)\n{notes_of(report)}"
    )
    write_text_atomically(report, text)
    print(f"\n{text}\nWritten: {report}")
    return outcomes


if __name__ == "__main__":
    main()
