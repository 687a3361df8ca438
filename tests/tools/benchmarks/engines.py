"""Tokens a second of slots, `model.generate` and vLLM on a CPU, and the seconds of a publish.

`VLLM_PYTHON=... python -m tests.tools.benchmarks.engines` writes them into examples/performance.md, in ten minutes on a
quiet machine.

Each round lets the engines sample one after the other, on prompts of its own, so that none has them in a cache. No
response ends before its last token. Seconds are of processor time, with one thread for every engine and all processes
of the server counted, because they hardly depend on what else the machine does.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import GenerationConfig, PreTrainedModel

from alpaca_ppo import PPOConfig
from alpaca_ppo.generation import Backend, SamplingParams, generate, make_backend
from alpaca_ppo.models import Policy
from alpaca_ppo.types import PromptBatch
from examples.gpu_speed import PAD, build
from tests.tools.benchmarks.report import Machine, machine_facts, write_between_markers
from tests.tools.benchmarks.step import PAGE

BEGIN = "<!-- tests.tools.benchmarks.engines writes this -->"
CPU, THREADS = torch.device("cpu"), 1
ROWS = (8, 64, 256)
SETTLES = 3.0
"""Seconds for which the server's processes may still spin after an answer."""
WEIGHTS_OF_7B = 7_615_616_512
"""Of Qwen2.5-7B, whose head is not tied."""


@dataclass(frozen=True)
class Shape:
    """A model, and the lengths that it samples."""

    name: str
    title: str
    fields: dict[str, int]
    dtype: torch.dtype
    prompt_len: int
    response_len: int
    rounds: tuple[int, ...]
    """That are measured, for each of `ROWS`."""


SHAPES = {
    "tiny": Shape(
        "tiny",
        "tiny (4 layers of 128, 512 tokens)",
        # Heads of 32, the smallest of vLLM's on a CPU.
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512},
        torch.float32,
        prompt_len=32,
        response_len=64,
        rounds=(5, 5, 5),
    ),
    "0.5B": Shape("0.5B", "Qwen2.5-0.5B", {}, torch.bfloat16, prompt_len=4, response_len=8, rounds=(3, 2, 1)),
}
PUBLISHES = 5


def processor_seconds() -> float:
    """Processor time of this process and of the server's."""
    used = time.process_time()
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        used += times.user + times.system
    return used


