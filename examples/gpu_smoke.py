"""What works on this machine's GPU, in at most five minutes: `python -m examples.gpu_smoke [--minutes 5]`.

Prints a table: each check held, failed, or could not be made here, with the figure that it is judged by. A check that
takes more than a third of the time is stopped, and none begins once all of it is used: the last line says how many were
not made. Ends with status 1 if a check failed or was stopped. Models have random weights, nothing is downloaded.
Without a GPU the same checks run on the CPU with tiny shapes, which only shows that they run.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.estimate_memory.estimator import GIB
from alpaca_ppo.generation import Generation, SamplingParams, generate
from alpaca_ppo.models import Policy
from alpaca_ppo.models.trial import packing_problem
from alpaca_ppo.ppo.mismatch import BOUNDS
from alpaca_ppo.types import PromptBatch
from examples import same_run
from examples.gpu_speed import PAD, build, decoding_speed, peak_of
from examples.memory_cells import FAMILIES, SIZES, run_cell, tokenizer
from examples.memory_cells import SHAPES as MEMORY_SHAPES

ROWS, PROMPT_LEN, RESPONSE_LEN = 8, 12, 24
CONCENTRATED = {"vocab_size": 4096, "initializer_range": 0.1}
"""A model of which most next tokens are all but impossible: among 150,000 likely ones rounding would decide."""


class NotHere(Exception):
    """The check needs something that this machine does not have."""


class Failed(Exception):
    """The check ran, and its figure is beyond its bound."""


class OutOfTime(Exception):
    """The check takes too long."""


@dataclass(frozen=True)
class Machine:
    """Where the checks run, and with which sizes."""

    device: torch.device
    gpus: int
    folder: Path
    """For what they write."""

    @property
    def shape(self) -> str:
        """Of the models that checks compute with."""
        return "0.5B" if self.gpus else "tiny"

    def model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A model of that shape."""
        fields = CONCENTRATED if self.gpus else {"initializer_range": 0.3}
        return build(self.shape, self.device, dtype, **fields)


