"""The stages of the experiment, from demonstrations to trained policies: what each one writes and depends on."""

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.supervised.sft import train_sft
from examples.long_horizon.base import write_base
from examples.long_horizon.other_data import uneven_prompts
from examples.long_horizon.rows import GRADES, SMALL_CRITIC, UNEVEN_PROMPTS, Sizes, settings_of
from examples.long_horizon.task import Teacher, draw_prompt
from examples.mini_farm.pipeline import EXAMPLES, KEEP_NOTHING, PACKAGE, PRESETS, SUPERVISED
from examples.mini_farm.splits import write_rows
from examples.mini_farm.stages import run_stage

DEMONSTRATIONS, PROMPTS, HELD_OUT = "demonstrations.jsonl", "prompts.jsonl", "held_out.jsonl"


@dataclass(frozen=True)
class HorizonArguments:
    """The sizes of the experiment; with the defaults, pretraining and a run take a few minutes each on one core."""

    root: str = argument("outputs/long_horizon", "Folder for all stages.")
    data_seed: int = argument(0, "Seed of everything before PPO.")
    demonstrations: int = argument(28800, "Texts of the teacher.")
    held_out: int = argument(256, "Prompts that no run is trained on.")
    hidden_size: int = argument(64, "Width of the model.")
    num_layers: int = argument(2, "Layers of the model.")
    ppo_preset: str = argument(str(PRESETS / "long_horizon.yaml"), "YAML for train_ppo.py.")
    episodes: int | None = argument(None, "Responses that a run samples, instead of the preset's number.")


class Experiment:
    """The stages in one root folder. A property or method runs its stage if necessary, and returns its folder."""

    def __init__(self, arguments: HorizonArguments) -> None:
        self.arguments = arguments
        self.root = Path(arguments.root).resolve()
        self.preset = read_yaml(arguments.ppo_preset)
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
            write_rows(folder / DEMONSTRATIONS, texts)
            for split, count in ((PROMPTS, settings["prompts"]), (HELD_OUT, settings["held_out"])):
                write_rows(folder / split, [{"prompt": draw_prompt(generator)} for _ in range(count)])

        return run_stage(self.root / "data", "data", fill, settings=settings, sources=_code("task"))

    @cached_property
    def base(self) -> Path:
        """The tokenizer and the untrained model."""
        return self._base("base", self.arguments.hidden_size)

    @cached_property
    def pretrained(self) -> Path:
        """The model of the teacher's demonstrations, mistakes included."""
        return self._pretrained("pretrained", self.base, self.data)

    @cached_property
    def small_critic(self) -> Path:
        """A model of half the width, pretrained on the same demonstrations, for a critic to start from."""
        base = self._base("small_base", self.arguments.hidden_size // 2)
        return self._pretrained("small_critic", base, self.data)

    @cached_property
    def uneven_data(self) -> Path:
        """Prompts of uneven difficulty, and the held-out prompts of `data`."""
        settings = {"seed": self.arguments.data_seed}

        def fill(folder: Path) -> None:
            write_rows(folder / PROMPTS, [{"prompt": prompt} for prompt in uneven_prompts(settings["seed"])])
            write_rows(folder / HELD_OUT, _lines(self.data / HELD_OUT))

        return run_stage(
            self.root / "uneven_data",
            "prompts of uneven difficulty",
            fill,
            settings=settings,
            parents=[self.data],
            sources=_code("task", "other_data"),
        )

    def _base(self, name: str, hidden_size: int) -> Path:
        settings = {"hidden_size": hidden_size, "num_layers": self.arguments.num_layers, "num_heads": 4}
        settings["seed"] = self.arguments.data_seed
        return run_stage(
            self.root / name,
            f"tokenizer and untrained model, {name}",
            lambda folder: write_base(folder, **settings),
            settings=settings,
            sources=[*_code("base", "task"), EXAMPLES / "mini_farm" / "base.py"],
        )

    def _pretrained(self, name: str, base: Path, data: Path) -> Path:
        preset = PRESETS / "long_horizon_sft.yaml"
        length = AutoConfig.from_pretrained(base).n_positions
        settings = {"seed": self.arguments.data_seed, "max_length": length} | KEEP_NOTHING

        def fill(folder: Path) -> None:
            train_sft(_training_flags(preset, base, data / DEMONSTRATIONS, folder, settings))

        return run_stage(
            self.root / name,
            f"pretraining on the demonstrations, {name}",
            fill,
            settings=settings,
            parents=[data, base],
            sources=[preset, SUPERVISED / "sft.py"],
        )

    def run(self, row: str, *, seed: int) -> Path:
        """Returns the folder of the run of `row` with `seed`; metrics.jsonl begins and ends with an evaluation."""
        settings: dict[str, Any] = {**settings_of(row, self.sizes), "seed": seed}
        # A row may name a critic or data of its own.
        data = {None: "data", UNEVEN_PROMPTS: "uneven_data"}
        critic = {SMALL_CRITIC: "small_critic"}
        prompts: Path = getattr(self, data[settings.get("dataset_name")])
        models = [self.pretrained]
        given: dict[str, Any] = {"reward_funcs": GRADES, **settings, "dataset_name": prompts / PROMPTS}
        given["eval_dataset_name"] = prompts / HELD_OUT
        if "value_model_name_or_path" in settings:
            models.append(getattr(self, critic[settings["value_model_name_or_path"]]))
            given["value_model_name_or_path"] = models[-1]

        def fill(folder: Path) -> None:
            argv = _training_flags(Path(self.arguments.ppo_preset), self.pretrained, prompts / PROMPTS, folder, given)
            # A process of its own, so that a run's random state and threads do not depend on the runs before it.
            subprocess.run([sys.executable, "-m", "examples.train_ppo", *argv], check=True, cwd=EXAMPLES.parent)

        return run_stage(
            self.root / f"{'_'.join(row.lower().replace(',', '').split())}_seed_{seed}",
            f"{row}, seed {seed}",
            fill,
            settings=settings,
            parents=[prompts, *models],
            sources=[Path(self.arguments.ppo_preset), EXAMPLES / "train_ppo.py", *_rewards(settings), *PACKAGE],
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
    return _code("task", "other_rewards") if "reward_funcs" in settings else _code("task")


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
