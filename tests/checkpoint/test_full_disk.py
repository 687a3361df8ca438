"""A full disk: the error names the path, no partial file stays, and older files are intact.

Here the length of files is limited, which works anywhere; tests/integration fills a disk.
"""

import errno
import resource

import pytest

from alpaca_ppo.atomic_io import explain_disk_full, is_full, write_text_atomically
from tests.tiny_runs import LargestFile, metric_lines, tiny_trainer
from tests.tracking.test_run_log import make_log


@pytest.fixture
def largest_file():
    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    return limit


def everything(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full_after(step, size, folder, **overrides):
    """Runs until the disk is full; returns the error's text and the files that existed before the first step."""
    arguments = {"callbacks": [LargestFile(step, size)]}
    trainer = tiny_trainer(folder, **overrides, trainer_arguments=arguments)
    with pytest.raises(OSError, match="no room for") as raised:
        trainer.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    assert raised.value.errno == errno.ENOSPC
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")], "nothing half written is left"
    return str(raised.value)


def test_a_checkpoint_that_does_not_fit_leaves_the_older_one_from_which_the_run_goes_on(tmp_path):
    settings = {"save_steps": 1, "total_episodes": 30}
    message = full_after(2, 40_000, tmp_path / "full", **settings)
    assert f"no room for {tmp_path / 'full/checkpoint-2'}: its disk has " in message
    assert [path.name for path in (tmp_path / "full").glob("checkpoint-*")] == ["checkpoint-1"]
    tiny_trainer(tmp_path / "full", **settings).train(resume_from_checkpoint=True)
    tiny_trainer(tmp_path / "whole", **settings).train()
    assert metric_lines(tmp_path / "full") == metric_lines(tmp_path / "whole")


def test_final_models_that_do_not_fit_are_absent(tmp_path):
    message = full_after(2, 40_000, tmp_path)
    assert f"no room for {tmp_path / 'final/policy'}: " in message
    assert not list((tmp_path / "final").iterdir())


def test_records_that_do_not_fit_end_the_run_with_their_name(tmp_path):
    message = full_after(1, 100, tmp_path / "metrics", num_logged_rollouts=0)
    assert f"no room for {tmp_path / 'metrics/metrics.jsonl'}: " in message
    message = full_after(1, 3000, tmp_path / "rollouts")
    assert f"no room for {tmp_path / 'rollouts/rollouts/step_000002.jsonl'}: " in message


def test_a_text_that_does_not_fit_leaves_the_old_one(tmp_path, largest_file):
    path = tmp_path / "README.md"
    write_text_atomically(path, "old")
    largest_file(100)
    with pytest.raises(OSError, match=f"no room for {path}: its disk has [0-9]+ bytes left"):
        write_text_atomically(path, "x" * 500)
    assert everything(tmp_path) == {path.relative_to(tmp_path): b"old"}


def test_only_a_full_disk_is_told_of(tmp_path):
    assert is_full(OSError(errno.EDQUOT, "quota")) and not is_full(OSError(errno.EACCES, "no"))
    assert is_full(RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert not is_full(RuntimeError("28"))
    with pytest.raises(ValueError, match="mine"), explain_disk_full(tmp_path):
        raise ValueError("mine")
    with pytest.raises(OSError, match="no room for .*runs"), explain_disk_full(tmp_path / "runs"):
        raise OSError(errno.ENOSPC, "no space")


def test_a_metrics_line_cut_short_is_no_line_for_the_run_that_goes_on(tmp_path, largest_file):
    log = make_log(tmp_path)
    log.log({"a": 1.0}, 1)
    largest_file(len((tmp_path / "metrics.jsonl").read_bytes()) + 5)
    with pytest.raises(OSError, match=r"no room for .*metrics\.jsonl"):
        log.log({"a": 1.0}, 2)
    largest_file(resource.RLIM_INFINITY)
    assert len((tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[-1]) == 5
    make_log(tmp_path, begin={"step": 1, "lines": 1}).log({"a": 3.0}, 2)
    assert [line["a"] for line in metric_lines(tmp_path)] == [1.0, 3.0]
