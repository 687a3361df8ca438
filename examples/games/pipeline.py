"""The stages of the experiment, from demonstrations to trained policies: what each one writes and depends on."""

import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.environments.kinds import EnvironmentKind
from alpaca_ppo.supervised.sft import train_sft
from examples.games import calculator, guessing
from examples.games.base import calculator_tokenizer, guessing_tokenizer, write_base
from examples.games.rows import BEST, GROUP, Sizes, settings_of
from examples.games.train import read_rows
from examples.long_horizon.pipeline import flags_of
from examples.mini_farm.base import EOS
from examples.mini_farm.pipeline import EXAMPLES, KEEP_NOTHING, PACKAGE, PRESETS, SUPERVISED
from examples.mini_farm.splits import write_rows
from examples.mini_farm.stages import run_stage

DEMONSTRATIONS, PROMPTS, HELD_OUT = "demonstrations.jsonl", "prompts.jsonl", "held_out.jsonl"
Row = dict[str, Any]


@dataclass(frozen=True)
class GamesArguments:
    """The sizes of the experiment; with the defaults, the model of a game and a run take a few minutes on one core."""

    root: str = argument("outputs/games", "Folder for all stages.")
    data_seed: int = argument(0, "Seed of everything before the runs.")
    demonstrations: int = argument(20000, "Demonstrations of a game.")
    held_out: int = argument(512, "Games of an evaluation, at least 64.")
    hidden_size: int = argument(64, "Width of the models.")
    num_layers: int = argument(2, "Layers of the models.")
    episodes: int | None = argument(None, "Games that a run plays, instead of the preset's number.")


@dataclass(frozen=True)
class Game:
    """What the stages need to know of a game."""

    environment: str
    """The class in `train.ENVIRONMENTS`."""
    demonstrations: Callable[[int, random.Random], list[Row]]
    prompts: Callable[[int, random.Random], list[Row]]
    held_out: Callable[[int, random.Random], list[Row]]
    is_won: Callable[[Mapping[str, Any], list[str]], bool]
    """Of a prompt's row and the policy's turns."""
    optimal_turns: float
    """Of the best player, in the mean."""
    max_length: int
    """Tokens of the longest prompt and response."""
    counts_turns: bool
    """Whether a game that is won in fewer turns is better."""
    success: str
    """What the share of games won is called in the table."""


def _calculator_demonstrations(count: int, generator: random.Random) -> list[Row]:
    schemas = [tool.schema for tool in EnvironmentKind("calculator", calculator.Calculator).tools]
    return calculator.demonstrations(count, generator, tokenizer=calculator_tokenizer(), schemas=schemas)


def _guessing_demonstrations(count: int, generator: random.Random) -> list[Row]:
    return guessing.demonstrations(count, generator, end=guessing_tokenizer().eos_token)


