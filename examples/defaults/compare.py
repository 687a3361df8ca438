"""The comparison of defaults: `python -m examples.defaults.compare` makes what is missing, and writes RESULTS.md.

A run is evaluated five times, so that programs can be compared after as much processor time too: between evaluations, a
score is on a straight line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from examples import trl_virtualenv
from examples.defaults.plots import plot_task
from examples.defaults.records import Run, fill, outcome, runs_of
from examples.defaults.rows import Settings, grpo
from examples.defaults.tasks import RATE_TIMES_WIDTH, SMALL_TASKS, TASKS
from examples.mini_farm.compare import difference, standard_error
from examples.mini_farm.report import machine, notes_of

RECORD, PAGE = Path(__file__).with_name("results.jsonl"), Path(__file__).with_name("RESULTS.md")
DATA_SEED, SEEDS = 0, (2, 3, 4, 5, 6)
EVALUATIONS, REAL_EVALUATIONS = 5, 4
"""Of a run; fewer with the real model, whose runs take longest."""
OURS, GRPO, TRL = "these defaults", "GRPO", f"TRL {trl_virtualenv.VERSION}"
TRL_GRPO = f"TRL {trl_virtualenv.GRPO_VERSION}, GRPO"
TRL_PROGRAMS = {TRL: "ppo", TRL_GRPO: "grpo"}
ROWS = (OURS, GRPO, TRL)
LORA = "these defaults, LoRA"
"""For a recipe's picture alone, on mini_farm: the critic is a second adapter, and the rate five times the rule's."""
INTRODUCTION = f"""\
Nothing is set but sizes, and the learning rate by one rule for all: {RATE_TIMES_WIDTH} divided by the model's width.

GRPO has the settings of its paper: one optimizer step on each rollout, where PPO takes four, and a KL of weight 0.04 in
the loss. The paper names no schedule, so its rate is constant; those of {OURS} and of TRL fall linearly. It gets 8
responses a prompt instead of 64, or a rollout would have two prompts at most. TRL's PPO has no environments. Its curves
start from the same policies, and are measured by this package; its processor seconds leave out loading.

Seed 1 is in no table: it had been seen on every task, with a constant rate in place of the linear schedule, when that
became the default. results.jsonl has its runs."""
SAME_TIME = (
    "Scores at the time when the fastest program of the task and seed has ended. The others are then in the middle of "
    "their runs, so their learning rates have not fallen yet."
)
LEADS = f"By how much {OURS} are ahead, with the standard error of the difference"
Scores = Mapping[str, Mapping[str, Sequence[float]]]
"""By task and row, one number for each seed."""
Pairs = Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]
"""By other row and task, the numbers of `OURS` and those of that row."""


@dataclass(frozen=True)
class CompareArguments:
    """Which part to make, where the models lie, and how many runs go at once."""

    root: str = argument("outputs/defaults", "Folder for models and data.")
    jobs: int = argument(2, "Runs at once, each with one thread.")
    tasks: list[str] = field(default_factory=lambda: list(SMALL_TASKS), metadata={"help": "Tasks to make runs of."})
    record: str = argument(str(RECORD), "File of the runs that have ended.")
    report: str = argument(str(PAGE), "File to write.")


def settings_of(row: str, task: str) -> Settings:
    """Returns the options of `row` for `task`, without those of every row."""
    if row == GRPO:
        return grpo(task)
    if row == LORA:
        return {
            "use_peft": True,
            "critic_layout": "adapter",
            "learning_rate": 5 * TASKS[task].options({})["learning_rate"],
        }
    return {}


def belongs(row: str, task: str) -> bool:
    """Whether `task` is run with `row`. TRL's PPO has no environments."""
    return not TASKS[task].plays if row == TRL else row != LORA or task == "mini_farm"


def prepare(tasks: Sequence[str], root: Path) -> None:
    """Makes the models and data of `tasks`, unless they are there."""
    for task in tasks:
        TASKS[task].prepare(root / task / f"data_{DATA_SEED}", DATA_SEED)


