"""`make real`: fetches the model, trains it with examples/configs/sentences.yaml, and shows what it has learned.

Every option of the trainer is a flag. An interrupted training continues at its last checkpoint.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from datasets import Dataset

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.checkpoint.directory import check_no_earlier_run, newest_checkpoint
from alpaca_ppo.cli.commands import exit_status
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from examples.mini_farm.splits import read_rows
from examples.sentences.model import fetch_model
from examples.sentences.plots import Panel, plot_panels
from examples.sentences.task import HELD_OUT, TRAINING, all_used, draw_prompts, share_used

CONFIG = Path(__file__).parents[1] / "configs/sentences.yaml"
BEST_OF = 8
SHOWN = 10
RESULTS = "results.txt"


@dataclass(frozen=True)
class SentencesArguments:
    """What is trained, and judged on what."""

    model: str | None = argument(
        None, "Folder or hub id of a chat model; without one, SmolLM2-135M-Instruct is fetched."
    )
    held_out: int = argument(200, "Prompts that are held out.")
    prompts_seed: int = argument(0, "Of the prompts.")


@dataclass(frozen=True)
class Result:
    """One line of the table: a score for each held-out prompt, and the KL to the start in nats per answer."""

    scores: Sequence[float]
    all_used: Sequence[float]
    kl: float | None = None

    def line(self, title: str) -> str:
        """This line of the table."""
        error = stdev(self.scores) / len(self.scores) ** 0.5
        kl = "" if self.kl is None else f"{self.kl:.2f}"
        return f"{title:24} {fmean(self.scores):8.3f} ±{error:.3f} {100 * fmean(self.all_used):13.1f} % {kl:>8}"


def continues(args: PPOConfig) -> bool:
    """Whether the run of `args` was interrupted after a checkpoint, at which it goes on. Deletes the table of one that
    is overwritten.

    Raises:
        ValueError: if it has ended, or was interrupted before a checkpoint, or steps are not what sets its length.
    """
    folder = Path(args.output_dir)
    if args.max_steps is None:
        raise ValueError("the length of the run is set by max_steps alone; leave out total_episodes and total_epochs")
    if args.overwrite_output_dir:
        (folder / RESULTS).unlink(missing_ok=True)
        return False
    if (folder / RESULTS).exists():
        remedy = 'append REAL="--overwrite_output_dir true", or REAL="--output_dir" with another folder'
        raise ValueError(f"output_dir {str(folder)!r} holds a run that has ended; {remedy}")
    if newest_checkpoint(folder) is None:
        check_no_earlier_run(folder)
        return False
    return True


def main(argv: Sequence[str]) -> dict[str, Result]:
    """Trains as the command line says, writes results.txt and results.png, and returns the lines of the table."""
    run, args = parse_args([SentencesArguments, PPOConfig], ["--config", str(CONFIG), *argv])
    start, folder = time.perf_counter(), Path(args.output_dir)
    resumes = continues(args)
    model = run.model or str(folder.parent / "SmolLM2-135M-Instruct")
    if run.model is None:
        fetch_model(Path(model))
    prompts = draw_prompts((args.max_steps or 0) * args.rollout_batch_size, split=TRAINING, seed=run.prompts_seed)
    held_out = draw_prompts(run.held_out, split=HELD_OUT, seed=run.prompts_seed)
    trainer = PPOTrainer(
        model=model,
        args=args,
        reward_funcs=share_used,
        metric_funcs=all_used,
        train_dataset=Dataset.from_list(prompts),
        eval_dataset=Dataset.from_list(held_out),
    )
    best = best_of(trainer, held_out)
    trainer.train(resume_from_checkpoint=resumes)
    tables = [read_rows(folder / f"eval/step_{step:06}.jsonl") for step in (0, trainer.state.global_step)]
    results = {"before": _result(tables[0]), f"before, best of {BEST_OF}": best, "after": _result(tables[1])}
    metrics = read_rows(folder / "metrics.jsonl")
    reward = Panel(
        "Reward: share of the words", "reward of an answer", "objective/scores", "eval/scores", fmean(best.scores)
    )
    kl = Panel("Distance from the start", "KL, nats per answer", "objective/kl_sum_seq", "eval/kl_sum_seq")
    explained = "ppo/val/explained_variance"
    critic = Panel("Critic: explained variance of the returns", "share (1 = perfect)", explained)
    plot_panels(metrics, [reward, kl, critic], folder / "results.png")
    text = report(results, *tables)
    write_text_atomically(folder / RESULTS, text)
    print(f"\n{text}\nFigure: {folder / 'results.png'}\nReport: {folder / 'report.html'} (open it in a browser)")
    print(f"Total time: {(time.perf_counter() - start) / 60:.1f} minutes")
    return results


def best_of(trainer: PPOTrainer, rows: Sequence[Mapping[str, Any]]) -> Result:
    """The best of several answers of the present policy to each prompt."""
    prompts, answers = [row["prompt"] for row in rows], several_answers(trainer, rows)
    scores = [share_used([prompt] * len(given), given) for prompt, given in zip(prompts, answers, strict=True)]
    best = [max(given) for given in scores]
    return Result(best, [float(score == 1) for score in best])


def several_answers(trainer: PPOTrainer, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`BEST_OF` answers of the present policy to the prompt of each row."""
    print(f"best of {BEST_OF} answers before training, as a mark: {BEST_OF * len(rows)} answers", flush=True)
    answers: list[list[str]] = []
    for start in range(0, len(rows), 25):
        prompts = [row["prompt"] for row in rows[start : start + 25]]
        answers += trainer.generate(prompts, num_return_sequences=BEST_OF, seed=start)
        print(f"  {BEST_OF * len(answers)} answers", flush=True)
    return answers


def report(results: Mapping[str, Result], before: Sequence[Any], after: Sequence[Any]) -> str:
    """The table, and the first answers before and after the training."""
    titles = f"{'':24} {'reward':>15} {'all words':>15} {'KL':>8}"
    lines = [titles, *(result.line(title) for title, result in results.items())]
    lines += [
        "",
        f"{len(before)} prompts of topics that the training has not, ± standard error; KL in nats per answer",
        "",
    ]
    for old, new in list(zip(before, after, strict=True))[:SHOWN]:
        lines += [", ".join(old["columns"]["words"]), f"  before: {_short(old)}", f"  after:  {_short(new)}"]
    return "\n".join(lines) + "\n"


def _short(row: Mapping[str, Any]) -> str:
    return " ".join(row["response"].removesuffix("<|im_end|>").split())


def _result(table: Sequence[Mapping[str, Any]]) -> Result:
    columns = {name: [float(row[name]) for row in table] for name in ("score", "all_used", "kl")}
    return Result(columns["score"], columns["all_used"], fmean(columns["kl"]))


def run_as_command(main: Callable[[Sequence[str]], Any]) -> None:
    """Calls `main` with the command line and exits; a mistake in it is one line on the screen."""

    def command(argv: Sequence[str]) -> int:
        main(argv)
        return 0

    sys.exit(exit_status(command, sys.argv[1:]))


if __name__ == "__main__":
    run_as_command(main)
