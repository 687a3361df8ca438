"""Real processes that must not go on: none is left behind, and the cause is on the screen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.tiny_runs import metric_lines

SCRIPT = Path(__file__).with_name("run_tiny.py")
LAUNCH_CONFIG = Path(__file__).parents[2] / "examples/accelerate_configs/ddp_cpu.yaml"


def start(output_dir: Path, *settings: str, processes: int) -> subprocess.CompletedProcess:
    """run_tiny.py, under `accelerate launch` where it is more than one process."""
    command = [sys.executable, str(SCRIPT), str(output_dir), *settings]
    if processes > 1:
        config = ["--config_file", str(LAUNCH_CONFIG), "--num_processes", str(processes), "--main_process_port", "0"]
        command = [sys.executable, "-m", "accelerate.commands.launch", *config, *command[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("settings", [(), ("lora=true", "critic_layout=adapter", "gradient_checkpointing=true")])
def test_a_loss_that_is_nan_on_one_rank_is_skipped_on_all_and_the_run_is_that_of_one_process(settings, tmp_path):
    asked = ("total_episodes=30", "poison=[[0,1],[1,0],[2,5]]", "max_skipped_updates=3", *settings)
    for processes, name in ((1, "one"), (2, "two")):
        outcome = start(tmp_path / name, *asked, processes=processes)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    one, two = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("one", "two"))
    assert all(bool(tensor.isfinite().all()) for tensor in two.values())
    for name in one:
        assert_close(two[name], one[name], rtol=1e-6, atol=1e-6)
    for first, second in zip(metric_lines(tmp_path / "one"), metric_lines(tmp_path / "two"), strict=True):
        assert second["ppo/policy/skipped_updates"] == 1
        for name in first:
            if "padding" not in name:
                assert second[name] == pytest.approx(first[name], rel=1e-6, abs=1e-8), name
    records = [json.loads(line) for line in (tmp_path / "two/skipped_updates.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["cause"].count("on rank") == 1 for record in records), "one rank's loss, found by both"


def test_all_ranks_end_with_the_cause_where_no_update_may_be_skipped(tmp_path):
    outcome = start(tmp_path, "total_episodes=30", "poison=[[1,0]]", "save_steps=1", processes=2)
    assert outcome.returncode != 0
    assert outcome.stderr.count("FloatingPointError: step 2: loss/policy is nan on rank") == 2, outcome.stderr
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    resumed = start(
        tmp_path, "total_episodes=30", "poison=[[1,0]]", "max_skipped_updates=1", "resume=true", processes=2
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["ppo/policy/skipped_updates"] for line in metric_lines(tmp_path)] == [0, 1, 0]
