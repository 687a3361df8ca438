"""The tasks: for each its models and data, the sizes of a run, and what a run is measured by.

Nothing of PPO is set here but sizes, and a learning rate by one rule: `RATE_TIMES_WIDTH` over the model's width.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from alpaca_ppo import PPOConfig
from alpaca_ppo.supervised.sft import train_sft
from examples.defaults import chain
from examples.games import calculator, guessing
from examples.games.pipeline import Experiment as Games
from examples.games.pipeline import GamesArguments
from examples.long_horizon import task as horizon
from examples.long_horizon.pipeline import DEMONSTRATIONS, HELD_OUT, PROMPTS, HorizonArguments, flags_of
from examples.long_horizon.pipeline import Experiment as Horizon
from examples.mini_farm.base import build_model
from examples.mini_farm.pipeline import GOLD, KEEP_NOTHING, PRESETS, SUPERVISED, Lab, LabArguments
from examples.mini_farm.real import RealArguments, RealLab, in_messages
from examples.mini_farm.splits import Row, write_rows
from examples.mini_farm.stages import run_stage
from examples.sentences import task as sentences
from examples.sentences.model import fetch_model

Options = dict[str, Any]
RATE_TIMES_WIDTH = 0.048
"""The learning rates that the laboratories were tuned with are near this over the width: 3e-4 at 160, 7.5e-4 at 64."""


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how it is measured."""

    title: str
    """What it is called in tables."""
    width: int
    """Of the model."""
    sizes: Mapping[str, Any]
    """Lengths and batches; `rollout_batch_size` and `total_episodes` count responses."""
    prepare: Callable[[Path, int], Options]
    """Makes models and data of a seed in a folder, and returns the options that name them."""
    metric: str
    """The metric of an evaluation that says how good a policy is."""
    in_points: Callable[[float], float] = lambda score: 100 * score
    """From the metric to the number in the tables."""
    unit: str = "right (%)"
    """What that number is called."""
    digits: int = 1
    """Of that number in the tables of the critics."""
    plays: bool = False
    """Whether an environment answers the policy."""

    def options(self, settings: Mapping[str, Any]) -> Options:
        """Returns the options of a run with `settings`, which samples as many responses as any other of the task."""
        options = {"learning_rate": RATE_TIMES_WIDTH / self.width, **self.sizes, **settings}
        for name in ("rollout_batch_size", "total_episodes"):
            options[name] //= options.get("num_return_sequences", 1)
        return options


def _mini_farm(root: Path, seed: int) -> Options:
    lab = Lab(LabArguments(root=str(root), data_seed=seed))
    return {
        "model_name_or_path": lab.sft,
        "dataset_name": lab.data / "unlabeled.jsonl",
        "eval_dataset_name": lab.data / "val.jsonl",
        "reward_model_name_or_path": lab.reward_model,
        "reward_funcs": GOLD,
        # The annotators' gold score is only watched.
        "reward_weights": [1.0, 0.0],
        "prompt_template": "{instruction} {input}\n",
    }


def _long_horizon(root: Path, seed: int) -> Options:
    experiment = Horizon(HorizonArguments(root=str(root), data_seed=seed))
    return _of_files(experiment.pretrained, experiment.data) | {"reward_funcs": "examples.long_horizon.task:grades"}


def _game(name: str, root: Path, seed: int) -> Options:
    experiment = Games(name, GamesArguments(root=str(root), data_seed=seed))
    return {
        "environment": experiment.game.environment,
        "model": experiment.imitated,
        "reference_model": experiment.imitated,
        "prompts": experiment.data / PROMPTS,
        "held_out": experiment.data / HELD_OUT,
    }


def _chain(root: Path, seed: int) -> Options:
    sizes = {"seed": seed, "demonstrations": 20000, "prompts": CHAIN["total_episodes"], "held_out": 512}
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "seed": seed}
    shape["max_length"] = chain.QUERY_LEN + chain.RESPONSE_LEN
    sources = [Path(chain.__file__)]

    def write_data(folder: Path) -> None:
        generator, teacher = random.Random(seed), chain.Teacher(seed)
        prompts = [chain.draw_prompt(generator) for _ in range(sizes["demonstrations"])]
        texts = [{"prompt": prompt, "completion": " " + teacher.write(prompt, generator)} for prompt in prompts]
        write_rows(folder / DEMONSTRATIONS, texts)
        for split, count in ((PROMPTS, sizes["prompts"]), (HELD_OUT, sizes["held_out"])):
            write_rows(folder / split, [{"prompt": chain.draw_prompt(generator)} for _ in range(count)])

    def write_model(folder: Path) -> None:
        tokenizer = chain.build_tokenizer()
        tokenizer.save_pretrained(folder)
        build_model(tokenizer, **shape).save_pretrained(folder)

    def imitate(folder: Path) -> None:
        paths = {"model_name_or_path": base, "dataset_name": data / DEMONSTRATIONS, "output_dir": folder}
        length = {"max_length": shape["max_length"], "seed": seed}
        train_sft(flags_of({"config": sft, **paths, **length, **KEEP_NOTHING}))

    data = run_stage(root / "data", "chain: data", write_data, settings=sizes, sources=sources)
    base = run_stage(root / "base", "chain: untrained model", write_model, settings=shape, sources=sources)
    sft = PRESETS / "games_sft.yaml"
    pretrained = run_stage(
        root / "imitated",
        "chain: imitation of the demonstrations",
        imitate,
        settings={"seed": seed},
        sources=[sft, SUPERVISED / "sft.py"],
        parents=[data, base],
    )
    return _of_files(pretrained, data) | {"reward_funcs": "examples.defaults.chain:right"}


