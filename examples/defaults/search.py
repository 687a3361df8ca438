"""The search for defaults: `python -m examples.defaults.search` makes the runs that are missing, and writes SEARCH.md.

Its data have seed 1 and its runs the seeds 11 and 12, those of the comparison seed 0 and 1 to 5. Each run is a line of
search.jsonl as soon as it has ended, so that an interrupted search goes on where it was.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from examples.defaults.rows import ROWS, settings_of
from examples.defaults.tasks import TASKS
from examples.mini_farm.report import machine

RECORD, PAGE = Path(__file__).with_name("search.jsonl"), Path(__file__).with_name("SEARCH.md")
DATA_SEED, SEEDS = 1, (11, 12)
TUNED_ON = ("mini_farm", "long_horizon", "guessing", "calculator")
"""The fifth task is kept for the comparison."""
Run = dict[str, Any]


@dataclass(frozen=True)
class SearchArguments:
    """Where the models lie, and how many runs go at once."""

    root: str = argument("outputs/defaults", "Folder for models and data.")
    jobs: int = argument(2, "Runs at once, each with one thread.")


def recorded(record: Path) -> list[Run]:
    """Returns the runs in `record`."""
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()] if record.exists() else []


def missing(runs: Sequence[Run]) -> Iterator[Run]:
    """Yields the runs that are not among `runs`, seed by seed."""
    made = {(run["row"], run["task"], run["seed"]) for run in runs}
    for seed in SEEDS:
        for row in ROWS:
            for task in TUNED_ON:
                if (row, task, seed) not in made:
                    yield {"row": row, "task": task, "seed": seed}


def make(run: Run, root: Path) -> Run:
    """Returns `run` with what came of it."""
    settings = settings_of(run["row"], run["task"])
    asked = {"task": run["task"], "settings": settings, "data_seed": DATA_SEED, "seed": run["seed"]}
    command = [sys.executable, "-m", "examples.defaults.run", str(root), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{run} ended with status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {**run, **json.loads(done.stdout.splitlines()[-1])}


def page(runs: Sequence[Run]) -> str:
    """Returns the table of all tries: the mean over the seeds, by task, and the processor seconds of all tasks."""
    heads = [f"{task}, {TASKS[task].unit}" for task in TUNED_ON]
    lines = ["| | " + " | ".join(heads) + " | processor seconds |", "|---" * (len(heads) + 2) + "|"]
    for row in ROWS:
        cells, seconds = [], 0.0
        for task in TUNED_ON:
            of_task = [run for run in runs if (run["row"], run["task"]) == (row, task)]
            scores = [run["after"] for run in of_task]
            cells.append(f"{fmean(scores):.2f} ({', '.join(f'{score:.2f}' for score in scores)})" if scores else "")
            seconds += sum(run["processor_seconds"] for run in of_task)
        lines.append(f"| {row} | " + " | ".join(cells) + f" | {seconds:.0f} |")
    total = sum(run["processor_seconds"] for run in runs) / 3600
    return (
        "# The search for defaults\n\n"
        f"Written by `python -m examples.defaults.search`: every try, mean and each seed ({SEEDS[0]} and {SEEDS[1]}), "
        f"on data of seed {DATA_SEED}. {len(runs)} runs, {total:.1f} processor hours, on {machine()}.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the missing runs, each recorded when it ends, and writes the page."""
    (arguments,) = parse_args([SearchArguments], argv)
    root = Path(arguments.root).resolve()
    root.mkdir(parents=True, exist_ok=True)
    # One after the other, because runs of the same task share them.
    for task in TUNED_ON:
        TASKS[task].prepare(root / task / f"data_{DATA_SEED}", DATA_SEED)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for ended in as_completed([pool.submit(make, run, root) for run in missing(recorded(RECORD))]):
            with RECORD.open("a", encoding="utf-8") as file:
                file.write(json.dumps(ended.result()) + "\n")
            print(ended.result(), flush=True)
    write_text_atomically(PAGE, page(recorded(RECORD)))


if __name__ == "__main__":
    main()
