"""One run as a process of its own: a student learns from its own answers, or from more of the teacher's.

`python -m examples.distillation.run ROOT '{"case": "SmolLM2 from its trained self", "row": "on policy", "seed": 2}'`:
the last line on the screen is what came of it, as JSON. `examples.distillation.compare` makes all of them.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alpaca_ppo.cli.commands import main as alpaca_ppo
from examples.defaults.run import MEASURING
from examples.distillation import stages
from examples.distillation.stages import QUERY_LEN, RESPONSE_LEN
from examples.long_horizon.pipeline import flags_of
from examples.mini_farm.splits import read_rows
from examples.mini_farm.stages import run_stage
from examples.sentences import task
from examples.sentences.model import fetch_model

ON_POLICY, SUPERVISED, BEFORE = "on policy", "supervised", "before"
FROM_TRAINED, FROM_WHOLE = "SmolLM2 from its trained self", "every third layer from all of them"
LAYERS = [*range(0, 27, 3), 29]
"""Those of the student that is cut out of SmolLM2, which first learns from the teacher's answers."""
RATES: Mapping[str, Mapping[str, float]] = {
    FROM_TRAINED: {ON_POLICY: 1e-5, SUPERVISED: 1e-5},
    FROM_WHOLE: {BEFORE: 5e-4, ON_POLICY: 5e-5, SUPERVISED: 2e-4},
}
PROMPTS: Mapping[str, int] = {BEFORE: 480, ON_POLICY: 128, SUPERVISED: 176, "held out": 100}
"""So many that the supervised run, sampling included, takes no less time than the one on policy."""
ANSWERS = 4
"""To each prompt, for training."""
SAMPLING: Mapping[str, Any] = {
    "prompt_template": "{prompt}",
    "query_len": QUERY_LEN,
    "response_len": RESPONSE_LEN,
    "rollout_batch_size": 8,
    "rollout_per_device_batch_size": 64,
    "max_tokens_per_micro_batch": 1024,
    "ppo_epochs": 1,
}
TRAINING: Mapping[str, Any] = {
    "reward_funcs": "examples.sentences.task:share_used",
    "num_return_sequences": 8,
    "step_batch_size": 64,
    "max_steps": 20,
    "learning_rate": 1e-5,
}
"""How SmolLM2 becomes the trained teacher: much as in `make real`."""
TEACHING: Mapping[str, Any] = {
    "kl_coef": 0.0,
    "reference": "none",
    "gamma": 0.0,
    "adv_estimator": "reinforce_plus_plus",
    "num_return_sequences": ANSWERS,
    "step_batch_size": 8 * ANSWERS,
    "total_epochs": 1,
}
"""Each token as the teacher would choose it there, without a critic or a reward."""