def _sentences(root: Path, seed: int) -> Options:
    fetch_model(model := root.parent / "SmolLM2-135M-Instruct")

    def write_data(folder: Path) -> None:
        for split, count in ((PROMPTS, SENTENCES["total_episodes"]), (HELD_OUT, 100)):
            named = sentences.TRAINING if split == PROMPTS else sentences.HELD_OUT
            rows = sentences.draw_prompts(count, split=named, seed=seed)
            write_rows(folder / split, [{**row, "prompt": sentences.chat_text(row)} for row in rows])

    sources = [Path(sentences.__file__)]
    data = run_stage(root / "data", "sentences: data", write_data, settings={"seed": seed}, sources=sources)
    return _of_files(model, data) | {"reward_funcs": "examples.sentences.task:share_used"}


def _rlhf(root: Path, seed: int) -> Options:
    fetch_model(model := root.parent / "SmolLM2-135M-Instruct")
    query_len, response_len = RLHF_LENGTHS
    args = PPOConfig(
        output_dir=str(root / "run"),
        query_len=query_len,
        response_len=response_len,
        temperature=SENTENCES["temperature"],
        max_steps=SENTENCES["total_episodes"] // SENTENCES["rollout_batch_size"],
        rollout_batch_size=SENTENCES["rollout_batch_size"],
        rollout_per_device_batch_size=64,
        step_batch_size=SENTENCES["rollout_batch_size"],
        use_cpu=True,
    )

    def as_text(row: Row) -> Row:
        return (messages := in_messages(row)) | {"prompt": sentences.chat_text(messages)}

    lab = RealLab(RealArguments(model=str(model), data_seed=seed), args, as_text)

    def write_data(folder: Path) -> None:
        for split, name in ((PROMPTS, "unlabeled"), (HELD_OUT, "val")):
            write_rows(folder / split, lab.rows[name])

    data = run_stage(root / "data", "rlhf: data", write_data, settings={"seed": seed}, parents=[lab.reward_model])
    reward = {"reward_model_name_or_path": lab.reward_model, "reward_funcs": GOLD, "reward_weights": [1.0, 0.0]}
    return _of_files(model, data) | reward


def _of_files(model: Path, data: Path) -> Options:
    return {"model_name_or_path": model, "dataset_name": data / PROMPTS, "eval_dataset_name": data / HELD_OUT}


def _sizes(*, lengths: tuple[int, int], rollout: int, step: int, responses: int, **others: Any) -> Options:
    return {
        "query_len": lengths[0],
        "response_len": lengths[1],
        "rollout_batch_size": rollout,
        "rollout_per_device_batch_size": rollout,
        "step_batch_size": step,
        "step_per_device_batch_size": step,
        "total_episodes": responses,
        **others,
    }


CHAIN = _sizes(lengths=(chain.QUERY_LEN, chain.RESPONSE_LEN), rollout=128, step=64, responses=6400)
SENTENCES = _sizes(
    lengths=(48, 32),
    rollout=32,
    step=16,
    responses=512,
    learning_rate=5e-6,
    lr_scheduler_type="constant",
    ppo_epochs=1,
    temperature=0.7,
    eval_temperature=0.7,
    max_tokens_per_micro_batch=2048,
)
"""A real model: one pass of the policy over each rollout, because a pass costs something. A run is the first sixteen
steps of a longer one, so its rate does not fall.
"""
RLHF_LENGTHS = (96, 40)
TASKS: Mapping[str, Task] = {
    "mini_farm": Task(
        title="RLHF with a reward model",
        width=160,
        sizes=_sizes(lengths=(32, 48), rollout=128, step=64, responses=3200),
        prepare=_mini_farm,
        metric="eval/scores/gold",
        in_points=lambda score: score,
        unit="annotators' score",
        digits=2,
    ),
    "long_horizon": Task(
        title="30 decisions, one reward at the end",
        width=64,
        sizes=_sizes(lengths=(horizon.QUERY_LEN, horizon.RESPONSE_LEN), rollout=32, step=16, responses=1024),
        prepare=_long_horizon,
        metric="eval/scores",
        in_points=lambda score: 100 * horizon.share_right(score),
    ),
    "guessing": Task(
        title="a guessing game",
        width=64,
        sizes=_sizes(lengths=(1, guessing.RESPONSE_LEN), rollout=128, step=64, responses=3200, max_turn_tokens=4),
        prepare=partial(_game, "guessing"),
        metric="eval/scores",
        unit="points of 100",
        plays=True,
    ),
    "calculator": Task(
        title="sums with a calculator",
        width=64,
        sizes=_sizes(
            lengths=(calculator.QUERY_LEN, calculator.RESPONSE_LEN),
            rollout=64,
            step=32,
            responses=1920,
            max_turns=calculator.MAX_TURNS,
            max_turn_tokens=24,
        ),
        prepare=partial(_game, "calculator"),
        metric="eval/scores",
        plays=True,
    ),
    "chain": Task(
        title="a chain of lookups, right or wrong", width=64, sizes=CHAIN, prepare=_chain, metric="eval/scores"
    ),
    "sentences": Task(
        title="a sentence from given words, SmolLM2-135M",
        width=576,
        sizes=SENTENCES,
        prepare=_sentences,
        metric="eval/scores",
        unit="reward of 100",
    ),
    "rlhf": Task(
        title="RLHF with a reward model, SmolLM2-135M",
        width=576,
        sizes={**SENTENCES, "query_len": RLHF_LENGTHS[0], "response_len": RLHF_LENGTHS[1]},
        prepare=_rlhf,
        metric="eval/scores/gold",
        in_points=lambda score: score,
        unit="annotators' score",
        digits=2,
    ),
}
REAL_TASKS = ("sentences", "rlhf")
SMALL_TASKS = [name for name in TASKS if name not in REAL_TASKS]
"""Those with a model that is made here."""
