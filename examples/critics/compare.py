"""The critics compared: `python -m examples.critics.compare` makes what is missing, and writes RESULTS.md.

Seven tasks, of which the last two have a real model. Data and seeds are those of `examples.defaults.compare`, and so
are GRPO and, on the real model alone, TRL's PPO and GRPO.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from examples.defaults.compare import (
    DATA_SEED,
    EVALUATIONS,
    REAL_EVALUATIONS,
    SEEDS,
    TRL,
    TRL_GRPO,
    CompareArguments,
    eval_steps,
    make,
    prepare,
    score_at,
)
from examples.defaults.records import Run, fill, runs_of
from examples.defaults.rows import grpo
from examples.defaults.tasks import REAL_TASKS, TASKS
from examples.mini_farm.report import machine, notes_of

RECORD, PAGE = Path(__file__).with_name("results.jsonl"), Path(__file__).with_name("RESULTS.md")
REAL, RLHF = REAL_TASKS
SEPARATE, GRPO, LARGE, GROUPED = "separate, 4 passes", "GRPO", "cached", "cached, 8 answers a prompt"
SMALL, SMALLEST = "cached, small", "cached, smallest"
_CACHED = {"critic_layout": "cached", "critic_epochs": 8}
_IN_GROUPS = {"num_return_sequences": 8}
"""What all but `LARGE` have on the real model, and GRPO everywhere: passes read a prompt once for its answers."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    LARGE: _CACHED,
    GROUPED: {**_CACHED, **_IN_GROUPS},
    SMALL: {**_CACHED, "critic_width": 64, "critic_depth": 2},
    SMALLEST: {**_CACHED, "critic_width": 64, "critic_depth": 1},
    GRPO: {},
    "separate, 1 pass": {"critic_layout": "separate", "critic_epochs": 1},
    "shared": {"critic_layout": "shared"},
    SEPARATE: {"critic_layout": "separate", "critic_epochs": 4},
}
ROWS = (*SETTINGS, TRL, TRL_GRPO)
LEVELS = (1, 2, 5, 10)
"""Nats per answer at which scores are compared."""
AT_KL = 2
"""The one of them that is in the README's table."""