GAMES = {
    "guessing": Game(
        environment="Guess",
        demonstrations=_guessing_demonstrations,
        prompts=guessing.prompts,
        held_out=lambda count, _: guessing.held_out(max(1, count // guessing.HIGHEST)),
        is_won=guessing.is_won,
        optimal_turns=guessing.optimal_turns(),
        max_length=1 + guessing.RESPONSE_LEN,
        counts_turns=True,
        success="games won (%)",
    ),
    "calculator": Game(
        environment="Calculator",
        demonstrations=_calculator_demonstrations,
        prompts=calculator.prompts,
        held_out=calculator.prompts,
        is_won=calculator.is_won,
        optimal_turns=3.0,
        max_length=calculator.QUERY_LEN + calculator.RESPONSE_LEN,
        counts_turns=False,
        success="right answers (%)",
    ),
}


class Experiment:
    """The stages of one game. A property or method runs its stage if necessary, and returns its folder."""

    def __init__(self, game: str, arguments: GamesArguments) -> None:
        self.name, self.game, self.arguments = game, GAMES[game], arguments
        self.root = Path(arguments.root).resolve() / game
        self.preset = PRESETS / f"games_{game}.yaml"
        preset = read_yaml(str(self.preset))
        self.sizes = Sizes(preset["rollout_batch_size"], arguments.episodes or preset["total_episodes"])

    @cached_property
    def data(self) -> Path:
        """Demonstrations, and games for training and for evaluation."""
        settings = {
            "seed": self.arguments.data_seed,
            "demonstrations": self.arguments.demonstrations,
            "prompts": self.sizes.total_episodes,
            "held_out": self.arguments.held_out,
        }

        def fill(folder: Path) -> None:
            generator = random.Random(settings["seed"])
            write_rows(folder / DEMONSTRATIONS, self.game.demonstrations(settings["demonstrations"], generator))
            write_rows(folder / PROMPTS, self.game.prompts(settings["prompts"], generator))
            write_rows(folder / HELD_OUT, self.game.held_out(settings["held_out"], generator))

        return self._stage("data", "data", fill, settings=settings, sources=_code(self.name, "base"))

    @cached_property
    def base(self) -> Path:
        """The tokenizer and the untrained model."""
        shape = {"hidden_size": self.arguments.hidden_size, "num_layers": self.arguments.num_layers}
        shape |= {"max_length": self.game.max_length, "seed": self.arguments.data_seed}

        def fill(folder: Path) -> None:
            write_base(folder, game=self.name, **shape)

        sources = [*_code(self.name, "base"), EXAMPLES / "mini_farm" / "base.py"]
        return self._stage("base", "untrained model", fill, {"game": self.name, **shape}, sources)

    @cached_property
    def imitated(self) -> Path:
        """The model of the demonstrations, mistakes included."""
        return self._imitation("imitated", "imitation of the demonstrations", self.base, self.data / DEMONSTRATIONS)

    def run(self, row: str, *, seed: int) -> Path:
        """Returns the folder of the run of `row` with `seed`, whose `eval` has a table of games before it (but for
        `BEST`) and one after it.
        """
        if row == BEST:
            return self._best_run(seed)
        settings = {"environment": self.game.environment, **settings_of(self.name, row, self.sizes), "seed": seed}

        def fill(folder: Path) -> None:
            self._play(folder, model=self.imitated, held_out=self.data / HELD_OUT, settings=settings)

        return self._run_stage(row, seed, fill, settings, [self.data, self.imitated])

    def samples(self, seed: int) -> Path:
        """As many games of the model of the demonstrations as a run plays, in groups of `GROUP`."""
        settings = {"eval_num_samples": GROUP, "seed": seed, "games": self.sizes.total_episodes}

        def fill(folder: Path) -> None:
            rows = read_rows(self.data / PROMPTS)[: settings["games"] // GROUP]
            write_rows(folder / PROMPTS, rows)
            options = {name: settings[name] for name in ("eval_num_samples", "seed")}
            self._play(folder, model=self.imitated, held_out=folder / PROMPTS, settings=options, only_evaluate=True)

        return self._run_stage("samples", seed, fill, settings, [self.data, self.imitated])

    def best_imitated(self, seed: int) -> Path:
        """The model of the demonstrations, trained on the best game of each group of `samples`."""
        samples = self.samples(seed)

        def fill(folder: Path) -> None:
            best = best_of_groups(table_of(samples, -1))
            rows = [{"prompt": row["prompt"], "completion": row["response"].removesuffix(EOS)} for row in best]
            write_rows(folder / DEMONSTRATIONS, rows)

        games = self._stage(f"best_games_seed_{seed}", f"best games, seed {seed}", fill, {"seed": seed}, [], [samples])
        return self._imitation(
            f"best_imitated_seed_{seed}",
            f"imitation of the best games, seed {seed}",
            self.imitated,
            games / DEMONSTRATIONS,
            seed=seed,
            learning_rate=1.0e-3,
            warmup_steps=0,
        )

    def _best_run(self, seed: int) -> Path:
        model, settings = self.best_imitated(seed), {"seed": seed}

        def fill(folder: Path) -> None:
            self._play(folder, model=model, held_out=self.data / HELD_OUT, settings=settings, only_evaluate=True)

        return self._run_stage(BEST, seed, fill, settings, [self.data, model])

    def _imitation(self, name: str, title: str, model: Path, data: Path, **changes: Any) -> Path:
        preset = PRESETS / "games_sft.yaml"
        length = {"max_length": self.game.max_length}
        settings = {"seed": self.arguments.data_seed, **length, **KEEP_NOTHING, **changes}

        def fill(folder: Path) -> None:
            paths = {"model_name_or_path": model, "dataset_name": data, "output_dir": folder}
            train_sft(flags_of({"config": preset, **paths, **settings}))

        return self._stage(name, title, fill, settings, [preset, SUPERVISED / "sft.py"], [data.parent, model])

    def _play(
        self, folder: Path, *, model: Path, held_out: Path, settings: Mapping[str, Any], only_evaluate: bool = False
    ) -> None:
        # A process of its own, so that a run's random state and threads do not depend on the runs before it.
        options = {
            "config": self.preset,
            "environment": self.game.environment,
            "model": model,
            "reference_model": self.imitated,
            "prompts": self.data / PROMPTS,
            "held_out": held_out,
            "only_evaluate": only_evaluate,
            "output_dir": folder,
            **settings,
        }
        command = [sys.executable, "-m", "examples.games.train", *flags_of(options)]
        subprocess.run(command, check=True, cwd=EXAMPLES.parent)

    def _run_stage(
        self, row: str, seed: int, fill: Callable[[Path], None], settings: Mapping[str, Any], parents: list[Path]
    ) -> Path:
        sources = [self.preset, *_code("train", self.name), *PACKAGE]
        name = f"{'_'.join(row.lower().replace(',', '').split())}_seed_{seed}"
        return self._stage(name, f"{row}, seed {seed}", fill, settings, sources, parents)

    def _stage(
        self,
        name: str,
        title: str,
        fill: Callable[[Path], None],
        settings: Mapping[str, Any],
        sources: list[Path] | None = None,
        parents: list[Path] | None = None,
    ) -> Path:
        title = f"{self.name}: {title}"
        return run_stage(self.root / name, title, fill, settings=settings, sources=sources or (), parents=parents or ())


def table_of(run: Path, number: int) -> list[Row]:
    """Returns a table of a run's evaluations, a row for each game: 0 is the first one, -1 the last one."""
    return read_rows(sorted((run / "eval").iterdir())[number])


def best_of_groups(rows: list[Row]) -> list[Row]:
    """Returns the row with the highest score of each prompt."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
    return [max(group, key=lambda row: float(row["score"])) for group in groups.values()]


def _code(*modules: str) -> list[Path]:
    return [Path(__file__).with_name(f"{module}.py") for module in modules]
