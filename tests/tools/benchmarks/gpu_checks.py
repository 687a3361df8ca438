"""The GPU part of the benchmark on a CPU, with shapes so small that its figures mean nothing."""

import time
from contextlib import contextmanager

import pytest
import torch
from accelerate.state import AcceleratorState

from alpaca_ppo.ppo.metrics import StepRecord
from examples.gpu_speed import Peak, build, step_bytes
from tests.tools.benchmarks.flops import flop_counter
from tests.tools.benchmarks.gpu import Update, decoding_table, measured_update

CPU = torch.device("cpu")
# A machine that can do what one step needs only in years.
PEAK = Peak(1.0, 1.0, "invented")


def test_every_way_decodes():
    ways = ("slots", "generate", "static cache")
    lines = decoding_table(CPU, PEAK, shapes=["tiny"], rows=[2], ways=ways, dtype=torch.float32, prompt_len=3, tokens=4)
    assert lines[-1].startswith("| tiny, 2 rows | ")
    assert lines[-1].count("|") == len(ways) + 2


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_an_update_executes_the_flops_that_it_is_judged_by(lora, monkeypatch):
    steps, measure = [], StepRecord.measure

    @contextmanager
    def counted(record, phase, *how):
        start = time.perf_counter()
        with flop_counter() as counter, measure(record, phase, *how) as count:
            yield count
        steps.append((phase, counter.get_total_flops(), time.perf_counter() - start))

    monkeypatch.setattr(StepRecord, "measure", counted)
    try:
        # Without autocast: it would only make copies of the weights.
        update = measured_update("tiny", CPU, lora=lora, rows=2, tokens=8, bf16=False)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    flops, seconds = next((flops, seconds) for phase, flops, seconds in reversed(steps) if phase == "update")
    assert 0.999 <= flops / update.flops <= 1.02
    assert 0 < update.seconds <= seconds


def test_a_share_of_the_peak_is_flops_by_seconds_and_peak():
    # 600 FLOPs in 3 seconds, where 1000 a second could be.
    assert Update(600, 3.0).share(Peak(1.0, 1000.0, "invented")) == 0.2


def test_a_decode_step_reads_each_weight_and_the_cache_once():
    model = build("tiny", CPU, torch.float32)
    weights = sum(parameter.numel() for parameter in model.parameters())
    # Keys and values (2) of 2 layers, 2 heads of size 32, for 3 rows of 5 tokens.
    assert step_bytes(model, rows=3, columns=5) == 4 * (weights + 2 * 2 * 2 * 32 * 3 * 5)
    untied = build("tiny", CPU, torch.float32, tie_word_embeddings=False)
    # Few lines of the embedding are read; the head, which is of the same size, is read whole.
    assert step_bytes(untied, rows=3, columns=5) == 4 * (weights + 2 * 2 * 2 * 32 * 3 * 5)
