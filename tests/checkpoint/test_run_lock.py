"""One run at a time writes an output folder: who is refused, who is let in, and who is waited for."""

import os
import re
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress

import pytest

from alpaca_ppo.checkpoint import directory
from alpaca_ppo.checkpoint.directory import HOLDER_FILE, LOCK_FILE, FolderLock, RunLock, check_unlocked
from alpaca_ppo.distributed import collectives
from alpaca_ppo.trainer.preflight import check_start
from tests.integration.launching import ENVIRONMENT, ROOT
from tests.tiny_runs import metric_lines, prompts, tiny_config, tiny_trainer
from tests.tools.warm_python import warm_python

# The child would keep what it inherits for a minute.
HOLD = """
import os, sys, time
from alpaca_ppo.checkpoint.directory import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire()
if not os.fork():
    time.sleep(60)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_run(folder):
    """A process that holds the lock on `folder`, and has forked another one; its process id is in the file."""
    pipe = subprocess.PIPE
    own = [warm_python(), "-c", HOLD, str(folder)]
    with subprocess.Popen(own, cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        pid = int(holder(folder)[0])
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(directory, "WAIT_SECONDS", 0.3)


def holder(folder):
    """The process, host and start of the run that holds the lock."""
    return re.fullmatch(r"by process (\d+) on (\S+), since (\S+ \S+)", (folder / HOLDER_FILE).read_text()).groups()


def test_a_second_run_is_refused_by_name_wherever_it_would_write_and_the_first_one_is_undisturbed(
    tmp_path, capsys, monkeypatch
):
    trainer = tiny_trainer(tmp_path, trainer_arguments={"eval_dataset": prompts(3)})
    with other_run(tmp_path):
        owner = holder(tmp_path)
        assert owner[1] == os.uname()[1] and owner[2].startswith("20")
        before = sorted(path.name for path in tmp_path.iterdir())
        for writes in (
            trainer.train,
            trainer.evaluate,
            trainer.save_model,
            trainer.save_checkpoint,
            lambda: trainer.step(trainer.prompt_batches(0)),
            lambda: check_start(tiny_config(tmp_path), None),
        ):
            with pytest.raises(ValueError, match="in use, locked") as refused:
                writes()
            assert all(str(value) in str(refused.value) for value in (tmp_path, *owner))
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert f"locked by process {owner[0]}" in capsys.readouterr().out
        # A folder that the user names, and one that is only read, need no lock.
        trainer.save_model(str(tmp_path / "elsewhere"))
    # A process that was killed keeps its lock until the system has ended it; its child does not keep it.
    monkeypatch.setattr(directory, "WAIT_SECONDS", 30.0)
    trainer.train()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_start_waits_for_a_run_that_is_just_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "WAIT_SECONDS", 30.0)
    with other_run(tmp_path) as pid:
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        lock = FolderLock(tmp_path)
        lock.acquire()
        assert int(holder(tmp_path)[0]) == os.getpid()
        lock.release()
        # What the dead run left was this run's.
        assert list(tmp_path.iterdir()) == []


def test_a_holder_that_has_not_given_its_name_yet_is_one_that_has_just_started(tmp_path):
    with other_run(tmp_path):
        (tmp_path / HOLDER_FILE).rename(tmp_path / "aside")
        with pytest.raises(ValueError, match="locked by a process that has just started"):
            check_unlocked(tmp_path)
        (tmp_path / "aside").rename(tmp_path / HOLDER_FILE)


def test_the_process_that_holds_the_lock_is_let_in_again_until_its_last_user_is_done(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path / "." / "")
    first.acquire()
    second.acquire()
    check_unlocked(tmp_path)
    first.release()
    assert int(holder(tmp_path)[0]) == os.getpid()
    second.release()
    assert list(tmp_path.iterdir()) == []
    check_unlocked(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_trainers_follow_one_another_in_one_process_and_a_finished_one_holds_nothing(tmp_path):
    """A notebook that trains, evaluates and saves must not block a shell that continues the run."""
    settings = {"save_steps": 1, "trainer_arguments": {"eval_dataset": prompts(3)}}
    trainer = tiny_trainer(tmp_path, **settings)
    trainer.train()
    assert not (tmp_path / LOCK_FILE).exists()
    trainer.evaluate()
    trainer.save_model()
    assert not (tmp_path / LOCK_FILE).exists()
    longer = tiny_trainer(tmp_path, **settings, total_episodes=30)
    longer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(tmp_path)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="holds a finished run"):
        tiny_trainer(tmp_path).train()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_loop_of_ones_own_holds_the_lock_from_its_first_step_on(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.step(trainer.prompt_batches(0))
    assert (tmp_path / LOCK_FILE).exists()
    trainer.save_model()
    trainer.save_checkpoint()
    assert (tmp_path / LOCK_FILE).exists()
    trainer.run_lock.release()
    assert not (tmp_path / LOCK_FILE).exists()


class Rank:
    num_processes = 2

    def __init__(self, is_main_process):
        self.is_main_process = is_main_process


def test_the_refusal_reaches_the_ranks_that_do_not_lock(tmp_path, monkeypatch):
    cause = "ValueError: output_dir (x) is in use, locked"
    monkeypatch.setattr(collectives, "gather_list", lambda own, accelerator: [cause, own])
    with pytest.raises(RuntimeError, match=r"process 0 failed, .*ValueError: output_dir \(x\)"):
        RunLock(Rank(False), tmp_path).acquire()
    monkeypatch.setattr(collectives, "gather_list", lambda own, accelerator: [None, own])
    with RunLock(Rank(False), tmp_path).held():
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["run", "../link/run"])
def test_a_run_keeps_its_lock_when_the_current_folder_or_a_link_on_the_path_changes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "gather_list", lambda own, accelerator: [own])
    for name in ("first", "second"):
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "first")
    (tmp_path / "link").symlink_to("first")
    lock = RunLock(Rank(True), folder)
    with pytest.raises(OSError, match="the real cause"), lock.held():
        os.chdir(tmp_path / "second")
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("second")
        with lock.held():
            assert (tmp_path / "first/run" / LOCK_FILE).exists()
        assert (tmp_path / "first/run" / LOCK_FILE).exists()
        raise OSError("the real cause")
    assert not list((tmp_path / "first/run").iterdir()) + list((tmp_path / "second/run").iterdir())
