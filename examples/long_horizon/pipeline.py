"""The stages of the experiment, from demonstrations to trained policies: what each one writes and depends on."""

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from alpaca_ppo.config.parser import read_yaml
from examples import train_sft
from examples.long_horizon.base import write_base
from examples.long_horizon.rows import GRADES, Sizes, settings_of
from examples.long_horizon.task import Teacher, draw_prompt
from examples.mini_farm.pipeline import EXAMPLES, KEEP_NOTHING, PACKAGE, PRESETS
from examples.mini_farm.splits import write_rows
from examples.mini_farm.stages import run_stage


def _arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class HorizonArguments:
    """The sizes of the experiment; with the defaults, pretraining and a run take a few minutes each on one core."""

    root: str = _arg("outputs/long_horizon", "Folder for all stages.")
    data_seed: int = _arg(0, "Seed of everything before PPO.")
    demonstrations: int = _arg(28800, "Texts of the teacher.")
    held_out: int = _arg(256, "Prompts that no run is trained on.")
    hidden_size: int = _arg(64, "Width of the model.")
    num_layers: int = _arg(2, "Layers of the model.")
    preset: str = _arg(str(PRESETS / "long_horizon.yaml"), "YAML for train_ppo.py.")
    episodes: int | None = _arg(None, "Responses that a run samples, instead of the preset's number.")


class Experiment:
    """The stages in one root folder. A property or method runs its stage if necessary, and returns its folder."""

    def __init__(self, arguments: HorizonArguments) -> None:
        self.arguments = arguments
        self.root = Path(arguments.root).resolve()
        self.preset = read_yaml(arguments.preset)
        episodes = arguments.episodes or self.preset["total_episodes"]
        self.sizes = Sizes(self.preset["rollout_batch_size"], episodes)

    @cached_property
    def data(self) -> Path:
        """Demonstrations, and prompts for training and for evaluation."""
        settings = {
            "seed": self.arguments.data_seed,
            "demonstrations": self.arguments.demonstrations,
            "prompts": self.sizes.total_episodes,
            "held_out": self.arguments.held_out,
        }

        def fill(folder: Path) -> None:
            generator, teacher = random.Random(settings["seed"]), Teacher(settings["seed"])
            prompts = [draw_prompt(generator) for _ in range(settings["demonstrations"])]
            texts = [{"prompt": prompt, "completion": " " + teacher.write(prompt, generator)} for prompt in prompts]
            write_rows(folder / "demonstrations.jsonl", texts)
            for split in ("prompts", "held_out"):
                write_rows(
                    folder / f"{split}.jsonl", [{"prompt": draw_prompt(generator)} for _ in range(settings[split])]
                )

        return run_stage(self.root / "data", "data", fill, settings=settings, sources=_code("task"))

    @cached_property
    def base(self) -> Path:
        """The tokenizer and the untrained model."""
        settings = {
            "hidden_size": self.arguments.hidden_size,
            "num_layers": self.arguments.num_layers,
            "num_heads": 4,
            "seed": self.arguments.data_seed,
        }
        return run_stage(
            self.root / "base",
            "tokenizer and untrained model",
            lambda folder: write_base(folder, **settings),
            settings=settings,
            sources=[*_code("base", "task"), EXAMPLES / "mini_farm" / "base.py"],
        )

    @cached_property
    def pretrained(self) -> Path:
        """The model of the teacher's demonstrations, mistakes included."""
        preset = PRESETS / "long_horizon_sft.yaml"
        settings = {"seed": self.arguments.data_seed} | KEEP_NOTHING

        def fill(folder: Path) -> None:
            train_sft.main(_training_flags(preset, self.base, self.data / "demonstrations.jsonl", folder, settings))

        return run_stage(
            self.root / "pretrained",
            "pretraining on the demonstrations",
            fill,
            settings=settings,
            parents=[self.data, self.base],
            sources=[preset, EXAMPLES / "train_sft.py"],
        )

    def run(self, row: str, *, seed: int) -> Path:
        """Returns the folder of the run of `row` with `seed`; metrics.jsonl begins and ends with an evaluation."""
        settings: dict[str, Any] = {**settings_of(row, self.sizes), "seed": seed}

        def fill(folder: Path) -> None:
            given = {"reward_funcs": GRADES, **settings, "eval_dataset_name": self.data / "held_out.jsonl"}
            argv = _training_flags(
                Path(self.arguments.preset), self.pretrained, self.data / "prompts.jsonl", folder, given
            )
            # A process of its own, so that a run's random state and threads do not depend on the runs before it.
            subprocess.run([sys.executable, "-m", "examples.train_ppo", *argv], check=True, cwd=EXAMPLES.parent)

        return run_stage(
            self.root / f"{'_'.join(row.lower().replace(',', '').split())}_seed_{seed}",
            f"{row}, seed {seed}",
            fill,
            settings=settings,
            parents=[self.data, self.pretrained],
            sources=[Path(self.arguments.preset), EXAMPLES / "train_ppo.py", *_rewards(settings), *PACKAGE],
        )


def evaluations_of(run: Path) -> list[list[Mapping[str, Any]]]:
    """Returns the tables of a run's evaluations, before and after it: a line for each held-out prompt."""
    return [_lines(path) for path in sorted((run / "eval").iterdir())]


def metrics_of(run: Path) -> list[Mapping[str, Any]]:
    """Returns the lines of a run's metrics.jsonl: an evaluation, the steps, and in the last one another evaluation."""
    return _lines(run / "metrics.jsonl")


def _lines(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _rewards(settings: Mapping[str, Any]) -> list[Path]:
    """Returns the files with the rewards of a run."""
    return _code("task", "pass_or_fail") if "reward_funcs" in settings else _code("task")


def _code(*modules: str) -> list[Path]:
    return [Path(__file__).with_name(f"{module}.py") for module in modules]


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Returns `options` as a command line; those with a list have several values."""
    flags: list[str] = []
    for name, value in options.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def _training_flags(preset: Path, model: Path, data: Path, output: Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns the command line of a training script; `settings` override the preset."""
    return flags_of(
        {"config": preset, "model_name_or_path": model, "dataset_name": data, "output_dir": output, **settings}
    )