class Start:
    """What the runs of a case begin with, in folders of `root` that are made unless they are there."""

    def __init__(self, root: Path, case: str) -> None:
        self._root = root
        model = root / "SmolLM2-135M-Instruct"
        fetch_model(model)
        base = self._stage("base", lambda folder: stages.write_sharpened(folder, model))
        self.held_out = self.prompts("held_out", PROMPTS["held out"], held_out=True, seed=0)
        prompts = self.prompts("prompts", PROMPTS[BEFORE], seed=0)
        if case == FROM_TRAINED:
            self.student = base
            given = {"model_name_or_path": base, "dataset_name": prompts / "prompts.jsonl"}

            def train(folder: Path) -> None:
                _train({**TRAINING, **given, "output_dir": folder / "run"})

            settings = {**SAMPLING, **TRAINING}
            self._of_teacher = self._stage("trained", train, base, prompts, settings=settings)
            self.teacher = self._of_teacher / "run/final/policy"
        else:
            self.teacher = self._of_teacher = base
            shown = self.demonstrations("demonstrations", prompts, seed=0)
            rate = RATES[case][BEFORE]

            def cut(folder: Path) -> None:
                stages.write_student(folder / "cut", base, layers=LAYERS)
                stages.fine_tune(folder / "tuned", folder / "cut", shown, rate=rate, passes=2, seed=0)

            settings = {"rate": rate, "layers": LAYERS, "passes": 2, "seed": 0}
            self.student = self._stage("every_third", cut, base, shown, settings=settings) / "tuned"
        self.answers = self.demonstrations(f"answers_of_{case.split()[0]}", self.held_out, answers=1, seed=0)

    def prompts(self, name: str, count: int, *, held_out: bool = False, seed: int) -> Path:
        """A folder of prompts."""
        settings: dict[str, Any] = {"count": count, "held_out": held_out, "seed": seed}
        return self._stage(name, lambda folder: stages.write_prompts(folder, **settings), settings=settings)

    def training_prompts(self, seed: int) -> Path:
        """The prompts of both ways."""
        return self.prompts(f"prompts_{seed}", PROMPTS[SUPERVISED], seed=seed)

    def demonstrations(self, name: str, prompts: Path, *, answers: int = ANSWERS, seed: int) -> Path:
        """A folder of the teacher's answers to `prompts`."""
        settings = {"answers": answers, "seed": seed}
        return self._stage(
            name,
            lambda folder: stages.write_demonstrations(folder, self.teacher, prompts, **settings),
            self._of_teacher,
            prompts,
            settings=settings,
        )

    def _stage(
        self, name: str, fill: Callable[[Path], Any], *parents: Path, settings: Mapping[str, Any] | None = None
    ) -> Path:
        sources = [Path(stages.__file__), Path(task.__file__), Path(task.__file__).with_name("words.txt")]
        return run_stage(self._root / name, name, fill, settings=settings or {}, parents=parents, sources=sources)


def _train(options: Mapping[str, Any]) -> None:
    if status := alpaca_ppo(["train", *flags_of({**MEASURING, **SAMPLING, **options})]):
        raise SystemExit(status)


def main(root: Path, *, case: str, row: str, seed: int) -> dict[str, Any]:
    """Trains, and returns the processor seconds, and what `measure` finds."""
    start = Start(root, case)
    prompts = start.training_prompts(seed)
    with TemporaryDirectory(dir=root) as name:
        folder, trained, begun = Path(name), start.student, time.process_time()
        if row == ON_POLICY:
            options = {
                "model_name_or_path": start.student,
                "teacher_model_name_or_path": start.teacher,
                "dataset_name": prompts / "prompts.jsonl",
                "dataset_train_split": f"train[:{PROMPTS[ON_POLICY]}]",
                "learning_rate": RATES[case][row],
                "seed": seed,
                "output_dir": folder / "run",
            }
            _train({**TEACHING, **options})
            trained = folder / "run/final/policy"
        elif row == SUPERVISED:
            stages.write_demonstrations(folder, start.teacher, prompts, answers=ANSWERS, seed=seed)
            trained = folder / "tuned"
            stages.fine_tune(trained, start.student, folder, rate=RATES[case][row], passes=1, seed=seed)
        seconds = time.process_time() - begun
        return {"processor_seconds": round(seconds, 1), **measure(trained, start, folder)}


def measure(student: Path, start: Start, folder: Path) -> dict[str, float]:
    """The KL of `student` to the teacher in nats per token and the share of its tokens that are the teacher's
    likeliest, on its own answers to the held-out prompts; and its loss on the teacher's.
    """
    options = {
        **MEASURING,
        "prompt_template": "{prompt}",
        "query_len": QUERY_LEN,
        "response_len": RESPONSE_LEN,
        "reward_funcs": "examples.sentences.task:share_used",
        "teacher_model_name_or_path": start.teacher,
        "model_name_or_path": start.teacher,
        "eval_dataset_name": start.held_out / "prompts.jsonl",
        "model": student,
        "output_dir": folder / "unused",
        "results_dir": folder / "results",
    }
    if status := alpaca_ppo(["evaluate", *flags_of(options)]):
        raise SystemExit(status)
    metrics = json.loads((folder / "results/results.json").read_text(encoding="utf-8"))["metrics"]
    found = {name: round(metrics[f"eval/{name}"], 4) for name in ("teacher_kl", "teacher_top_token", "scores")}
    return {**found, "loss": round(stages.loss_on(read_rows(start.answers / "demonstrations.jsonl"), student), 4)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve(), **json.loads(sys.argv[2]))))
