"""What works on this machine's GPU: `python -m examples.gpu_smoke [--vllm_python PATH]`.

Prints a line for each check: ok, FAILED, or left out because something is missing here, with its figure and bound. It
takes at most `--minutes`: five, and ten more with an environment for vLLM (`alpaca-ppo vllm-env`). A check that takes
more than a third of them is stopped and has failed. None begins once all are used: the last line says how many were not
made. Ends with status 1 if a check failed. Models have random weights, nothing is downloaded. Without a GPU the same
checks run on the CPU with tiny shapes, which only shows that they run.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from alpaca_ppo.distributed.fsdp_engine import _full
from alpaca_ppo.estimate_memory.estimator import GIB
from alpaca_ppo.generation import Generation, SamplingParams, generate
from alpaca_ppo.models import Policy
from alpaca_ppo.models.trial import packing_problem
from alpaca_ppo.ppo.mismatch import BOUNDS
from alpaca_ppo.ppo.state_cache import StateCache
from alpaca_ppo.types import PromptBatch
from examples import gpu_vllm, same_run
from examples.gpu_checks import (
    RESPONSE_LEN,
    ROWS,
    Check,
    Machine,
    NotHere,
    forget_accelerator,
    new_trainer,
    outcome,
    require,
    take_steps,
)
from examples.gpu_speed import PAD, build, decoding_speed, peak_of
from examples.memory_cells import FAMILIES, SIZES, run_cell
from examples.memory_cells import SHAPES as MEMORY_SHAPES

PROMPT_LEN = 12
CONCENTRATED = {"vocab_size": 4096, "initializer_range": 0.1}
"""A model of which most next tokens are all but impossible: among 150,000 likely ones rounding would decide."""


def small_model(machine: Machine, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model that checks compute with."""
    if machine.gpus:
        return build("0.5B", machine.device, dtype, **CONCENTRATED)
    return build("tiny", machine.device, dtype, initializer_range=0.3)


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


def equal_tokens(ours: Generation, theirs: Generation) -> str:
    """How many responses are equal; all must be."""
    same = (ours.responses == theirs.responses).all(dim=1)
    gap = float((ours.logprobs - theirs.logprobs)[same].abs().max())
    return require(
        bool(same.all()), f"{int(same.sum())} of {len(same)} responses equal, log-probs within {gap:.1e} nats"
    )


def packed(machine: Machine, dtype: torch.dtype) -> str:
    """Log-probs of rows without padding against rows with it."""
    model = small_model(machine, dtype)
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
    model = small_model(machine)
    return equal_tokens(sample(model, backend="slots", rows_at_once=5), sample(model, backend="generate"))


def train(machine: Machine, steps: int, **settings: Any) -> list[dict[str, float]]:
    """The metrics of each step of a run."""
    lengths = [1 + i % PROMPT_LEN for i in range(2 * ROWS)]
    trainer = new_trainer(machine, small_model(machine), lengths, **settings)
    trainer.check_sampler()
    return take_steps(trainer, steps)


def half_precision_mismatch(machine: Machine) -> str:
    """How far sampler and trainer are apart in bfloat16."""
    steps = train(machine, 1, bf16=True, mismatch_action="ignore")
    gap, bound = steps[0]["mismatch/logprob_abs_mean"], BOUNDS["mismatch/logprob_abs_mean"].warn_half
    return require(
        gap <= bound,
        f"mean difference {gap:.1e} nats (bound {bound}), largest ratio {steps[0]['mismatch/ratio_max']:.2f}",
    )


def saves_a_pass(machine: Machine) -> str:
    """`old_policy: auto` in float32: the sampler's log-probs serve from the second step on."""
    steps = train(machine, 4, old_policy="auto")
    recomputed = [int(step["mismatch/recomputed"]) for step in steps]
    return require(recomputed[0] == 1 and recomputed[-1] == 0, f"recomputed in the steps: {recomputed}")


