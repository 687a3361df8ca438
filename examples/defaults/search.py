"""The search for defaults: `python -m examples.defaults.search` makes the runs that are missing, and writes SEARCH.md.

Its data have seed 1 and its runs the seeds 11 and 12, those of the comparison seed 0 and 1 to 5. Each run is a line of
search.jsonl as soon as it has ended, so that an interrupted search goes on where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from examples.defaults.records import Run, fill, outcome
from examples.defaults.rows import CHOSEN, OLD, ROWS, TWICE, settings_of
from examples.defaults.tasks import TASKS
from examples.mini_farm.report import machine

RECORD, PAGE = Path(__file__).with_name("search.jsonl"), Path(__file__).with_name("SEARCH.md")
DATA_SEED, SEEDS = 1, (11, 12)
TUNED_ON = ("mini_farm", "long_horizon", "guessing", "calculator")
"""The fifth task is kept for the comparison."""


@dataclass(frozen=True)
class SearchArguments:
    """Where the models lie, and how many runs go at once."""

    root: str = argument("outputs/defaults", "Folder for models and data.")
    jobs: int = argument(2, "Runs at once, each with one thread.")


def asked() -> list[Run]:
    """Returns all runs of the search, seed by seed."""
    rows = [(SEEDS[0], row) for row in ROWS] + [(SEEDS[1], row) for row in TWICE]
    return [{"row": row, "task": task, "seed": seed} for seed, row in rows for task in TUNED_ON]


def make(run: Run, root: Path) -> Run:
    """Returns what came of `run`."""
    settings = settings_of(run["row"], run["task"])
    asked = {"task": run["task"], "settings": settings, "data_seed": DATA_SEED, "seed": run["seed"]}
    return outcome("examples.defaults.run", root, asked)


def page(runs: Sequence[Run]) -> str:
    """Returns the table of all tries: the mean over the seeds, by task, and the processor seconds of all tasks."""
    heads = [f"{task}, {TASKS[task].unit}" for task in TUNED_ON]
    lines = ["| | " + " | ".join(heads) + " | processor seconds |", "|---" * (len(heads) + 2) + "|"]
    for row in ROWS:
        cells, seconds = [], 0.0
        for task in TUNED_ON:
            of_task = [run for run in runs if (run["row"], run["task"]) == (row, task)]
            scores = [run["after"] for run in of_task]
            each = f" ({', '.join(f'{score:.2f}' for score in scores)})" if len(scores) > 1 else ""
            cells.append(f"{fmean(scores):.2f}{each}" if scores else "")
            seconds += sum(run["processor_seconds"] for run in of_task)
        lines.append(f"| {row} | " + " | ".join(cells) + f" | {seconds:.0f} |")
    total = sum(run["processor_seconds"] for run in runs) / 3600
    old, chosen = ({(run["task"], run["seed"]): run["after"] for run in runs if run["row"] == row} for row in TWICE)
    pairs = [chosen[key] > old[key] for key in old.keys() & chosen.keys()]
    return (
        "# The search for defaults\n\n"
        f"Written by `python -m examples.defaults.search`: every try with seed {SEEDS[0]}, two with {SEEDS[1]} too, "
        f"on data of seed {DATA_SEED}. {len(runs)} runs, {total:.1f} processor hours, on {machine()}.\n\n"
        + "\n".join(lines)
        + f'\n\nThe default is now "{CHOSEN}": of {len(pairs)} pairs of runs with the same task and seed it is ahead '
        f'of "{OLD}" in {sum(pairs)}.\n'
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the missing runs, each recorded when it ends, and writes the page."""
    (arguments,) = parse_args([SearchArguments], argv)
    root = Path(arguments.root).resolve()
    root.mkdir(parents=True, exist_ok=True)
    # One after the other, because runs of the same task share them.
    for task in TUNED_ON:
        TASKS[task].prepare(root / task / f"data_{DATA_SEED}", DATA_SEED)
    write_text_atomically(PAGE, page(fill(RECORD, asked(), partial(make, root=root), jobs=arguments.jobs)))


if __name__ == "__main__":
    main()
