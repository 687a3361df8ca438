"""A tiny run, or several one after the other, for `accelerate launch`; the main process saves the final weights.

Usage: run_tiny.py OUTPUT_DIR [field=value ...] [then OUTPUT_DIR [field=value ...]] ...; values are YAML. Besides
fields of PPOConfig, and `resume` for what `train` is given, those of `made_trainer`, `padded_rank`: a rank on which all
models need padding, `shares_prompts`: updates read also short prompts once, and `refused_first`: the run is resumed
with another model before that, in vain. DeepSpeed takes float32 alone.
"""

import gc
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2]))

from alpaca_ppo import PPOTrainer  # noqa: E402
from alpaca_ppo.checkpoint.directory import HOLDER_FILE, LOCK_FILE  # noqa: E402
from alpaca_ppo.distributed.collectives import drain_collectives  # noqa: E402
from alpaca_ppo.distributed.fsdp_engine import FSDPEngine  # noqa: E402
from alpaca_ppo.estimate_memory.fake_models import LiveBytes  # noqa: E402
from alpaca_ppo.models import build_actor_critic, packed_attention, trial  # noqa: E402
from alpaca_ppo.models.state_reader import StateReader  # noqa: E402
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer  # noqa: E402
from tests.tiny_runs import FillDisk, LargestFile, Steep, count_even, poisoned, prompts, tiny_trainer, track_all  # noqa: E402

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class StopAfter(TrainerCallback):
    """Ends training after `step`, as a person would who interrupts the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def noisy_reward(completion_ids: list[list[int]], device: str = "cpu", **columns: Any) -> list[float]:
    """`count_even` with a little of each random number generator of this process: a judge that is not sure."""
    scores = count_even([], [], completion_ids)
    return [score + random.random() + numpy.random.rand() + float(torch.rand(())) for score in scores]


def long_responses(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Whether a response has more than two tokens; None for an empty one."""
    return [float(len(ids) > 2) if ids else None for ids in completion_ids]


def logging_constant(completion_ids: list[list[int]], log_metric: Callable[[str, float], None], **columns: Any) -> Any:
    """The same score for every response; logs this process's rank, and on the second one a metric more."""
    rank = int(os.environ.get("RANK", 0))
    log_metric("rank", rank)
    if rank:
        log_metric("of_the_second", 5.0)
    return [1.0] * len(completion_ids)


class DifferentEvaluations(PPOTrainer):
    """An evaluation that differs between ranks: on the main process it gets better up to step 2, on others worse."""

    def evaluate(self) -> dict[str, float]:
        step = float(self.state.global_step)
        own = -abs(step - 2) if self.accelerator.is_main_process else -step
        return super().evaluate() | {"eval/own": own}


def flaky_reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
    """Scores each token by its place, and fails for prompts of one word."""
    if any(" " not in prompt for prompt in prompts):
        raise TimeoutError("no answer")
    return [[float(place) for place, _ in enumerate(ids)] for ids in completion_ids]


class Talker:
    """A partner whose answers, their number and its rewards depend on the prompt and on what the policy says."""

    def reset(self, prompt: str) -> None:
        self.left = 1 + len(prompt) % 3

    async def reply(self, completion: str) -> tuple[str | None, float]:
        """A word for each of the policy's words that is even."""
        even = [word for word in completion.split() if word[-1] in "02468"]
        self.left -= 1
        return (" ".join(even) if self.left else None), 0.5 * len(even)

    def get_reward(self) -> float:
        """Of a long game."""
        return float(self.left)