def eval_steps(task: str, evaluations: int) -> int:
    """Returns the steps between so many evaluations of a run on `task`."""
    sizes = TASKS[task].sizes
    return int(-(-sizes["total_episodes"] // sizes["rollout_batch_size"] // evaluations))


def asked_of(run: Run) -> Run:
    """Returns the arguments of `examples.defaults.run` for `run`."""
    settings = {"eval_steps": eval_steps(run["task"], EVALUATIONS), **settings_of(run["row"], run["task"])}
    return {"task": run["task"], "settings": settings, "data_seed": DATA_SEED, "seed": run["seed"]}


def make(run: Run, root: Path, asked_of: Callable[[Run], Run] = asked_of) -> Run:
    """Returns what came of `run`; with TRL, of its task and seed."""
    if run["row"] not in TRL_PROGRAMS:
        return outcome("examples.defaults.run", root, asked_of(run))
    asked = {"task": run["task"], "seed": run["seed"], "data_seed": DATA_SEED, "program": TRL_PROGRAMS[run["row"]]}
    return outcome("examples.defaults.trl_run", root, asked)


def score_at(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """Returns the score at a processor time, between two points (responses, seconds, score, ...) by a straight line."""
    for (_, start, before, *_), (_, end, after, *_) in pairwise(curve):
        if seconds <= end:
            return before + (after - before) * (seconds - start) / (end - start)
    return curve[-1][2]


def scores(runs: Sequence[Run], *, same_time: bool, rows: Sequence[str] = ROWS) -> Scores:
    """Returns the scores of `rows` at equal samples or, with `same_time`, when the fastest of them has ended."""
    found: dict[str, dict[str, list[float]]] = {task: {} for task in SMALL_TASKS}
    ends: dict[tuple[str, int], float] = {}
    compared = [run for run in runs if run["row"] in rows]
    for run in compared:
        key = run["task"], run["seed"]
        ends[key] = min(ends.get(key, math.inf), run["processor_seconds"])
    for run in compared:
        score = score_at(run["curve"], ends[run["task"], run["seed"]]) if same_time else run["after"]
        found[run["task"]].setdefault(run["row"], []).append(score)
    return found


def table(found: Scores, runs: Sequence[Run]) -> str:
    """Returns a row for each task: the score before, and of each program the mean with its standard error."""
    lines = [f"| | before training | {' | '.join(ROWS)} |", "|---" * (len(ROWS) + 2) + "|"]
    for task, rows in found.items():
        before = [run["before"] for run in runs if run["task"] == task]
        cells = [f"{fmean(before):.2f}" if before else "", *(_cell(rows.get(row, ())) for row in ROWS)]
        lines.append(f"| {TASKS[task].title}: {TASKS[task].unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(numbers: Sequence[float]) -> str:
    return f"{fmean(numbers):.2f} ± {stdev(numbers) / len(numbers) ** 0.5:.2f}" if len(numbers) > 1 else ""


def pairs(runs: Sequence[Run], *, same_time: bool) -> Pairs:
    """Returns the scores of `OURS` and of each other program, with `same_time` when the faster of the two has ended."""
    found: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]] = {}
    for row in ROWS[1:]:
        both = scores(runs, same_time=same_time, rows=(OURS, row))
        found[row] = {
            task: (of[OURS], of[row]) for task, of in both.items() if min(len(of.get(r, ())) for r in (OURS, row)) > 1
        }
    return found


def leads(found: Pairs) -> str:
    """Returns by how much `OURS` is ahead of each other program, with the standard error of the difference."""
    lines = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for task in SMALL_TASKS:
        cells = [difference(*of[task]) if task in of else "" for of in found.values()]
        lines.append(f"| {TASKS[task].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(found: Pairs) -> str:
    """Returns on how many tasks `OURS` is ahead of each other program by more than two standard errors of the
    difference, and on which it is behind by more than one.
    """
    lines = []
    for row, of in found.items():
        errors = {task: (fmean(ours) - fmean(other), standard_error(ours, other)) for task, (ours, other) in of.items()}
        ahead = sum(lead > 2 * error for lead, error in errors.values())
        behind = [TASKS[task].title for task, (lead, error) in errors.items() if lead < -error]
        lines.append(
            f"- Ahead of {row} by more than two standard errors on {ahead} of {len(errors)} tasks, behind by more than "
            f"one on {'; '.join(behind) or 'none'}."
        )
    return "\n".join(lines)


def spent(runs: Sequence[Run]) -> str:
    """Returns the table of processor seconds, KL and the worst seed of each task and program."""
    lines = ["| | program | processor seconds | KL (nats per response) | worst seed |", "|---" * 5 + "|"]
    for task in SMALL_TASKS:
        for row in (*ROWS, LORA):
            if made := runs_of(runs, row, task):
                seconds, kl = (fmean(run[name] for run in made) for name in ("processor_seconds", "kl"))
                worst = min(run["after"] for run in made)
                lines.append(f"| {TASKS[task].title} | {row} | {seconds:.0f} | {kl:.1f} | {worst:.2f} |")
    return "\n".join(lines)


def page(runs: Sequence[Run]) -> str:
    """Returns the tables of all runs."""
    tables = {same_time: table(scores(runs, same_time=same_time), runs) for same_time in (False, True)}
    samples, time = pairs(runs, same_time=False), pairs(runs, same_time=True)
    return (
        "# Defaults compared\n\n"
        f"Written by `python -m examples.defaults.compare`: seeds {', '.join(map(str, SEEDS))} on data of seed "
        f"{DATA_SEED}, means and their standard errors, on {machine()}. {INTRODUCTION}\n"
        f"\n## At equal samples\n\n{tables[False]}\n\n{LEADS}:\n\n{leads(samples)}\n\n{verdict(samples)}\n"
        f"\n## At equal processor time\n\n{SAME_TIME}\n\n{tables[True]}\n\n"
        f"{LEADS}, when the faster of the two has ended:\n\n{leads(time)}\n\n{verdict(time)}\n"
        f"\n## What the runs took\n\n{spent(runs)}\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the missing runs, seed by seed, and writes the page."""
    (arguments,) = parse_args([CompareArguments], argv)
    root, record = Path(arguments.root).resolve(), Path(arguments.record)
    prepare(arguments.tasks, root)
    asked = [
        {"row": row, "task": task, "seed": seed}
        for seed in SEEDS
        for task in arguments.tasks
        for row in (*ROWS, LORA)
        if belongs(row, task)
    ]
    recorded = fill(record, asked, partial(make, root=root), jobs=arguments.jobs)
    runs = [run for run in recorded if run["seed"] in SEEDS]
    report = Path(arguments.report)
    write_text_atomically(report, page(runs) + notes_of(report))
    for task in arguments.tasks:
        plot_task(runs, task, ROWS, report.with_name(f"{task}.png"))
    if "mini_farm" in arguments.tasks:
        plot_task(runs, "mini_farm", (OURS, LORA), report.with_name("lora.png"))


if __name__ == "__main__":
    main()
