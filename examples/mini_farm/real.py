"""`make real-rlhf`: the laboratory with a model that people use. SmolLM2-135M-Instruct answers the laboratory's
instructions; its simulated annotators compare pairs of the answers; a reward model of these pairs trains it by PPO.

Every option of the trainer is a flag. Ended stages are kept, and an interrupted training continues at its checkpoint.
"""

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.data.loading import load_prompt_dataset
from alpaca_ppo.rewards import build_reward
from alpaca_ppo.supervised.reward_model import train_reward_model
from examples.long_horizon.pipeline import flags_of
from examples.mini_farm import annotators
from examples.mini_farm.annotators import gold_score, prefers_first
from examples.mini_farm.splits import Row, draw_splits, read_rows, write_rows
from examples.mini_farm.stages import run_stage
from examples.sentences.model import fetch_model
from examples.sentences.plots import Panel, plot_panels
from examples.sentences.run import BEST_OF, RESULTS, SHOWN, continues, run_as_command, several_answers

CONFIG = Path(__file__).parents[1] / "configs/real_rlhf.yaml"
_SAMPLING = ("query_len", "response_len", "temperature")
_SOURCES = ("annotators", "grammar", "lexicon", "real", "splits")
_REWARD_MODEL = {
    "learning_rate": 2e-5,
    "warmup_steps": 4,
    "per_device_train_batch_size": 8,
    "train_sampling_strategy": "group_by_length",
    "num_train_epochs": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
}
_ASKED = 4
"""Words of an instruction of one's own that annotators look for."""


@dataclass(frozen=True)
class RealArguments:
    """What is trained, and on how much."""

    model: str | None = argument(
        None, "Folder or hub id of a chat model; without one, SmolLM2-135M-Instruct is fetched."
    )
    instructions: str | None = argument(
        None, "File or hub id of rows with instruction and input; without one, the laboratory's are used."
    )
    pairs: int = argument(480, "Pairs of answers for the reward model.")
    held_out: int = argument(100, "Instructions that are held out.")
    data_seed: int = argument(0, "Of instructions, pairs and reward model.")


def in_messages(row: Row) -> Row:
    """The instruction as a user's message, beside what the annotators look for."""
    text = f"{row['instruction']} {row['input']}".strip()
    columns = {"instruction": text, "asks": row["asks"], "avoids": row["avoids"]}
    return {"prompt": [{"role": "user", "content": text}], **columns}


class RealLab:
    """The stages before PPO, in folders beside the run, of rows with a prompt that `with_prompt` gives them."""

    def __init__(self, run: RealArguments, args: PPOConfig, with_prompt: Callable[[Row], Row] = in_messages) -> None:
        self.args, self.seed, self.root = args, run.data_seed, Path(args.output_dir).parent
        self.model = run.model or str(self.root / "SmolLM2-135M-Instruct")
        if run.model is None:
            fetch_model(Path(self.model))
        prompts = (args.max_steps or 0) * args.rollout_batch_size
        sizes = {"sft": 0, "preference": run.pairs, "unlabeled": prompts, "val": run.held_out}
        rows = _split(run.instructions, run.data_seed, sizes) if run.instructions else draw_splits(run.data_seed, sizes)
        self.rows = {split: [with_prompt(row) for row in of_split] for split, of_split in rows.items()}
        settings = {**asdict(run), "model": self.model, **{name: getattr(args, name) for name in _SAMPLING}}
        pairs = run_stage(
            self.root / "pairs",
            "pairs of answers",
            self._write_pairs,
            settings=settings,
            sources=[
                *(Path(__file__).with_name(f"{name}.py") for name in _SOURCES),
                *([Path(run.instructions)] if run.instructions and Path(run.instructions).is_file() else []),
            ],
        )
        self.reward_model = run_stage(
            self.root / "reward_model",
            "reward model",
            lambda folder: self._train_reward_model(folder, pairs / "pairs.jsonl"),
            settings=_REWARD_MODEL,
            parents=[pairs],
        )

    def trainer(self, output_dir: str | None = None, **given: Any) -> PPOTrainer:
        """PPO on the instructions for it, with the annotators' score watched."""
        settings: dict[str, Any] = {"reward_weights": [1.0, 0.0]} if len(given["reward_funcs"]) > 1 else {}
        return PPOTrainer(
            model=self.model,
            args=replace(self.args, output_dir=output_dir or self.args.output_dir, **settings),
            train_dataset=Dataset.from_list(self.rows["unlabeled"]),
            eval_dataset=Dataset.from_list(self.rows["val"]),
            **given,
        )

    def _write_pairs(self, folder: Path) -> None:
        rng, rows, pairs = random.Random(self.seed), self.rows["preference"], []
        with TemporaryDirectory() as unused:
            trainer = self.trainer(unused, reward_funcs=[gold])
            for start in range(0, len(rows), 32):
                part = rows[start : start + 32]
                answers = trainer.generate([row["prompt"] for row in part], num_return_sequences=2, seed=start)
                for row, (first, second) in zip(part, answers, strict=True):
                    chosen, rejected = (first, second) if prefers_first(first, second, row, rng) else (second, first)
                    pairs.append({**row, "chosen": chosen, "rejected": rejected})
                print(f"{len(pairs)} pairs", flush=True)
        write_rows(folder / "pairs.jsonl", [pair for pair in pairs if pair["chosen"] != pair["rejected"]])

    def _train_reward_model(self, folder: Path, pairs: Path) -> None:
        options = {
            "model_name_or_path": self.model,
            "dataset_name": pairs,
            "output_dir": folder,
            "max_length": self.args.query_len + self.args.response_len,
            "seed": self.seed,
            **_REWARD_MODEL,
        }
        train_reward_model(flags_of(options))