def spent(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that `call` takes: of processor time, and by the clock."""
    time.sleep(SETTLES)
    cpu, start = processor_seconds(), time.perf_counter()
    call()
    return processor_seconds() - cpu, time.perf_counter() - start


def prompts(model: PreTrainedModel, rows: int, length: int, number: int) -> PromptBatch:
    """The prompts of round `number`."""
    queries = torch.randint(2, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(number))
    return PromptBatch(
        queries=queries, query_attn_masks=torch.ones_like(queries), prompt_ids=torch.arange(rows), rows=[]
    )


def ways_of(
    model: PreTrainedModel, backend: Backend, batch: PromptBatch, tokens: int
) -> dict[str, Callable[[], object]]:
    """How each engine samples `tokens` tokens for each prompt of `batch`."""
    params = SamplingParams(tokens, 1.0, PAD, ())
    plain = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=None)
    mask = batch["query_attn_masks"]
    return {
        "slots": lambda: generate(model, batch, params, backend="slots"),
        "`model.generate`": lambda: model.generate(  # type: ignore[operator]
            batch["queries"], attention_mask=mask, generation_config=plain
        ),
        "vLLM": lambda: generate(model, batch, params, backend=backend),
    }


def measured(shape: Shape, python: str) -> tuple[list[str], str, float]:
    """The lines of the table about `shape`, the line about a publish of it, and the seconds for a byte of one."""
    model, lines = build(shape.name, CPU, shape.dtype, **shape.fields), []
    with tempfile.TemporaryDirectory() as folder:
        backend = served(folder, python, shape)
        publish(backend, model)
        for way in ways_of(model, backend, prompts(model, ROWS[0], shape.prompt_len, -1), shape.response_len).values():
            way()
        for rows, rounds in zip(ROWS, shape.rounds, strict=True):
            seconds: dict[str, list[tuple[float, float]]] = {}
            for number in range(rounds):
                batch = prompts(model, rows, shape.prompt_len, number)
                for name, way in ways_of(model, backend, batch, shape.response_len).items():
                    seconds.setdefault(name, []).append(spent(way))
            tokens, cells = rows * shape.response_len, []
            for found in seconds.values():
                cpu, clock = medians(found)
                cells.append(f"{tokens / cpu:,.0f} ({tokens / clock:,.0f})")
            lines.append(f"| {shape.title}, {rows} rows | {' | '.join(cells)} |")
            print(lines[-1], seconds, flush=True)
        cpu, clock = medians([spent(lambda backend=backend: publish(backend, model)) for _ in range(PUBLISHES)])
        # With a head of its own, which a server on a CPU is given.
        size = sum(parameter.nbytes for parameter in [*model.parameters(), model.get_output_embeddings().weight])
        line = f"| {shape.title}, {str(shape.dtype)[6:]} | {size / 1e9:.3g} | {cpu:.2g} ({clock:.2g}) |"
        print(line, flush=True)
        del backend
        gc.collect()
    return lines, line, cpu / size


def medians(found: Sequence[tuple[float, float]]) -> list[float]:
    """Of the processor times, and of those by the clock."""
    return [statistics.median(times) for times in zip(*found, strict=True)]


def served(folder: str, python: str, shape: Shape) -> Backend:
    """A backend that will start a server for `shape`."""
    lengths = {"query_len": shape.prompt_len, "response_len": shape.response_len}
    args = PPOConfig(
        output_dir=folder,
        generation_backend="vllm",
        vllm_python=python,
        vllm_dtype=str(shape.dtype)[6:],
        vllm_args=["--max-num-seqs", str(max(ROWS))],
        use_cpu=True,
        **lengths,
    )
    return make_backend("vllm", args)


def publish(backend: Backend, model: PreTrainedModel) -> None:
    """Gives the server the weights of `model`; the first time it is started on them."""
    backend.sync(Policy(model), lambda **how: model.named_parameters())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    python = os.environ["VLLM_PYTHON"]
    torch.set_num_threads(THREADS)
    # The server's processes take them over. It would else hold every core.
    os.environ |= {
        "OMP_NUM_THREADS": str(THREADS),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    machine = Machine.begin(THREADS)
    found = [measured(shape, python) for shape in SHAPES.values()]
    size, seconds_per_byte = 2 * WEIGHTS_OF_7B, found[-1][2]
    lengths = "; ".join(
        f"{name}: {str(shape.dtype)[6:]}, prompts of {shape.prompt_len} tokens, responses of {shape.response_len}, "
        f"{', '.join(map(str, shape.rounds))} rounds"
        for name, shape in SHAPES.items()
    )
    lines = [
        machine_facts(machine.end(), {}),
        "",
        f"Medians, random weights ({lengths}).",
        "",
        "| tokens per second of processor time (by the clock) | slots | `model.generate` | vLLM |",
        "|---|---|---|---|",
        *(line for lines, _, _ in found for line in lines),
        "",
        f"A publish writes the weights, lets the server read them and empties its cache (median of {PUBLISHES}). On a "
        "CPU the server gets a head of its own where it is tied to the embedding.",
        "",
        "| publish | GB | seconds of processor time (by the clock) |",
        "|---|---|---|",
        *(line for _, line, _ in found),
        f"| Qwen2.5-7B, bfloat16 | {size / 1e9:.3g} | {size * seconds_per_byte:.2g}, by the bytes |",
        "",
    ]
    write_between_markers(Path(PAGE), "\n".join(lines), BEGIN)


if __name__ == "__main__":
    main()