def made_trainer(
    output_dir: Path | str,
    *,
    dtype: str = "float64",
    arch: str = "llama",
    model_seed: int = 0,
    lora: bool = False,
    start_adapter: bool = False,
    reward_model: bool = False,
    noisy: bool = False,
    flaky: bool = False,
    disagreeing: bool = False,
    eval_prompts: int = 0,
    eval_named: bool = False,
    talker: bool = False,
    own_critic: bool = False,
    poison: Any = (),
    steep: bool = False,
    largest_file: Any = (),
    fill_disk: Any = (),
    stop_after: int = 0,
    **overrides: Any,
) -> PPOTrainer:
    """A `tiny_trainer` of a model of `arch`.

    Args:
        output_dir: of the run.
        dtype: of the model.
        arch: one of `tiny_models.ARCHITECTURES`.
        model_seed: of the model's random weights.
        lora: train adapters.
        start_adapter: train an adapter that has learned something already.
        reward_model: score with a random sequence classifier too.
        noisy: score with `noisy_reward`.
        disagreeing: score with `logging_constant` in a trainer of `DifferentEvaluations`.
        flaky: score with `count_even` and `flaky_reward`.
        eval_prompts: prompts to evaluate on; 0 for none.
        eval_named: evaluate on them as a named set beside one of a single prompt, and measure with a function and a
            random sequence classifier.
        talker: let a `Talker` answer and reward beside `count_even`.
        own_critic: give the policy with a cached critic whose random weights are other ones on each rank.
        poison: [[step, update], ...] in which the loss of one row is NaN.
        steep: train a loss whose gradient is infinite.
        largest_file: [step, bytes], the limit of files from the end of that step on.
        fill_disk: [step, bytes], what is left of the output folder's disk from the end of that step on.
        stop_after: step after which the run ends; 0 for its last.
        overrides: fields of PPOConfig.
    """
    arguments: dict[str, Any] = {"peft_config": LoraConfig(**LORA)} if lora else {}
    if reward_model:
        arguments["reward_funcs"] = [count_even, tiny_sequence_classifier("llama", seed=1)]
        arguments["reward_processing_classes"] = [None, tiny_tokenizer()]
    elif "reward_adapter" in overrides:
        arguments["reward_funcs"] = [count_even]
    if noisy:
        # As a judge on the GPU of its rank.
        arguments["reward_funcs"] = partial(noisy_reward, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    if flaky:
        arguments["reward_funcs"] = [count_even, flaky_reward]
    if disagreeing:
        arguments["reward_funcs"], overrides["trainer_class"] = logging_constant, DifferentEvaluations
    if eval_prompts:
        arguments["eval_dataset"] = prompts(eval_prompts)
    if eval_named:
        arguments["eval_dataset"] = {"many": prompts(eval_prompts), "one": prompts(1)}
        arguments["metric_funcs"] = [long_responses, tiny_sequence_classifier("llama", seed=3)]
        arguments["metric_processing_classes"] = [None, tiny_tokenizer()]
    if talker:
        arguments["environment_factory"] = Talker
    arguments["callbacks"] = [StopAfter(stop_after)] if stop_after else []
    arguments["callbacks"] += [LargestFile(*largest_file)] if largest_file else []
    arguments["callbacks"] += [FillDisk(*fill_disk)] if fill_disk else []
    if poison:
        overrides["trainer_class"] = poisoned(*map(tuple, poison))
    elif steep:
        overrides["trainer_class"] = Steep
    model: Any = tiny_causal_lm(arch, dtype=getattr(torch, dtype), seed=model_seed)
    if start_adapter:
        model = get_peft_model(model, LoraConfig(**LORA))
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    if own_critic:
        reader = partial(StateReader, width=overrides["critic_width"], depth=overrides["critic_depth"])
        model = build_actor_critic(model, critic_layout="cached", reader=reader)
    return tiny_trainer(output_dir, model=model, trainer_arguments=arguments, **overrides)


def here(parameter: torch.Tensor) -> torch.Tensor:
    """What of a parameter is on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def resident_shares(trainer: PPOTrainer) -> dict[str, float]:
    """Of the policy and of each frozen model, the share of its weights that lies on this rank between passes."""
    models = {"policy": trainer.actor_critic.policy}
    if hasattr(trainer.collector.reference, "offloaded"):
        models["reference"] = trainer.collector.reference.policy
    models |= {f"reward {i}": s.model for i, s in enumerate(trainer.collector.scorer.sources) if hasattr(s, "model")}
    shares = {}
    for name, model in models.items():
        sizes = [(here(p).numel(), getattr(p, "ds_numel", p.numel())) for p in model.parameters()]
        shares[name] = sum(part for part, _ in sizes) / sum(whole for _, whole in sizes)
    return shares


def watch_policy_gradients(trainer: PPOTrainer) -> list[int]:
    """A list to which each step of the critic alone adds how many parameters of the policy have a gradient."""
    engine, counts = trainer.updater.engine, list[int]()
    step = engine.step

    def watched(*, frozen: Sequence[torch.nn.Parameter] = ()) -> Any:
        policy = trainer.actor_critic.policy_parameters()
        if {id(parameter) for parameter in policy} <= {id(parameter) for parameter in frozen}:
            counts.append(sum(parameter.grad is not None for parameter in policy))
        return step(frozen=frozen)

    engine.step = watched  # type: ignore[method-assign]
    return counts


def watch_kept_states(trainer: PPOTrainer) -> list[int]:
    """A list to which, under FSDP2, each update pass of the critic alone over kept states adds how many collectives it
    made, forward and backward.
    """
    engine, counts, reads = trainer.updater.engine, list[int](), [False]
    if not isinstance(engine, FSDPEngine):
        return counts
    forward, backward = engine.forward, engine.backward

    def counted(method: Any, *given: Any, **options: Any) -> Any:
        if not reads[0]:
            return method(*given, **options)
        with CommDebugMode() as collectives:
            found = method(*given, **options)
        counts.append(collectives.get_total_counts())
        return found

    def watched(*rows: Any, **options: Any) -> Any:
        reads[0] = options["policy_states"] is not None
        return counted(forward, *rows, **options)

    engine.forward = watched  # type: ignore[method-assign]
    engine.backward = partial(counted, backward)  # type: ignore[method-assign]
    return counts


def published(trainer: PPOTrainer, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Whether `policy_weights` yields the policy's part of a checkpoint's `weights` on this rank, if it has them; the
    bytes of its largest tensor, padded so that as many rows come from each rank, and how many more than before are in
    memory while all that it has yielded is kept.
    """
    named = {name.removeprefix("policy.model."): tensor for name, tensor in weights.items() if "policy." in name}
    expected = {name: tensor for name, tensor in named.items() if ".value." not in name}
    live, kept, largest, more, same = LiveBytes(), [], 0, 0, True
    ranks = trainer.accelerator.num_processes
    track_all(live)
    before, deadline = live.live, time.monotonic() + 30
    with live:
        for name, whole in trainer.updater.engine.policy_weights():
            kept.append(whole)
            padded, tensor = whole[:1].nbytes * math.ceil(len(whole) / ranks) * ranks, expected.pop(name)
            largest = max(largest, padded)
            same &= tensor.is_meta or torch.equal(whole.float(), tensor.to(whole.dtype).float())
            # gloo's threads let go of the tensor before a little later.
            while live.live - before > padded and time.monotonic() < deadline:
                time.sleep(0.001)
            more = max(more, live.live - before)
    return {"same": same and not expected, "largest": largest, "more": more}


def to_no_file(pickling: Callable[..., Any]) -> Callable[..., Any]:
    """`pickling` that refuses paths; ranks pickle what they tell one another."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        assert not any(isinstance(argument, str | Path) for argument in args), args
        return pickling(*args, **kwargs)

    return guarded


@contextmanager
def needing_padding(rank: int | None) -> Iterator[None]:
    """A block in which no model can be read without padding, or sampled in slots, on `rank`."""
    if rank != int(os.environ.get("RANK", 0)):
        yield
        return
    with (
        mock.patch.dict(trial.packing_trial.found, clear=True),
        mock.patch.object(trial.packing_trial, "attempt", lambda backbone: "another machine"),
    ):
        yield


def refuse_another_policy(output_dir: str, resume: bool | str, overrides: dict[str, Any]) -> None:
    """On every rank, the run does not resume from other weights, and its folder stays as it is."""
    AcceleratorState._reset_state()
    other = made_trainer(output_dir, model_seed=1, **overrides)

    def files() -> list[tuple[Path, int]]:
        """All but the lock, which the main process may hold at this moment."""
        found = (path for path in Path(output_dir).rglob("*") if path.name not in (LOCK_FILE, HOLDER_FILE))
        return sorted((path, path.stat().st_mtime_ns) for path in found)

    # While a rank looks, no other one goes on: the main process's writes pass through files of their own.
    before = files()
    other.accelerator.wait_for_everyone()
    refused = ValueError if other.accelerator.is_main_process else RuntimeError
    try:
        other.train(resume_from_checkpoint=resume)
    except refused as error:
        assert "weights.reference is weights" in str(error), error
    else:
        raise AssertionError("a run resumed from the weights of another model")
    other.accelerator.wait_for_everyone()
    assert files() == before
    other.accelerator.wait_for_everyone()


def run(output_dir: str, *settings: str) -> None:
    """One run, in which nothing is pickled to a file or from one; leaves weights.pt and resident.json in its folder."""
    overrides = {name: yaml.safe_load(value) for name, _, value in (setting.partition("=") for setting in settings)}
    resume = overrides.pop("resume", None)
    if overrides.pop("refused_first", False):
        refuse_another_policy(output_dir, resume, overrides)
    # Of an earlier run in this process; the group of processes stays.
    AcceleratorState._reset_state()
    # DeepSpeed looks for garbage in every run: in what that run makes, then.
    gc.freeze()
    # Each rank has its own random numbers, and a run that is resumed begins with others.
    set_seed(int(os.environ.get("RANK", 0)) + (100 if resume else 0))
    shortest = 1 if overrides.pop("shares_prompts", False) else packed_attention.SHARED_IN_UPDATES
    sharing = mock.patch.object(packed_attention, "SHARED_IN_UPDATES", shortest)
    with sharing, needing_padding(overrides.pop("padded_rank", None)):
        train(made_trainer(output_dir, **overrides), output_dir, resume)


def train(trainer: PPOTrainer, output_dir: str, resume: bool | str | None) -> None:
    """The training of a run."""
    with (
        mock.patch("torch.load", to_no_file(torch.load)),
        mock.patch("torch.save", to_no_file(torch.save)),
        # With gloo it may end the process, rarely.
        mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("gathered by full_tensor")),
    ):
        policy_gradients, critic_collectives = watch_policy_gradients(trainer), watch_kept_states(trainer)
        trainer.train(resume_from_checkpoint=resume)
        weights = trainer.updater.engine.weights()
    state = trainer.state
    reached = {"step": state.global_step, "best": state.best_global_step, "published": published(trainer, weights)}
    reached |= {"policy_gradients": policy_gradients, "critic_collectives": critic_collectives}
    (Path(output_dir) / f"reached_{trainer.accelerator.process_index}.json").write_text(json.dumps(reached))
    if trainer.accelerator.is_main_process:
        torch.save(weights, Path(output_dir) / "weights.pt")
        (Path(output_dir) / "resident.json").write_text(json.dumps(resident_shares(trainer)))
    drain_collectives(trainer.accelerator)


def main(*arguments: str) -> None:
    """The runs that `then` separates."""
    torch.set_num_threads(1)
    for separator, group in itertools.groupby(arguments, lambda argument: argument == "then"):
        if not separator:
            run(*group)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
