"""Over-optimisation: `python -m examples.mini_farm.overopt` makes a long run with a weak KL penalty, and plots it.

The reward model's score keeps rising, while the annotators' score rises and then falls (Gao et al., arXiv:2210.10760;
AlpacaFarm, arXiv:2305.14387, section 4.3). The supervised model is that of the quickstart. The reward model is trained
on fewer comparisons, so that the score turns down early.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from alpaca_ppo.config.parser import parse_args
from examples.mini_farm.pipeline import PRESETS, Lab, LabArguments
from examples.mini_farm.plots import GOLD, KL, PROXY, Metrics, plot_overoptimisation, read_metrics
from examples.mini_farm.report import REPORT, SECTIONS, machine, write_section
from examples.mini_farm.splits import read_rows

WINDOW = 8
"""PPO steps that the report averages over: about a thousand answers."""
SHOWN_ANSWERS = 4


@dataclass(frozen=True)
class OveroptArguments:
    """The run, and the report's file."""

    overopt_preset: str = field(
        default=str(PRESETS / "mini_farm_overopt.yaml"), metadata={"help": "YAML of the long run."}
    )
    pairs: int = field(default=1500, metadata={"help": "Comparisons to train the reward model on."})
    seed: int = field(default=1, metadata={"help": "Seed of PPO."})
    report: str = field(default=str(REPORT), metadata={"help": "File to write."})


@dataclass(frozen=True)
class Stretch:
    """Means over the consecutive steps `first` to `last`."""

    first: int
    last: int
    proxy: float
    gold: float
    gold_error: float
    """Standard error of `gold`, from the spread over the steps."""
    kl: float


def stretches(metrics: Metrics, *, window: int) -> list[Stretch]:
    """Returns the means of every `window` consecutive steps; `window` is at least 2 and at most the run's length."""
    parts = [metrics[start : start + window] for start in range(len(metrics) - window + 1)]
    return [
        Stretch(
            first=part[0]["step"],
            last=part[-1]["step"],
            proxy=fmean(row[PROXY] for row in part),
            gold=fmean(row[GOLD] for row in part),
            gold_error=stdev(row[GOLD] for row in part) / window**0.5,
            kl=fmean(row[KL] for row in part),
        )
        for part in parts
    ]


def has_overoptimised(best: Stretch, end: Stretch) -> bool:
    """Returns whether from `best` to `end` the proxy reward has risen, and the gold score has fallen by more than four
    standard errors of the difference.
    """
    return end.proxy > best.proxy and best.gold - end.gold > 4 * _error(best, end)


def over_optimised(metrics: Metrics, *, window: int = WINDOW) -> bool:
    """Returns whether a run has over-optimised since its `window` steps of highest gold; one of fewer steps has not."""
    parts = stretches(metrics, window=window)
    return bool(parts) and has_overoptimised(max(parts, key=lambda part: part.gold), parts[-1])


def _error(best: Stretch, end: Stretch) -> float:
    return (best.gold_error**2 + end.gold_error**2) ** 0.5


def reading(metrics: Metrics, *, window: int = WINDOW) -> str:
    """Returns a table of start, highest gold and end of a run, and whether that shows over-optimisation.

    The run has at least `window` steps.
    """
    parts = stretches(metrics, window=window)
    best, end = max(parts, key=lambda part: part.gold), parts[-1]
    lines = [
        f"| {name} | {part.first} to {part.last} | {part.proxy:.2f} | {part.gold:.2f} ± {part.gold_error:.2f} | "
        f"{part.kl:.1f} |"
        for name, part in (("start", parts[0]), ("highest gold", best), ("end", end))
    ]
    verdict = (
        "The reward model's score rises while the annotators' falls: over-optimisation."
        if has_overoptimised(best, end)
        else "This is not over-optimisation: the run is too short, or the KL penalty too strong."
    )
    return (
        "| | PPO steps | proxy reward | gold score | KL to SFT (nats) |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
        + f"\n\nFrom the steps of highest gold to the end, the proxy reward changed by "
        f"{end.proxy - best.proxy:+.2f} and the gold score by {end.gold - best.gold:+.2f} ± {_error(best, end):.2f}. "
        f"{verdict}"
    )


def last_answers(run: Path) -> str:
    """Returns a few answers of the last step of a PPO run, as a Markdown list."""
    (*_, last) = sorted((run / "rollouts").glob("step_*.jsonl"))
    return "\n".join(
        f"- *{row['prompt'].strip()}* {row['response'].removesuffix('<eos>')} (proxy {row['score']:.1f})"
        for row in read_rows(last)[:SHOWN_ANSWERS]
    )


def main(argv: Sequence[str] | None = None) -> str:
    """Runs the missing stages, writes the report's section and its figure, and returns the section's text."""
    arguments, lab_arguments = parse_args([OveroptArguments, LabArguments], argv)
    lab = Lab(lab_arguments)
    preset, judge = Path(arguments.overopt_preset), lab.reward_model_of("overopt_reward_model", pairs=arguments.pairs)
    run = lab.ppo("overopt", seed=arguments.seed, preset=preset, reward_model=judge)
    metrics, figure = read_metrics(run), lab.root / "overopt.png"
    plot_overoptimisation(metrics, figure)
    text = (
        f"Written by `make overopt`: one long run (`{preset.name}`) with a weak KL penalty, the same supervised model, "
        f"and a reward model trained on {arguments.pairs} comparisons. Means over {WINDOW} steps, ± standard error.\n\n"
        f"{reading(metrics)}\n\nThe first answers recorded at the last step:\n\n{last_answers(run)}\n\n"
        f"Made on {machine()}."
    )
    write_section(Path(arguments.report), SECTIONS[1], text, figure)
    print(f"\n{text}\n\nWritten: {arguments.report}\nFigure: {figure}")
    return text


if __name__ == "__main__":
    main()