def cached_states(machine: Machine) -> str:
    """A critic on states that wait in host memory against one whose passes compute them anew."""
    # At this rate, wrong states move its errors by 6e-2.
    sizes = {"critic_layout": "cached", "critic_width": 64, "critic_depth": 1, "critic_learning_rate": 0.01}
    kept = train(machine, 2, **sizes)
    with mock.patch.object(StateCache, "states", lambda *_: None):
        anew = train(machine, 2, **sizes)
    errors = [[step["ppo/val/error"] for step in steps] for steps in (kept, anew)]
    gap = max(abs(ours / theirs - 1) for ours, theirs in zip(*errors, strict=True))
    return require(gap <= 1e-3, f"the critic's errors differ by {gap:.1e} of themselves, bound 1e-3")


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
    forget_accelerator()
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


def gathered_shards(machine: Machine) -> str:
    """FSDP2's gathering of a weight against torch's own, a hundred times, before and after work of the same stream."""
    backend = "nccl" if machine.gpus else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(machine.device.type, (1,))
        busy = torch.randn(4096 if machine.gpus else 64, 4096 if machine.gpus else 64, device=machine.device)
        other = torch.cuda.Stream() if machine.gpus else None
        wrong = 0
        for number in range(100):
            weight = distribute_tensor(torch.zeros(1000 + number, 64, device=machine.device), mesh, [Shard(0)])
            with torch.cuda.stream(other):
                busy @ busy
            # The product takes long: who does not wait for it gathers zeros.
            weight.to_local().add_((busy @ busy).abs().amax() + number)
            ours, theirs = _full(weight), weight.full_tensor().clone()
            weight.to_local().zero_()
            wrong += not (torch.equal(ours, theirs) and bool((ours >= number).all()) and bool(ours.any()))
    finally:
        torch.distributed.destroy_process_group()
    return require(wrong == 0, f"{wrong} of 100 weights differ over {backend}, bound 0")


CHECKS: dict[str, Check] = {
    "packed = padded rows, float32": lambda machine: packed(machine, torch.float32),
    "packed = padded rows, bfloat16": lambda machine: packed(machine, torch.bfloat16),
    "refilled slots = model.generate, float32": slots_are_generate,
    "sampler = trainer in bfloat16": half_precision_mismatch,
    "old_policy: auto saves a pass": saves_a_pass,
    "a critic's kept states = those computed anew": cached_states,
    "two processes over NCCL = one": lambda machine: same_run_on_gpus(machine, "ddp"),
    "ZeRO 2 = one process": lambda machine: same_run_on_gpus(machine, "zero2"),
    "ZeRO 3 = one process": lambda machine: same_run_on_gpus(machine, "zero3"),
    "FSDP2 = one process": lambda machine: same_run_on_gpus(machine, "fsdp"),
    "FSDP2's gathering = full_tensor": gathered_shards,
    "four roles on one 7B base": four_roles,
    "decoding's share of the memory bandwidth": bandwidth,
    **gpu_vllm.CHECKS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the checks for which there is time and prints their lines; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm_python", help="interpreter of an environment with vLLM")
    parser.add_argument("--model", help="folder of the model that vLLM samples from, instead of a small random one")
    parser.add_argument("--minutes", type=float, help="for all checks together")
    parser.add_argument("--only", default="", help="make only the checks with this text in their names")
    args = parser.parse_args(arguments)
    limit = 60 * (args.minutes or (15 if args.vllm_python else 5))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus else "cpu")
    where = (
        f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU: tiny shapes on the CPU, figures mean nothing"
    )
    print(f"torch {torch.__version__}; {where}", flush=True)
    begin = time.perf_counter()
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(device, gpus, Path(folder), args.vllm_python, args.model)
        for name, check in CHECKS.items():
            if args.only not in name:
                continue
            start = time.perf_counter()
            left = begin + limit - start
            verdict, figure = outcome(check, machine, min(left, limit / 3)) if left > 0 else ("no time", "not made")
            counts[verdict] += 1
            print(f"{name} | {figure} | {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
        gpu_vllm.end_servers()
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    more = "; more --minutes give every check its time" if counts["no time"] else ""
    print(f"\n{time.perf_counter() - begin:.0f} s for {counts.total()} checks: {summary}{more}")
    return int(counts["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
