"""Real processes that must not go on: none is left behind, and the cause is on the screen."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.tiny_runs import metric_lines

SCRIPT = Path(__file__).with_name("run_tiny.py")
LAUNCH_CONFIG = Path(__file__).parents[2] / "examples/accelerate_configs/ddp.yaml"


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
    for rank in (0, 1):
        # The launcher tells it once more at the end.
        assert f"[rank{rank}]: FloatingPointError: step 2: loss/policy is nan on rank" in outcome.stderr, outcome.stderr
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    resumed = start(
        tmp_path, "total_episodes=30", "poison=[[1,0]]", "max_skipped_updates=1", "resume=true", processes=2
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["ppo/policy/skipped_updates"] for line in metric_lines(tmp_path)] == [0, 1, 0]


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int, otherwise: str) -> Iterator[tuple[str, ...]]:
    """Makes `folder` a small disk; where mounting is not allowed, yields `otherwise`, a setting of run_tiny.py."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], capture_output=True)
    try:
        yield (otherwise,) if mounted.returncode else ()
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)


def enlarge(folder: Path) -> None:
    if folder.is_mount():
        subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)


def test_a_full_disk_ends_both_ranks_and_the_run_goes_on_when_there_is_room(tmp_path):
    folder, settings = tmp_path / "disk", ("total_episodes=30", "save_steps=1")
    # A checkpoint has about 930 kB.
    with small_disk(folder, 2400, "largest_file=[3,100000]") as limit:
        full = start(folder, *settings, *limit, processes=2)
        assert full.returncode != 0
        no_room = f"OSError: [Errno 28] no room for {folder}/checkpoint-3: it needed "
        assert no_room in full.stderr, full.stderr
        assert f"RuntimeError: process 0 failed, so this process stops too. {no_room}" in full.stderr, full.stderr
        assert [str(path) for path in folder.rglob(".*")] == []
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
        enlarge(folder)
        again = start(folder, *settings, "resume=true", processes=2)
        assert again.returncode == 0, again.stdout + again.stderr
        assert start(tmp_path / "whole", *settings, processes=2).returncode == 0
        assert metric_lines(folder) == metric_lines(tmp_path / "whole")


def test_final_models_without_room_end_both_ranks(tmp_path):
    folder = tmp_path / "disk"
    # The final policy has 170 kB.
    with small_disk(folder, 150, "largest_file=[2,100000]") as limit:
        full = start(folder, *limit, processes=2)
        assert full.returncode != 0
        assert f"OSError: [Errno 28] no room for {folder}/final/policy: it needed " in full.stderr, full.stderr
        assert list((folder / "final").iterdir()) == []


@pytest.mark.parametrize("report_to", ["none", "tensorboard"])
def test_records_without_room_end_both_ranks(report_to, tmp_path):
    folder = tmp_path / "disk"
    settings = ("total_episodes=400", f"report_to=[{report_to}]", "num_logged_rollouts=0")
    with small_disk(folder, 36, "largest_file=[1,3000]") as limit:
        full = start(folder, *settings, *limit, processes=2)
        assert full.returncode != 0
        assert f"no room for {folder}/" in full.stderr, full.stderr