@dataclass(frozen=True)
class CriticArguments(CompareArguments):
    """Which part to make, where the models lie, and how many runs go at once."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS), metadata={"help": "Tasks to make runs of."})
    jobs: int = argument(4, "Runs of a task and seed at once, each with one thread: what slows one slows all.")
    record: str = argument(str(RECORD), "File of the runs that have ended.")
    report: str = argument(str(PAGE), "File to write.")


def asked_of(run: Run) -> Run:
    """Returns the arguments of `examples.defaults.run` for `run`."""
    evaluations = REAL_EVALUATIONS if run["task"] in REAL_TASKS else EVALUATIONS
    settings = {
        "eval_steps": eval_steps(run["task"], evaluations),
        **SETTINGS[run["row"]],
        **(_IN_GROUPS if run["task"] in REAL_TASKS and run["row"] != LARGE else {}),
        **(grpo(run["task"]) if run["row"] == GRPO else {}),
    }
    return {"task": run["task"], "settings": settings, "data_seed": DATA_SEED, "seed": run["seed"]}


def seeds_of(row: str, task: str) -> Sequence[int]:
    """Returns the seeds of a row: fewer where a run takes longest and no claim rests on it."""
    if task == RLHF:
        return SEEDS[:1] if row in (GROUPED, GRPO) else ()
    if task == REAL:
        return SEEDS[: {SMALLEST: 0, LARGE: 2, TRL_GRPO: 2, TRL: 1}.get(row)]
    if row in (GROUPED, TRL, TRL_GRPO):
        return ()
    return SEEDS[:1] if row == LARGE else SEEDS


def scores(runs: Sequence[Run], row: str, task: str) -> list[float]:
    """Returns the scores of the seeds at the end."""
    return [run["after"] for run in runs_of(runs, row, task)]


def times(runs: Sequence[Run], row: str, task: str) -> dict[int, float]:
    """Returns by seed how many times GRPO's processor time a run took. GRPO's run with this seed went at the same time;
    where it did not, the run's `grpo_seconds` are what GRPO took then.
    """
    seconds = {run["seed"]: run["processor_seconds"] for run in runs_of(runs, GRPO, task)}
    found = [run for run in runs_of(runs, row, task) if run["seed"] in seconds]
    return {run["seed"]: run["processor_seconds"] / run.get("grpo_seconds", seconds[run["seed"]]) for run in found}


def scores_after(runs: Sequence[Run], row: str, task: str, shares: Mapping[int, float]) -> list[float]:
    """Returns by seed the scores of those in `shares` after so much of each run, the last ones after more than 1."""
    found = sorted((run for run in runs_of(runs, row, task) if run["seed"] in shares), key=lambda run: run["seed"])
    return [score_at(run["curve"], shares[run["seed"]] * run["processor_seconds"]) for run in found]


def score_at_kl(run: Run, nats: float) -> float | None:
    """Returns the score of `run` when its KL first was so large, between two evaluations by a straight line; None if it
    never was, or already before the first evaluation after the start, or if the KL was not recorded.
    """
    for before, after in pairwise(run["curve"][1:]):
        if len(after) == 4 and before[3] <= nats <= after[3]:
            return float(np.interp(nats, [before[3], after[3]], [before[2], after[2]]))
    return None


def from_one_start(runs: Sequence[Run], row: str, other: str, task: str) -> list[int]:
    """Returns the seeds whose runs of both rows began with the same score: on one machine, with the same models."""
    starts = [{run["seed"]: run["before"] for run in runs_of(runs, name, task)} for name in (row, other)]
    return sorted(seed for seed, before in starts[0].items() if starts[1].get(seed) == before)


def _cell(numbers: Sequence[float], digits: int = 2) -> str:
    if not numbers:
        return ""
    error = f" ± {stdev(numbers) / len(numbers) ** 0.5:.{digits}f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.{digits}f}{error}"


def lead(ours: Sequence[float], theirs: Sequence[float], digits: int) -> str:
    """Returns the mean difference of runs with the same seeds, with its standard error."""
    gaps = [own - other for own, other in zip(ours, theirs, strict=True)]
    return f"+{_cell(gaps, digits)}" if gaps and fmean(gaps) >= 0 else _cell(gaps, digits)


def table(runs: Sequence[Run], task: str) -> str:
    """Returns the table of a task: a line for each row that has runs, and the columns that have numbers."""
    rows = [row for row in ROWS if runs_of(runs, row, task)]
    digits = TASKS[task].digits

    def lead_over_grpo(row: str) -> str:
        took = times(runs, row, task)
        took = {seed: took[seed] for seed in from_one_start(runs, row, GRPO, task)}
        at_its_end = scores_after(runs, row, task, {seed: 1 / time for seed, time in took.items()})
        return "" if row == GRPO else lead(at_its_end, scores_after(runs, GRPO, task, took), digits)

    def lead_over_separate(row: str) -> str:
        own, other = ({run["seed"]: run["after"] for run in runs_of(runs, name, task)} for name in (row, SEPARATE))
        both = from_one_start(runs, row, SEPARATE, task)
        return "" if row == SEPARATE else lead([own[seed] for seed in both], [other[seed] for seed in both], digits)

    def explained(row: str) -> str:
        return _cell(
            [share for run in runs_of(runs, row, task) if (share := run.get("explained_variance")) is not None]
        )

    def at_kl(nats: float, row: str) -> str:
        found = [score_at_kl(run, nats) for run in runs_of(runs, row, task)]
        return "" if None in found else _cell([score for score in found if score is not None], digits)

    columns: dict[str, Callable[[str], str]] = {
        "after as many answers": lambda row: _cell(scores(runs, row, task), digits),
        "ahead of GRPO after as much time": lead_over_grpo,
        f"ahead of {SEPARATE}": lead_over_separate,
        "explained variance": explained,
        "time, GRPO = 1": lambda row: "1" if row == GRPO else _cell([*times(runs, row, task).values()]),
        **{f"at a KL of {nats}": partial(at_kl, nats) for nats in LEVELS},
        "runs": lambda row: str(len(runs_of(runs, row, task))),
    }
    found = {title: [of(row) for row in rows] for title, of in columns.items()}
    found = {title: cells for title, cells in found.items() if any(cells)}
    lines = [f"| {' | '.join(cells)} |" for cells in zip(rows, *found.values(), strict=True)]
    return "\n".join([f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|", *lines]) + "\n"


def page(runs: Sequence[Run]) -> str:
    """Returns the tables of all tasks."""
    about = (
        f"Means and standard errors over runs with the seeds from {SEEDS[0]} on, on data of seed {DATA_SEED}, on "
        f"{machine()}.\n\n"
        "- `cached` has the default size (width 256, depth 3), `cached, small` width 64 and depth 2, `cached, "
        "smallest` depth 1. All take 8 passes.\n"
        "- All runs of a task have equally many answers. GRPO has eight to a prompt, and so has every row on the real "
        "model but `cached` and TRL's PPO, which have one.\n"
        "- Everything else is the default, on the real model with `ppo_epochs: 1` and a constant rate. GRPO has its "
        "paper's settings, and TRL its own defaults with the same sizes and rate.\n"
        "- Time is processor time. Runs whose times are compared went at once, or within an hour on the same machine, "
        "because speeds change from hour to hour. A lead after as much time is that at the end of the faster run.\n"
        "- A lead is the mean difference of runs with the same seeds, as far as both rows have them and began with the "
        "same score, which they do on one machine; and its standard error is that of these differences. That over "
        f"{SEPARATE} is after as many answers.\n"
        "- Explained variance is that of new answers' returns, on average over the second half of the steps.\n"
        "- A score at some KL to the start, in nats, is read off each run's curve between evaluations, where every run "
        "has it.\n"
    )
    parts = [f"# Critics compared\n\nWritten by `python -m examples.critics.compare`. {about}"]
    for name, task in TASKS.items():
        if of_task := [run for run in runs if run["task"] == name]:
            before = f"{task.unit}; before training {fmean(run['before'] for run in of_task):.2f}"
            parts.append(f"## {task.title}\n\n{before[0].upper()}{before[1:]}.\n\n{table(runs, name)}")
    return "\n".join(parts)


def summary(runs: Sequence[Run]) -> str:
    """Returns the table of the README: the real model alone."""
    responses = TASKS[REAL].sizes["total_episodes"]
    head = f"reward of 100 after {responses} answers | at a KL of {AT_KL} nats | processor time, GRPO = 1 | runs"
    lines = [f"| SmolLM2-135M | {head} |", "|---" * 5 + "|"]
    before = [run["before"] for run in runs if run["task"] == REAL]
    lines.append(f"| before training | {fmean(before):.0f} | | | |")
    names = {GROUPED: "PPO, cached critic", TRL: f"{TRL}, PPO"}
    for row in (GROUPED, GRPO, TRL_GRPO, TRL):
        if of_row := runs_of(runs, row, REAL):
            at_kl = [score for run in of_row if (score := score_at_kl(run, AT_KL)) is not None]
            time = fmean(times(runs, row, REAL).values())
            cells = _cell(scores(runs, row, REAL), 1), _cell(at_kl, 1), f"{time:.1f}", str(len(of_row))
            lines.append(f"| {names.get(row, row)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes the mean curves of all tasks by processor time."""
    tasks = [task for task in TASKS if any(run["task"] == task for run in runs)]
    figure = Figure(figsize=(15, 6.8), layout="constrained")
    lines = {}
    panels = list(figure.subplots(2, -(-len(TASKS) // 2)).flat)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    for axes, task in zip(panels, tasks, strict=False):
        shown, ends = ROWS if task in REAL_TASKS else (SEPARATE, GRPO), [1.0]
        for number, row in enumerate(ROWS):
            if took := times(runs, row, task):
                shares, end = np.linspace(0, 1, 21), fmean(took.values())
                means = [fmean(scores_after(runs, row, task, dict.fromkeys(took, share))) for share in shares]
                (lines[row],) = axes.plot(shares * end, means, color=f"C{number}")
                ends += [end] * (row in shown)
        axes.set(title=textwrap.fill(TASKS[task].title, 38), xlabel="processor time, GRPO = 1", ylabel=TASKS[task].unit)
        axes.set_xlim(0, 1.05 * max(ends))
        axes.grid(alpha=0.3)
    figure.legend(
        [lines[row] for row in ROWS if row in lines],
        [row for row in ROWS if row in lines],
        ncols=4,
        loc="outside upper center",
    )
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the missing runs, seed by seed, and writes the page and the picture."""
    (arguments,) = parse_args([CriticArguments], argv)
    root, record, report = Path(arguments.root).resolve(), Path(arguments.record), Path(arguments.report)
    prepare(arguments.tasks, root)
    for seed, task in product(SEEDS, arguments.tasks):
        rows = [row for row in ROWS if seed in seeds_of(row, task)]
        asked = [{"row": row, "task": task, "seed": seed} for row in rows]
        runs = fill(record, asked, partial(make, root=root, asked_of=asked_of), jobs=arguments.jobs)
    write_text_atomically(report, page(runs) + notes_of(report))
    plot(runs, report.with_name("critics.png"))


if __name__ == "__main__":
    main()
