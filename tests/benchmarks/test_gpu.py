"""The GPU part of the benchmark on a CPU, with shapes so small that its figures mean nothing."""

import torch
from accelerate.state import AcceleratorState

from examples.gpu_speed import Peak, build, step_bytes
from tests.benchmarks.gpu import decoding_table, update_share

CPU = torch.device("cpu")
# A machine that can do what one step needs only in years.
PEAK = Peak(1.0, 1.0, "invented")


def test_every_way_decodes():
    ways = ("slots", "decode", "static cache")
    lines = decoding_table(CPU, PEAK, shapes=["tiny"], rows=[2], ways=ways, dtype=torch.float32, prompt_len=3, tokens=4)
    assert lines[-1].startswith("| tiny, 2 rows | ")
    assert lines[-1].count("|") == len(ways) + 2


def test_an_update_reaches_a_share_of_the_peak():
    try:
        assert update_share("tiny", CPU, PEAK, lora=True, rows=2, tokens=8, dtype="bfloat16") > 0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_decode_step_reads_each_weight_and_the_cache_once():
    model = build("tiny", CPU, torch.float32)
    weights = sum(parameter.numel() for parameter in model.parameters())
    # Keys and values (2) of 2 layers, 2 heads of size 8, for 3 rows of 5 tokens.
    assert step_bytes(model, rows=3, columns=5) == 4 * (weights + 2 * 2 * 2 * 8 * 3 * 5)
    untied = build("tiny", CPU, torch.float32, tie_word_embeddings=False)
    # Few lines of the embedding are read; the head, which is of the same size, is read whole.
    assert step_bytes(untied, rows=3, columns=5) == 4 * (weights + 2 * 2 * 2 * 8 * 3 * 5)
