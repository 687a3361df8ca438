"""A part of the table of `examples/same_run.py`, by its own functions: one run under DDP and every ZeRO stage."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
from transformers import AutoTokenizer

from alpaca_ppo.ppo.batch_packing import plan_packed_micro_batches
from examples import same_run
from examples.same_run import Difference, compare, launch, write_run
from tests.tools.warm_python import warm_python

pytestmark = pytest.mark.proof
SMALL, MIDDLE, LARGE = same_run.MICRO_BATCHES
PART = [("ddp", "full", SMALL), ("zero2", "lora", MIDDLE), ("zero3", "full", LARGE), ("fsdp", "full", SMALL)]


@pytest.fixture(scope="module", autouse=True)
def short_runs() -> Iterator[None]:
    """Runs of two steps, in processes that `launch` starts warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python())
        patch.setattr(same_run, "STEPS", 2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run as users have it, made on one process with all weights training and with LoRA."""
    folder = tmp_path_factory.mktemp("same")
    write_run(folder)
    for trained in same_run.TRAINED:
        launch(folder, "single", trained, LARGE)
    return folder


@pytest.mark.parametrize(("processes", "trained", "micro_batch"), PART)
def test_processes_stage_and_micro_batches_do_not_change_the_run(processes, trained, micro_batch, folder):
    difference = compare(launch(folder, processes, trained, micro_batch), folder / f"single-{trained}-{LARGE}")
    assert difference.within_bounds, difference


def test_the_numbers_of_tokens_are_different_micro_batches(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / f"single-full-{LARGE}/rollouts/step_000001.jsonl").read_text().splitlines()
    rows = map(json.loads, lines[: same_run.STEP_ROWS])
    lengths = [len(tokenizer(row["prompt"])["input_ids"]) + len(row["tokens"]) for row in rows]
    for ranks in (1, 2):
        plans = [
            plan_packed_micro_batches(lengths, num_ranks=ranks, max_tokens=tokens) for tokens in same_run.MICRO_BATCHES
        ]
        small, middle, large = (len(plan[0]) for plan in plans)
        assert small > middle > large == 1


def test_a_difference_in_tokens_metrics_or_weights_is_found(folder, tmp_path):
    reference = folder / f"single-full-{LARGE}"
    for name in ("tokens", "metric", "weights"):
        shutil.copytree(reference, tmp_path / name)
    path = tmp_path / "tokens/rollouts/step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["tokens"][0]["id"] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "metric/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["objective/entropies"] *= 1.001
    lines[1]["objective/scores"] += 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "weights/final/value/critic_head.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["weight"] *= 1.01
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    tokens, metric, weights = (compare(tmp_path / name, reference) for name in ("tokens", "metric", "weights"))
    assert (tokens.tokens, tokens.metric, tokens.weights) == (1, 0.0, 0.0)
    assert metric.metric_name == "objective/entropies" and metric.metric == pytest.approx(1e-3, rel=1e-3)
    assert weights.weights == pytest.approx(0.01, rel=1e-3)
    assert not any(difference.within_bounds for difference in (tokens, metric, weights))
    assert compare(reference, reference).within_bounds


def test_the_command_writes_the_table_and_fails_where_a_run_is_another_one(tmp_path, monkeypatch, capsys):
    differences = {"ddp": Difference(0, 2e-7, "ppo/loss/total", 3e-6), "zero3": Difference(0, 2e-7, "x", 2e-4)}
    rows = {("lora", name, 2): (difference, 7.4) for name, difference in differences.items()}
    monkeypatch.setattr(same_run, "measure", lambda folder: (rows, {"lora": 0.5}))
    with pytest.raises(SystemExit, match=r"these runs differ:\n\('lora', 'zero3', 2\)"):
        same_run.main(["--report", str(tmp_path / "table.md")])
    text = (tmp_path / "table.md").read_text()
    assert "| LoRA | 2 processes, DDP | 2 | 0 | 2.0e-07 | 3.0e-06 | 7 |" in text
    assert "its final KL per response is 0.50 nats (LoRA)" in text and text in capsys.readouterr().out
    del rows["lora", "zero3", 2]
    same_run.main(["--report", str(tmp_path / "table.md")])


def test_a_run_that_fails_says_why(tmp_path):
    write_run(tmp_path)
    with pytest.raises(RuntimeError, match="reward_funcs"):
        launch(tmp_path, "single", "full", 4, reward_funcs="no.such:function")