def prompts(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Left-padded prompts of 1 to `PROMPT_LEN` tokens, and their masks."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, PROMPT_LEN + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(PROMPT_LEN).flip(0) < lengths).long()
    tokens = torch.randint(2, model.config.vocab_size, (ROWS, PROMPT_LEN), generator=generator)
    return tokens.where(mask.bool(), PAD).to(model.device), mask.to(model.device)


def sample(model: PreTrainedModel, **how: Any) -> Generation:
    """Responses to `prompts(model)`. A token in eight stops one, so that slots are refilled."""
    queries, mask = prompts(model)
    params = SamplingParams(
        max_new_tokens=RESPONSE_LEN,
        temperature=1.0,
        pad_token_id=PAD,
        stop_token_ids=tuple(range(2, model.config.vocab_size, 8)),
        num_return_sequences=4,
    )
    batch = PromptBatch(queries=queries, query_attn_masks=mask, prompt_ids=torch.arange(ROWS), rows=[])
    return generate(model, batch, params, **how)


def require(held: bool, figure: str) -> str:
    """`figure`, if the check held.

    Raises:
        Failed: otherwise.
    """
    if not held:
        raise Failed(figure)
    return figure


def equal_tokens(ours: Generation, theirs: Generation) -> str:
    """How many responses are equal; all must be."""
    same = (ours.responses == theirs.responses).all(dim=1)
    gap = float((ours.logprobs - theirs.logprobs)[same].abs().max())
    return require(
        bool(same.all()), f"{int(same.sum())} of {len(same)} responses equal, log-probs within {gap:.1e} nats"
    )


def packed(machine: Machine, dtype: torch.dtype) -> str:
    """Log-probs of rows without padding against rows with it."""
    model = machine.model(dtype)
    policy = Policy(model)
    require(packing_problem(model) is None, "the model is not packed at all")
    responses = sample(model, backend="generate")
    queries, mask = (tensor.repeat_interleave(4, dim=0) for tensor in prompts(model))
    rows = (queries, mask, responses.responses, responses.response_mask)
    logprobs = []
    for padding_free in (False, True):
        policy.padding_reason = None if padding_free else "asked for"
        with torch.no_grad():
            logprobs.append(policy(*rows, temperature=1.0, chunk_size=1024).logprobs)
    gaps = (logprobs[0] - logprobs[1]).abs()[responses.response_mask]
    bound = BOUNDS["mismatch/logprob_abs_mean"]
    most = bound.warn if dtype == torch.float32 else bound.warn_half
    return require(
        float(gaps.mean()) <= most, f"mean difference {float(gaps.mean()):.1e} nats, largest {gaps.max():.1e}"
    )


def slots_are_generate(machine: Machine) -> str:
    """The tokens of refilled slots against `model.generate`."""
    model = machine.model()
    return equal_tokens(sample(model, backend="slots", rows_at_once=5), sample(model, backend="generate"))


class Logs(TrainerCallback):
    """The metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.steps.append(dict(logs))


def count_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def train(
    machine: Machine, steps: int, *, cls: type[PPOTrainer] = PPOTrainer, **settings: Any
) -> tuple[PPOTrainer, list[dict[str, float]]]:
    """A run of `steps` steps of `ROWS` responses; returns its trainer and the metrics of each step."""
    logs, words = Logs(), tokenizer()
    folder = tempfile.mkdtemp(dir=machine.folder)
    own: dict[str, Any] = {
        "output_dir": folder,
        "save_steps": 0,
        "query_len": PROMPT_LEN,
        "response_len": RESPONSE_LEN,
        "rollout_batch_size": ROWS,
        "step_batch_size": ROWS,
        "step_per_device_batch_size": ROWS,
        "total_episodes": steps * ROWS,
        "learning_rate": 1e-4,
        "num_logged_rollouts": 0,
        "report_to": ["none"],
        "use_cpu": machine.gpus == 0,
    }
    texts = [" ".join(f"w{(7 * i + 3 * j) % 60}" for j in range(1 + i % PROMPT_LEN)) for i in range(2 * ROWS)]
    trainer = cls(
        model=machine.model(),
        reward_funcs=count_even,
        args=PPOConfig(**{**own, **settings}),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=words,
        callbacks=[logs],
    )
    trainer.check_sampler()
    for step in range(steps):
        logs.steps.append(trainer.step(trainer.prompt_batches(step)))
    return trainer, logs.steps


def half_precision_mismatch(machine: Machine) -> str:
    """How far sampler and trainer are apart in bfloat16."""
    _, steps = train(machine, 1, bf16=True, mismatch_action="ignore")
    gap, bound = steps[0]["mismatch/logprob_abs_mean"], BOUNDS["mismatch/logprob_abs_mean"].warn_half
    return require(
        gap <= bound,
        f"mean difference {gap:.1e} nats (bound {bound}), largest ratio {steps[0]['mismatch/ratio_max']:.2f}",
    )


def vllm_beside_the_trainer(machine: Machine) -> str:
    """A vLLM server on the trainer's own GPU: it gets the weights, wakes, samples and sleeps three times."""
    if not (python := os.environ.get("VLLM_PYTHON")):
        raise NotHere("needs VLLM_PYTHON, the interpreter that alpaca-ppo vllm-env has made")
    options: dict[str, Any] = {"generation_backend": "vllm", "vllm_python": python, "mismatch_action": "ignore"}
    trainer, steps = train(machine, 3, bf16=machine.gpus > 0, **options)
    gap, bound = max(s["mismatch/logprob_abs_mean"] for s in steps), BOUNDS["mismatch/logprob_abs_mean"].warn_half
    speeds = [round(step["tokens/sampled_per_second"]) for step in steps]
    figure = f"mean difference {gap:.1e} nats (bound {bound}), {speeds} tokens/s in its rollouts"
    if machine.gpus:
        free, total = torch.cuda.mem_get_info()
        share, kept = total * trainer.args.vllm_gpu_memory_utilization, total - free - torch.cuda.memory_reserved()
        figure += f", {kept / GIB:.1f} GiB outside of torch while it sleeps (it takes {share / GIB:.1f} to sample)"
        require(kept < share, figure)
    return require(gap <= bound, figure)


def saves_a_pass(machine: Machine) -> str:
    """`old_policy: auto` in float32: the sampler's log-probs serve from the second step on."""
    _, steps = train(machine, 4, old_policy="auto")
    recomputed = [int(step["mismatch/recomputed"]) for step in steps]
    return require(recomputed[0] == 1 and recomputed[-1] == 0, f"recomputed in the steps: {recomputed}")


ON_GPU: dict[str, Any] = {"use_cpu": False, "environment": {}}
"""For `same_run.launch`."""


@cache
def run_in_one_process(folder: Path) -> Path:
    """The output of the run that others are compared with, in a folder beside theirs."""
    own = Path(tempfile.mkdtemp(dir=folder))
    same_run.write_run(own)
    return same_run.launch(own, "single", "full", same_run.MICRO_BATCHES[-1], **ON_GPU)


def same_run_on_gpus(machine: Machine, processes: str) -> str:
    """A run on several GPUs (for ZeRO on one, if there is only one) against the same run in one process."""
    need_two = processes in ("ddp", "fsdp")
    if machine.gpus < (2 if need_two else 1):
        raise NotHere("needs two GPUs" if need_two else "needs a GPU; the tests run it on CPUs")
    reference = run_in_one_process(machine.folder)
    tokens, count = same_run.MICRO_BATCHES[-1], min(machine.gpus, 2)
    output = same_run.launch(reference.parent, processes, "full", tokens, count=count, **ON_GPU)
    found = same_run.compare(output, reference)
    figure = f"{found.tokens} responses differ, metrics by {found.metric:.1e}, weights by {found.weights:.1e}"
    return require(found.tokens == 0 and found.weights <= 1e-3, figure)


def four_roles(machine: Machine) -> str:
    """Peak memory of a step with policy, critic, reference and reward model on one 7B base, against the estimate."""
    shape = MEMORY_SHAPES["qwen2.5-7b" if machine.gpus else "llama-112m"]
    column = {**shape, **dict(zip(SIZES, FAMILIES[shape["family"]][1], strict=True)), "lora_rank": 16}
    if not machine.gpus:
        column |= {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
        column |= {"query_len": 8, "response_len": 4}
    cell = run_cell(column, "reward")
    measured, estimated = cell["measured"], cell["estimated"]
    assert estimated is not None
    if measured is None:
        raise NotHere(f"needs {estimated / GIB:.1f} GiB by the estimate")
    return require(
        abs(measured / estimated - 1) <= 0.15 or not machine.gpus,
        f"{measured / GIB:.2f} GiB measured, {estimated / GIB:.2f} GiB estimated",
    )


def bandwidth(machine: Machine) -> str:
    """Decoding in slots: its share of the memory's bandwidth, and its speed against `model.generate`."""
    half = torch.bfloat16 if machine.gpus else torch.float32
    model = build("1.5B" if machine.gpus else "tiny", machine.device, half)
    sizes = (
        {"rows": 64, "prompt_len": 128, "tokens": 128} if machine.gpus else {"rows": 2, "prompt_len": 4, "tokens": 4}
    )
    peak = peak_of(machine.device, 8192 if machine.gpus else 64)
    ours, loop = (decoding_speed(model, way, peak, **sizes) for way in ("slots", "generate"))
    figure = (
        f"{ours.tokens_per_second:.0f} tokens/s at {sizes['rows']} rows, {ours.bandwidth_share:.0%} of the bandwidth "
        f"({peak.source}), {ours.tokens_per_second / loop.tokens_per_second:.1f} times model.generate"
    )
    return require(not machine.gpus or ours.bandwidth_share >= 0.2, figure)


Check = Callable[[Machine], str]
CHECKS: dict[str, Check] = {
    "packed = padded rows, float32": lambda machine: packed(machine, torch.float32),
    "packed = padded rows, bfloat16": lambda machine: packed(machine, torch.bfloat16),
    "refilled slots = model.generate, float32": slots_are_generate,
    "sampler = trainer in bfloat16": half_precision_mismatch,
    "old_policy: auto saves a pass": saves_a_pass,
    "vLLM on the trainer's GPU = trainer in bfloat16": vllm_beside_the_trainer,
    "two processes over NCCL = one": lambda machine: same_run_on_gpus(machine, "ddp"),
    "ZeRO 2 = one process": lambda machine: same_run_on_gpus(machine, "zero2"),
    "ZeRO 3 = one process": lambda machine: same_run_on_gpus(machine, "zero3"),
    "FSDP2 = one process": lambda machine: same_run_on_gpus(machine, "fsdp"),
    "four roles on one 7B base": four_roles,
    "decoding's share of the memory bandwidth": bandwidth,
}


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` in the block after `seconds`. A single call into a library can delay that until it returns."""

    def stop(*args: Any) -> None:
        raise OutOfTime(f"after {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(check: Check, machine: Machine, seconds: float) -> tuple[str, str]:
    """`held`, `failed`, `stopped` or `not here`, and the figure or the reason."""
    try:
        with time_limit(seconds):
            return "held", check(machine)
    except NotHere as reason:
        return "not here", str(reason)
    except Failed as figure:
        return "failed", str(figure)
    except OutOfTime as limit:
        return "stopped", str(limit)
    # Whatever goes wrong in one check must not hide the others; the trace says where.
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        # A process has one Accelerator, and checks differ in its precision.
        AcceleratorState._reset_state(reset_partial_state=True)
        if machine.gpus:
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the checks for which there is time and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5, help="for all checks together")
    limit = 60 * parser.parse_args(arguments).minutes
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus else "cpu")
    where = (
        f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU: tiny shapes on the CPU, figures mean nothing"
    )
    print(f"torch {torch.__version__}; {where}", flush=True)
    begin = time.perf_counter()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(device, gpus, Path(folder))
        for name, check in CHECKS.items():
            start = time.perf_counter()
            left = begin + limit - start
            if left <= 0:
                results[name] = "no time", f"the checks before took {start - begin:.0f} s"
                continue
            results[name] = outcome(check, machine, min(left, limit / 3))
            print(f"{name}: {results[name][0]} ({time.perf_counter() - start:.0f} s)", flush=True)
    print("\n| check | | figure |\n|---|---|---|")
    for name, (verdict, figure) in results.items():
        print(f"| {name} | {verdict} | {figure} |")
    counts = Counter(verdict for verdict, _ in results.values())
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    more = "; more --minutes give every check its time" if counts["stopped"] or counts["no time"] else ""
    print(f"\n{time.perf_counter() - begin:.0f} s for {len(results)} checks: {summary}{more}")
    return int(counts["failed"] + counts["stopped"] > 0)


if __name__ == "__main__":
    sys.exit(main())