def _split(source: str, seed: int, sizes: Mapping[str, int]) -> dict[str, list[Row]]:
    """The rows of `source` by split, without copies: those held out are in no other; the others, mixed, serve both
    splits, repeatedly if they are too few. Annotators look for the longest words of an instruction and its input.

    Raises:
        ValueError: if no more rows are there than are held out.
    """
    rows = [{name: row.get(name) or "" for name in ("instruction", "input")} for row in load_prompt_dataset(source)]
    rows = [dict(items) for items in dict.fromkeys(tuple(row.items()) for row in rows) if dict(items)["instruction"]]
    if len(rows) <= sizes["val"]:
        raise ValueError(f"instructions {source!r} have {len(rows)} rows; set held_out, now {sizes['val']}, below that")
    random.Random(seed).shuffle(rows)
    for row in rows:
        words = dict.fromkeys(re.findall(r"[a-z]{5,}", f"{row['instruction']} {row['input']}".lower()))
        row |= {"asks": sorted(words, key=len, reverse=True)[:_ASKED] or ["answer"], "avoids": []}
    held_out, others = rows[: sizes["val"]], rows[sizes["val"] :]
    return {"val": held_out, **{name: list(islice(cycle(others), sizes[name])) for name in ("preference", "unlabeled")}}


def gold(
    completions: Sequence[Any], asks: Sequence[Sequence[str]], avoids: Sequence[Sequence[str]], **columns: Any
) -> list[float]:
    """The annotators' score of messages, as a reward function of weight 0."""
    return annotators.gold([turns[-1]["content"] for turns in completions], asks, avoids)


@dataclass(frozen=True)
class Judged:
    """Answers to the held-out instructions: the reward model's scores, the annotators', and the KL in nats."""

    scores: Sequence[float]
    gold: Sequence[float]
    kl: float | None = None

    def line(self, title: str) -> str:
        """This line of the table."""
        cells = [f"{fmean(n):8.3f} ±{stdev(n) / len(n) ** 0.5:.3f}" for n in (self.scores, self.gold)]
        kl = "" if self.kl is None else f"{self.kl:.2f}"
        return f"{title:24} {'  '.join(cells)} {kl:>8}"


def best_of(trainer: PPOTrainer, lab: RealLab) -> Judged:
    """Of several answers of the present policy to each instruction, that which the reward model likes best."""
    scorer, rows = build_reward(str(lab.reward_model), batch_size=32), lab.rows["val"]
    scores, liked = [], []
    for row, given in zip(rows, several_answers(trainer, rows), strict=True):
        of_row = scorer([row["prompt"]] * BEST_OF, given, [[] for _ in given], [row] * BEST_OF).rewards
        best = int(of_row.argmax())
        scores.append(float(of_row[best]))
        liked.append(gold_score(given[best], row))
    return Judged(scores, liked)


def report(results: Mapping[str, Judged], before: Sequence[Row], after: Sequence[Row]) -> str:
    """The table, and the first answers before and after the training."""
    lines = [f"{'':24} {'reward model':>15} {'annotators':>16} {'KL':>8}"]
    lines += [judged.line(title) for title, judged in results.items()]
    lines += [
        "",
        f"{len(before)} instructions that no model has learned from, ± standard error; KL in nats per answer;",
        f"answers are the likeliest ones, but the best of {BEST_OF}, which are sampled",
        "",
    ]
    for old, new in list(zip(before, after, strict=True))[:SHOWN]:
        question = old["columns"]["instruction"]
        lines += [question, f"  before: {_short(old['response'])}", f"  after:  {_short(new['response'])}"]
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    return " ".join(re.sub(r"<\|.*?\|>", " ", text).split())


def _judged(table: Sequence[Row]) -> Judged:
    scores, liked = ([row[name] for row in table] for name in ("score", "scores/gold"))
    return Judged(scores, liked, fmean(row["kl"] for row in table))


def main(argv: Sequence[str]) -> dict[str, Judged]:
    """Trains as the command line says, writes results.txt and results.png, and returns the lines of the table."""
    run, args = parse_args([RealArguments, PPOConfig], ["--config", str(CONFIG), *argv])
    start, folder = time.perf_counter(), Path(args.output_dir)
    resumes = continues(args)
    lab = RealLab(run, args)
    trainer = lab.trainer(reward_funcs=[str(lab.reward_model), gold])
    best = best_of(trainer, lab)
    trainer.train(resume_from_checkpoint=resumes)
    tables = [read_rows(folder / f"eval/step_{step:06}.jsonl") for step in (0, trainer.state.global_step)]
    before, after = map(_judged, tables)
    results = {"before": before, f"before, best of {BEST_OF}": best, "after": after}
    text = report(results, *tables)
    marks = fmean(best.scores), fmean(best.gold)
    panels = [
        Panel("Reward model", "score of an answer", "objective/scores", "eval/scores", marks[0]),
        Panel("Annotators", "gold score", "objective/scores/gold", "eval/scores/gold", marks[1]),
        Panel("Distance from the start", "KL, nats per answer", "objective/kl_sum_seq", "eval/kl_sum_seq"),
    ]
    plot_panels(read_rows(folder / "metrics.jsonl"), panels, folder / "results.png")
    write_text_atomically(folder / RESULTS, text)
    print(f"\n{text}\nFigure: {folder / 'results.png'}\nReport: {folder / 'report.html'} (open it in a browser)")
    print(f"Total time: {(time.perf_counter() - start) / 60:.1f} minutes")
    return results


if __name__ == "__main__":
    run_as_command(main)
