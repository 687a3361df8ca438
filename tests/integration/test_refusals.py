"""Real processes that must not go on: none is left behind, and the cause is on the screen."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launching import RUN_TINY, start
from tests.tiny_runs import metric_lines


def on_two(output_dir: Path, *settings: str) -> subprocess.CompletedProcess:
    """run_tiny.py on two processes."""
    return start(RUN_TINY, output_dir, *settings, config="ddp")


@pytest.mark.proof
def test_all_ranks_end_with_the_cause_where_no_update_may_be_skipped(tmp_path):
    outcome = on_two(tmp_path, "total_episodes=30", "poison=[[1,0]]", "save_steps=1")
    assert outcome.returncode != 0
    for rank in (0, 1):
        # The launcher tells it once more at the end.
        assert f"[rank{rank}]: FloatingPointError: step 2: loss/policy is nan on rank" in outcome.stderr, outcome.stderr
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    resumed = on_two(tmp_path, "total_episodes=30", "poison=[[1,0]]", "max_skipped_updates=1", "resume=true")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["ppo/policy/skipped_updates"] for line in metric_lines(tmp_path)] == [0, 1, 0]


@pytest.mark.proof
def test_all_ranks_end_before_the_first_rollout_where_the_sampler_is_not_the_policy(tmp_path):
    outcome = on_two(tmp_path, "arch=rwkv", "dtype=float32", "generation_backend=generate")
    assert outcome.returncode != 0
    for rank in (0, 1):
        cause = f"[rank{rank}]: ValueError: sampler and trainer disagree "
        assert cause in outcome.stderr, outcome.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int, otherwise: str, *settings: str) -> Iterator[tuple[str, ...]]:
    """Makes `folder` a small disk and yields `settings` of run_tiny.py; where mounting is not allowed, `otherwise`."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], capture_output=True)
    try:
        yield (otherwise,) if mounted.returncode else settings
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)


def enlarge(folder: Path) -> None:
    if folder.is_mount():
        subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)


@pytest.mark.proof
def test_a_full_disk_ends_both_ranks_and_the_run_goes_on_when_there_is_room(tmp_path):
    folder, settings = tmp_path / "disk", ("total_episodes=30", "save_steps=1")
    # A checkpoint has about 930 kB.
    with small_disk(folder, 2400, "largest_file=[3,100000]") as limit:
        full = on_two(folder, *settings, *limit)
        assert full.returncode != 0
        no_room = f"OSError: [Errno 28] no room for {folder}/checkpoint-3: its disk has "
        assert no_room in full.stderr, full.stderr
        assert f"RuntimeError: process 0 failed, so this process stops too. {no_room}" in full.stderr, full.stderr
        assert [str(path) for path in folder.rglob(".*")] == []
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
        enlarge(folder)
        again = on_two(folder, *settings, "resume=true")
        assert again.returncode == 0, again.stdout + again.stderr
        assert on_two(tmp_path / "whole", *settings).returncode == 0
        assert metric_lines(folder) == metric_lines(tmp_path / "whole")


@pytest.mark.proof
def test_final_models_without_room_end_both_ranks(tmp_path):
    folder = tmp_path / "disk"
    # The final policy has 170 kB; there is room for it when the run starts.
    with small_disk(folder, 1000, "largest_file=[2,100000]", "fill_disk=[2,130000]") as limit:
        full = on_two(folder, *limit)
        assert full.returncode != 0
        assert f"OSError: [Errno 28] no room for {folder}/final/policy: its disk has " in full.stderr, full.stderr
        assert list((folder / "final").iterdir()) == []


@pytest.mark.proof
@pytest.mark.parametrize("report_to", ["none", "tensorboard"])
def test_records_without_room_end_both_ranks(report_to, tmp_path):
    folder = tmp_path / "disk"
    settings = ("total_episodes=400", f"report_to=[{report_to}]", "num_logged_rollouts=0")
    with small_disk(folder, 1000, "largest_file=[1,3000]", "fill_disk=[1,24000]") as limit:
        full = on_two(folder, *settings, *limit)
        assert full.returncode != 0
        assert f"no room for {folder}/" in full.stderr, full.stderr
