"""PPO with several seeds on the same models: `python -m examples.mini_farm.results` writes RESULTS.md."""

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

MIN_WIN_RATE, MIN_GAIN = 0.65, 4.0
"""The targets of each seed: win-rate over SFT, and gain in gold score over SFT in standard errors."""
WINDOW = 10
"""PPO steps that are averaged at the end of a run."""


@dataclass(frozen=True)
class ResultsArguments:
    """The seeds, and the report's file.

    Raises:
        ValueError: if there are fewer than two different seeds.
    """

    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds of PPO."})
    report: str = field(default=str(REPORT), metadata={"help": "File to write."})

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < 2:
            raise ValueError(f"seeds is {self.seeds}; a standard deviation needs at least two different seeds")


def spread(summaries: Sequence[Summary]) -> str:
    """Returns a table of means and standard deviations over the seeds."""
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
    """Returns what the table shows, in words: how many seeds reach the targets, the gains, and the KL."""
    reached = [line.win_rate >= MIN_WIN_RATE and line.gain_errors > MIN_GAIN for line in seeds]
    proxy, gold, kl = (fmean(getattr(line, name) for line in seeds) for name in ("proxy", "gold", "kl"))
    last = [fmean(row[KL] for row in metrics[-WINDOW:]) for metrics in runs.values()]
    before = [fmean(row[KL] for row in metrics[-2 * WINDOW : -WINDOW] or metrics) for metrics in runs.values()]
    highest = max(row[KL] for metrics in runs.values() for row in metrics)
    return (
        f"{sum(reached)} of {len(seeds)} seeds reach the targets: a win-rate over SFT of at least {MIN_WIN_RATE:.0%} "
        f"and a gold score above SFT's by more than {MIN_GAIN:.0f} standard errors. "
        f"On average PPO gains {proxy - sft.proxy:.2f} in proxy reward and {gold - sft.gold:.2f} in gold score over "
        f"SFT at {kl:.1f} nats; {best.method} gains {best.proxy - sft.proxy:.2f} and {best.gold - sft.gold:.2f} at no "
        f"more than {best.kl:.1f} nats, but needs that many samples for every answer.\n\n"
        f"The KL in training, mean over the last {WINDOW} steps of each seed: "
        f"{', '.join(f'{value:.1f}' for value in last)} nats per answer ({WINDOW} steps earlier: "
        f"{', '.join(f'{value:.1f}' for value in before)}; highest of all steps: {highest:.1f})."
    )


def main(argv: Sequence[str] | None = None) -> list[Summary]:
    """Runs the missing stages, writes the report's section and its figure, and returns the table's lines."""
    arguments, lab_arguments = parse_args([ResultsArguments, LabArguments], argv)
    lab = Lab(lab_arguments)
    folders = {f"PPO, seed {seed}": lab.ppo(f"ppo_seed_{seed}", seed=seed) for seed in arguments.seeds}
    summaries = summaries_of(lab, folders)
    runs = {name: read_metrics(folder) for name, folder in folders.items()}
    figure = lab.root / "results.png"
    plot_run(runs, summaries, figure)
    sft, best, *seeds = summaries
    text = (
        f"Written by `make results`: PPO with {len(seeds)} seeds on the same supervised and reward models.\n\n"
        f"{describe(lab, summaries)}\n\n{spread(seeds)}\n\n{reading(sft, best, seeds, runs)}\n\n"
        f"Made on {machine()}. Other versions or another number of threads round differently, and PPO amplifies "
        "such differences: expect similar numbers, not the same digits."
    )
    write_section(Path(arguments.report), SECTIONS[0], text, figure)
    print(f"\n{text}\n\nWritten: {arguments.report}\nFigure: {figure}")
    return summaries


if __name__ == "__main__":
    main()
