"""Distillation on policy beside supervised fine-tuning: `python -m examples.distillation.compare` makes what is
missing, and writes RESULTS.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from examples.defaults.records import Run, fill, outcome
from examples.distillation.run import BEFORE, ON_POLICY, RATES, SUPERVISED, Start
from examples.mini_farm.compare import difference
from examples.mini_farm.report import machine, notes_of

RECORD, PAGE = Path(__file__).with_name("results.jsonl"), Path(__file__).with_name("RESULTS.md")
SEEDS = (2, 3, 4)
COLUMNS = {
    "teacher_kl": "KL to the teacher, nats per token",
    "teacher_top_token": "tokens that are the teacher's likeliest",
    "scores": "reward of its answers",
    "loss": "loss on the teacher's answers, nats per token",
    "processor_seconds": "processor seconds",
}


@dataclass(frozen=True)
class DistillationArguments:
    """Where models and data lie, and how many runs go at once."""

    root: str = argument("outputs/distillation", "Folder for models and data.")
    jobs: int = argument(1, "Runs at once, each with one thread.")
    seeds: list[int] = field(default_factory=lambda: list(SEEDS), metadata={"help": "Seeds to make runs of."})
    record: str = argument(str(RECORD), "File of the runs that have ended.")
    report: str = argument(str(PAGE), "File to write.")


def table(runs: Sequence[Run], case: str) -> str:
    """Returns means and standard errors over the seeds of each row, and the differences of the two ways."""
    numbers = {
        row: {name: [run[name] for run in runs if (run["task"], run["row"]) == (case, row)] for name in COLUMNS}
        for row in (BEFORE, SUPERVISED, ON_POLICY)
    }
    lines = [f"| | {' | '.join(numbers)} | on policy - supervised |", "|---" * (len(numbers) + 2) + "|"]
    for name, title in COLUMNS.items():
        cells = [_cell(of_row[name], name) for of_row in numbers.values()]
        own, other = (numbers[row][name] for row in (ON_POLICY, SUPERVISED))
        lead = difference(own, other, digits=3) if min(len(own), len(other)) > 1 else ""
        lines.append(f"| {title} | {' | '.join(cells)} | {lead} |")
    return "\n".join(lines) + "\n"


def _cell(numbers: Sequence[float], name: str) -> str:
    digits = 0 if name == "processor_seconds" else 3
    error = f" ± {stdev(numbers) / len(numbers) ** 0.5:.{digits}f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.{digits}f}{error}" if numbers else ""


def page(runs: Sequence[Run]) -> str:
    """Returns the page of all runs."""
    seeds = sorted({run["seed"] for run in runs if run["row"] != BEFORE})
    return (
        "# Distillation compared\n\n"
        "Written by `python -m examples.distillation.compare`: means and standard errors over seeds "
        f"{', '.join(map(str, seeds))}, on {machine()}. [The recipe](../../docs/recipes/distillation.md) says what is "
        f"compared.\n" + "".join(f"\n## {case[0].upper()}{case[1:]}\n\n{table(runs, case)}" for case in RATES)
    )


def main() -> None:
    """Makes the missing runs, and writes the page."""
    (arguments,) = parse_args([DistillationArguments])
    root, report = Path(arguments.root).resolve(), Path(arguments.report)
    root.mkdir(parents=True, exist_ok=True)
    asked: list[Run] = []
    for case in RATES:
        start = Start(root, case)
        for seed in arguments.seeds:
            # Before runs that need them go side by side.
            start.training_prompts(seed)
        asked.append({"row": BEFORE, "task": case, "seed": 0})
        asked += [
            {"row": row, "task": case, "seed": seed} for seed in arguments.seeds for row in (ON_POLICY, SUPERVISED)
        ]

    def make(run: Run) -> Run:
        return outcome("examples.distillation.run", root, {"case": run["task"], "row": run["row"], "seed": run["seed"]})

    runs = fill(Path(arguments.record), asked, make, jobs=arguments.jobs)
    write_text_atomically(report, page(runs) + notes_of(report))


if __name__ == "__main__":
    main()
