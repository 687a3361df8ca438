"""What the checks of `gpu_smoke` and `gpu_vllm` have in common: a machine, a trainer of a small model, a verdict."""

import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import PreTrainedModel

from alpaca_ppo import PPOConfig, PPOTrainer
from examples.memory_cells import tokenizer

ROWS, RESPONSE_LEN = 8, 24


class NotHere(Exception):
    """The check needs something that this machine does not have."""


class Failed(Exception):
    """The check ran, and its figure is beyond its bound."""


class OutOfTime(Exception):
    """The check takes too long."""


@dataclass(frozen=True)
class Machine:
    """Where the checks run."""

    device: torch.device
    gpus: int
    folder: Path
    """For what they write."""
    vllm_python: str | None = None
    """The interpreter of an environment with vLLM."""
    model: str | None = None
    """The folder of the model that vLLM samples from, in place of one with random weights."""


Check = Callable[[Machine], str]
"""Returns the figure and its bound; raises NotHere or Failed."""


def require(held: bool, figure: str) -> str:
    """`figure`, if the check held.

    Raises:
        Failed: otherwise.
    """
    if not held:
        raise Failed(figure)
    return figure


def count_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def forget_accelerator() -> None:
    """Lets the next trainer of this process have another precision; the earlier ones are of no use then."""
    AcceleratorState._reset_state(reset_partial_state=True)


def new_trainer(
    machine: Machine, model: PreTrainedModel, lengths: Sequence[int], *, peft_config: Any = None, **settings: Any
) -> PPOTrainer:
    """A trainer of 100 steps of `ROWS` responses to prompts with these numbers of tokens, before its first step."""
    forget_accelerator()
    own: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(dir=machine.folder),
        "save_steps": 0,
        "query_len": max(lengths),
        "response_len": RESPONSE_LEN,
        "rollout_batch_size": ROWS,
        "step_batch_size": ROWS,
        "step_per_device_batch_size": ROWS,
        "total_episodes": 100 * ROWS,
        "learning_rate": 1e-4,
        "num_logged_rollouts": 0,
        "report_to": ["none"],
        "use_cpu": machine.gpus == 0,
    }
    texts = [" ".join(f"w{(7 * i + 3 * j) % 60}" for j in range(length)) for i, length in enumerate(lengths)]
    return PPOTrainer(
        model=model,
        reward_funcs=count_even,
        args=PPOConfig(**{**own, **settings}),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def take_steps(trainer: PPOTrainer, count: int) -> list[dict[str, float]]:
    """The metrics of each of the next `count` steps."""
    return [trainer.step(trainer.prompt_batches(trainer.state.global_step)) for _ in range(count)]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` in the block after `seconds`. A single call into a library can delay that until it returns."""

    def stop(*args: Any) -> None:
        raise OutOfTime(f"stopped after {seconds:.3g} s; more --minutes give it time")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(check: Check, machine: Machine, seconds: float) -> tuple[str, str]:
    """`ok`, `FAILED` or `left out`, and the figure or the reason."""
    try:
        # What trainers print goes elsewhere than the lines of the checks.
        with time_limit(seconds), redirect_stdout(sys.stderr):
            return "ok", check(machine)
    except NotHere as reason:
        return "left out", str(reason)
    except (Failed, OutOfTime) as figure:
        return "FAILED", str(figure)
    # Whatever goes wrong in one check must not hide the others; the trace says where.
    except Exception as error:
        traceback.print_exc()
        return "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        if machine.gpus:
            torch.cuda.empty_cache()
