"""Several seeds of PPO on the same models: `python -m examples.mini_farm.results` writes RESULTS.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from alpaca_ppo.config.parser import parse_args
from examples.mini_farm.evaluation import Summary
from examples.mini_farm.pipeline import Lab, LabArguments
from examples.mini_farm.plots import KL, Metrics, plot_run, read_metrics
from examples.mini_farm.quickstart import describe, summaries_of
from examples.mini_farm.report import REPORT, SECTIONS, machine, write_section

LEAST_WIN_RATE, LEAST_GAIN = 0.65, 4.0
"""What each seed has to show: a share of the votes over SFT, and a gold gain over it in standard errors."""
WINDOW = 10
"""PPO steps whose mean stands for the end of a run."""


@dataclass(frozen=True)
class ResultsArguments:
    """Which seeds, and where the report goes.

    Raises:
        ValueError: when fewer than two seeds are given.
    """

    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds of PPO."})
    report: str = field(default=str(REPORT), metadata={"help": "File to write."})

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < 2:
            raise ValueError(f"seeds is {self.seeds}; a spread needs at least two different seeds")


def spread(summaries: Sequence[Summary]) -> str:
    """Mean and standard deviation over the seeds, a line for each figure."""
    columns = {
        "proxy reward": [line.proxy for line in summaries],
        "gold score": [line.gold for line in summaries],
        "win-rate over SFT (%)": [100 * line.win_rate for line in summaries],
        "words": [line.words for line in summaries],
        "KL to SFT (nats)": [line.kl for line in summaries],
    }
    rows = [f"| {name} | {fmean(numbers):.2f} | {stdev(numbers):.2f} |" for name, numbers in columns.items()]
    return "\n".join([f"| PPO, {len(summaries)} seeds | mean | standard deviation |", "|---|---|---|", *rows])


def reading(sft: Summary, best: Summary, seeds: Sequence[Summary], runs: Mapping[str, Metrics]) -> str:
    """What the table says in words, good or bad."""
    reached = [line.win_rate >= LEAST_WIN_RATE and line.gain_errors > LEAST_GAIN for line in seeds]
    proxy, gold, kl = (fmean(getattr(line, name) for line in seeds) for name in ("proxy", "gold", "kl"))
    last = [fmean(row[KL] for row in metrics[-WINDOW:]) for metrics in runs.values()]
    before = [fmean(row[KL] for row in metrics[-2 * WINDOW : -WINDOW] or metrics) for metrics in runs.values()]
    highest = max(row[KL] for metrics in runs.values() for row in metrics)
    return (
        f"{sum(reached)} of {len(seeds)} seeds reach what is asked of each: a win-rate over SFT of at least "
        f"{LEAST_WIN_RATE:.0%} and a gold score above SFT's by more than {LEAST_GAIN:.0f} standard errors. "
        f"On average PPO gains {proxy - sft.proxy:.2f} of proxy reward and {gold - sft.gold:.2f} of gold score over "
        f"SFT at {kl:.1f} nats; {best.method} gains {best.proxy - sft.proxy:.2f} and {best.gold - sft.gold:.2f} at no "
        f"more than {best.kl:.1f}, but pays for every answer with that many samples.\n\n"
        f"The KL in training, mean over the last {WINDOW} steps of each seed: "
        f"{', '.join(f'{value:.1f}' for value in last)} nats an answer (the {WINDOW} steps before: "
        f"{', '.join(f'{value:.1f}' for value in before)}; highest single step of all: {highest:.1f})."
    )


def main(argv: Sequence[str] | None = None) -> list[Summary]:
    """Runs what is not there yet, writes the report's section and its figure, and returns the table's lines."""
    arguments, lab_arguments = parse_args([ResultsArguments, LabArguments], argv)
    lab = Lab(lab_arguments)
    folders = {f"PPO, seed {seed}": lab.ppo(f"ppo_seed_{seed}", seed=seed) for seed in arguments.seeds}
    summaries = summaries_of(lab, folders)
    runs = {name: read_metrics(folder) for name, folder in folders.items()}
    figure = lab.root / "results.png"
    plot_run(runs, summaries, figure)
    sft, best, *seeds = summaries
    text = (
        f"Written by `make results`: PPO from {len(seeds)} seeds on the same supervised and reward models.\n\n"
        f"{describe(lab, summaries)}\n\n{spread(seeds)}\n\n{reading(sft, best, seeds, runs)}\n\n"
        f"Made on {machine()}. Other versions or another number of threads round differently, and PPO amplifies "
        "that: expect the same picture, not the same digits."
    )
    write_section(Path(arguments.report), SECTIONS[0], text, figure)
    print(f"\n{text}\n\nWritten: {arguments.report}\nFigure: {figure}")
    return summaries


if __name__ == "__main__":
    main()
