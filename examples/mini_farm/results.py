"""Three seeds of PPO on the same models: `python -m examples.mini_farm.results` writes RESULTS.md."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alpaca_ppo.config import parse_args
from alpaca_ppo.folders import write_text_atomically
from examples.mini_farm.pipeline import Lab, LabArguments
from examples.mini_farm.plots import plot_run, read_metrics
from examples.mini_farm.quickstart import describe, summaries_of


@dataclass(frozen=True)
class ResultsArguments:
    """Which seeds, and where the report goes."""

    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds of PPO."})
    report: str = field(default=str(Path(__file__).with_name("RESULTS.md")), metadata={"help": "File to write."})


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is not there yet and writes the report and its figure."""
    arguments, lab_arguments = parse_args([ResultsArguments, LabArguments], argv)
    lab = Lab(lab_arguments)
    runs = {f"PPO, seed {seed}": lab.ppo(f"ppo_seed_{seed}", seed=seed) for seed in arguments.seeds}
    summaries = summaries_of(lab, runs)
    plot_run({name: read_metrics(run) for name, run in runs.items()}, summaries, lab.root / "results_seeds.png")
    last = {name: read_metrics(run)[-10:] for name, run in runs.items()}
    highest = max(row["objective/kl_sum_seq"] for rows in last.values() for row in rows)
    text = (
        "# Results of the laptop laboratory\n\n"
        "Written by `make results`: three seeds of PPO on the same supervised and reward models.\n\n"
        f"{describe(lab, summaries)}\n\n"
        f"The KL stays bounded: over the last ten steps of all seeds it is at most {highest:.1f} nats an answer.\n"
    )
    write_text_atomically(Path(arguments.report), text)
    print(f"\n{text}\nWritten: {arguments.report}   Figure: {lab.root / 'results_seeds.png'}")


if __name__ == "__main__":
    main()
