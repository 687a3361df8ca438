"""One run at a time writes an output folder: who is refused, who is let in, and who is waited for."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest

from alpaca_ppo.checkpoint import run_lock
from alpaca_ppo.checkpoint.run_lock import LOCK_FILE, RunLock, check_kept, check_unlocked, lock_folder, unlock_folder
from alpaca_ppo.distributed import collectives
from alpaca_ppo.trainer.preflight import check_start
from tests.integration.launching import ENVIRONMENT, ROOT
from tests.tiny_runs import metric_lines, prompts, tiny_config, tiny_trainer
from tests.tools.warm_python import warm_python

HOLD = """
import sys
from alpaca_ppo.checkpoint.run_lock import lock_folder
lock_folder(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""
OTHER_HOST = {"program": "alpaca_ppo", "host": "node-7", "pid": 4711, "since": "2026-01-02 03:04:05", "machine": "m7"}


@contextmanager
def other_run(folder):
    """A process that holds the lock on `folder`; its process id is in the file."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [warm_python(), "-c", HOLD, str(folder)], cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(run_lock, "_POLL_SECONDS", 0.02)


def record(folder):
    """What the file says; only where this process does not hold the lock, which reading would drop."""
    return json.loads((folder / LOCK_FILE).read_text())


def test_a_second_run_is_refused_by_name_wherever_it_would_write_and_the_first_one_is_undisturbed(
    tmp_path, capsys, monkeypatch
):
    trainer = tiny_trainer(tmp_path, trainer_arguments={"eval_dataset": prompts(3)})
    with other_run(tmp_path):
        owner = record(tmp_path)
        before = sorted(path.name for path in tmp_path.iterdir())
        message = (
            rf"output_dir \({tmp_path}\) is in use by another run, locked by process {owner['pid']} on "
            rf"{os.uname()[1]}, since 20\d\d-.*; wait for it to end or stop it, or choose another output_dir"
        )
        for writes in (
            trainer.train,
            trainer.evaluate,
            trainer.save_model,
            trainer.save_checkpoint,
            lambda: trainer.step([]),
            lambda: trainer.run_log,
            lambda: check_start(tiny_config(tmp_path), None),
        ):
            with pytest.raises(ValueError, match=message):
                writes()
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert f"locked by process {owner['pid']}" in capsys.readouterr().out
        # A folder that the user names, and one that is only read, need no lock.
        trainer.save_model(str(tmp_path / "elsewhere"))
    # A process that was killed keeps its lock until the system has ended it.
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 30.0)
    trainer.train()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_start_waits_for_a_run_that_is_just_ending(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 30.0)
    with other_run(tmp_path) as process:
        owner = record(tmp_path)
        threading.Timer(0.3, process.kill).start()
        lock_folder(tmp_path)
    assert f"is locked by process {owner['pid']} on" in capsys.readouterr().out
    # What the dead run left is this run's now.
    unlock_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dead_run_of_this_machine_is_replaced_at_once(tmp_path, monkeypatch, capsys):
    with other_run(tmp_path) as process:
        pid = record(tmp_path)["pid"]
        os.kill(pid, signal.SIGKILL)
        process.wait(timeout=30)
    assert record(tmp_path)["pid"] == pid
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 0.0)
    check_unlocked(tmp_path)
    lock_folder(tmp_path)
    unlock_folder(tmp_path)
    assert capsys.readouterr().out == ""


def test_the_process_that_holds_the_lock_is_let_in_again_until_its_last_user_is_done(tmp_path):
    lock_folder(tmp_path)
    lock_folder(tmp_path / "." / "")
    check_unlocked(tmp_path)
    unlock_folder(tmp_path)
    assert (tmp_path / LOCK_FILE).exists()
    unlock_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


FORK = """
import fcntl, os, sys, time
from alpaca_ppo.checkpoint import run_lock
run_lock.WAIT_SECONDS, run_lock.HEARTBEAT_SECONDS = 0.1, 0.05
run_lock.lock_folder(sys.argv[1])
file = run_lock._lock_path(sys.argv[1])

def in_child(function):
    child = os.fork()
    if not child:
        try:
            function()
        except (ValueError, BlockingIOError) as error:
            print(type(error).__name__, str(error)[:10], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    run_lock.check_kept(sys.argv[1])

in_child(lambda: run_lock.lock_folder(sys.argv[1]))
# Such as an upload of the whole folder: closing the file drops the lock, until the next heartbeat.
os.utime(file, (0, 0))
file.read_text()
while not file.stat().st_mtime:
    time.sleep(0.01)
in_child(lambda: fcntl.lockf(open(file, "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB))
"""


def test_a_forked_child_does_not_hold_the_lock_and_reading_the_file_drops_it_for_one_heartbeat_only(tmp_path):
    # In a process of its own, because it forks.
    own = [warm_python(), "-c", FORK, str(tmp_path)]
    done = subprocess.run(own, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stdout.splitlines() if "waiting" not in line]
    assert refused == ["ValueError output_dir", "BlockingIOError [Errno 11]"]


def test_trainers_follow_one_another_in_one_process_and_a_finished_one_holds_nothing(tmp_path):
    """A notebook that trains, evaluates and saves must not block a shell that continues the run."""
    settings = {"save_steps": 1, "trainer_arguments": {"eval_dataset": prompts(3)}}
    trainer = tiny_trainer(tmp_path, **settings)
    assert trainer.run_log.output_dir == tmp_path
    assert (tmp_path / LOCK_FILE).exists()
    trainer.train()
    assert not (tmp_path / LOCK_FILE).exists()
    trainer.evaluate()
    trainer.save_model()
    assert not (tmp_path / LOCK_FILE).exists()
    longer = tiny_trainer(tmp_path, **settings, total_episodes=30)
    longer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(tmp_path)] == [0, 1, 2, 3]
    assert not (tmp_path / LOCK_FILE).exists()
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


def test_a_run_of_another_host_that_gives_signs_of_life_is_refused(tmp_path):
    """Its file system passes on no locks, so the file alone tells; the clocks of the two hosts differ by an hour."""
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps(OTHER_HOST))
    ended = threading.Event()

    def beat():
        for tick in range(10_000):
            os.utime(file, (0, time.time() - 3600 + tick))
            if ended.wait(0.02):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match="locked by process 4711 on node-7, since 2026-01-02 03:04:05"):
            check_unlocked(tmp_path)
        with pytest.raises(ValueError, match="locked by process 4711 on node-7"):
            lock_folder(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert record(tmp_path) == OTHER_HOST


@pytest.mark.parametrize(("age", "seconds"), [(0.0, 0.5), (0.3, 0.2), (1000.0, 0.15), (-1000.0, 0.5)])
def test_a_run_of_another_host_is_dead_when_its_file_stays_unchanged(age, seconds, tmp_path, capsys):
    """STALE_SECONDS (0.5) after its last heartbeat, but never after fewer than three heartbeats (3 * 0.05)."""
    (tmp_path / LOCK_FILE).write_text(json.dumps(OTHER_HOST))
    # Before the file has its age: what passes until it is read is not waited for again.
    begun = time.monotonic()
    os.utime(tmp_path / LOCK_FILE, (0, time.time() - age))
    lock_folder(tmp_path)
    assert seconds - 0.05 < time.monotonic() - begun < seconds + 2
    assert "is locked by process 4711 on node-7" in capsys.readouterr().out
    unlock_folder(tmp_path)


def test_the_refusal_reaches_the_ranks_that_do_not_lock(tmp_path, monkeypatch):
    class Second:
        is_main_process, num_processes = False, 2

    cause = "ValueError: output_dir (x) is in use by another run"
    monkeypatch.setattr(collectives, "gather_list", lambda own, accelerator: [cause, own])
    with pytest.raises(
        RuntimeError, match=r"process 0 failed, so this process stops too. ValueError: output_dir \(x\)"
    ):
        RunLock(Second(), tmp_path).acquire()
    monkeypatch.setattr(collectives, "gather_list", lambda own, accelerator: [None, own])
    lock = RunLock(Second(), tmp_path)
    lock.acquire()
    # The main process has lost its lock meanwhile.
    lost = "ValueError: this run has lost its lock"
    monkeypatch.setattr(collectives, "gather_list", lambda own, accelerator: [lost, own])
    with pytest.raises(RuntimeError, match="process 0 failed, so this process stops too. ValueError: this run has los"):
        lock.acquire()
    monkeypatch.setattr(collectives, "gather_list", lambda own, accelerator: [None, own])
    lock.release()
    with lock.until_the_end():
        lock.acquire()
        with lock.for_a_while():
            assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_run_that_has_lost_its_lock_writes_no_more_checkpoints(taken_over, tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.save_checkpoint()
    (tmp_path / LOCK_FILE).unlink()
    if taken_over:
        (tmp_path / LOCK_FILE).write_text(json.dumps(OTHER_HOST))
    with pytest.raises(ValueError, match="has lost its lock on output_dir .* end one of the two runs, then resume"):
        trainer.save_checkpoint()
    trainer.run_lock.release()
    # The other run's file stays.
    assert (tmp_path / LOCK_FILE).exists() == taken_over


def test_a_dead_run_of_another_host_is_waited_for_once(tmp_path, capsys, monkeypatch):
    (tmp_path / LOCK_FILE).write_text(json.dumps(OTHER_HOST))
    check_unlocked(tmp_path)
    assert "waiting up to" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s again"))
        lock_folder(tmp_path)
    assert capsys.readouterr().out == ""
    unlock_folder(tmp_path)
    # Another file, and one that has been renewed, are watched again.
    for _ in range(2):
        (tmp_path / LOCK_FILE).write_text(json.dumps(OTHER_HOST))
        check_unlocked(tmp_path)
        assert "waiting up to" in capsys.readouterr().out


def test_a_run_keeps_its_lock_when_the_current_folder_or_a_link_on_the_path_changes(tmp_path, monkeypatch):
    class Alone:
        is_main_process, num_processes = True, 1

    for name in ("first", "second"):
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "first")
    (tmp_path / "link").symlink_to("first")
    for folder in ("run", tmp_path / "link/run"):
        lock = RunLock(Alone(), folder)
        with pytest.raises(OSError, match="the real cause"), lock.until_the_end():
            os.chdir(tmp_path / "second")
            (tmp_path / "link").unlink()
            (tmp_path / "link").symlink_to("second")
            lock.acquire()
            assert (tmp_path / "first/run" / LOCK_FILE).exists()
            raise OSError("the real cause")
        assert not (tmp_path / "first/run" / LOCK_FILE).exists()
        os.chdir(tmp_path / "first")
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("first")
    assert list((tmp_path / "second/run").iterdir()) == []


def test_a_process_without_the_lock_is_told_so_and_has_none_to_give_back(tmp_path):
    """Such as a forked child of the run: it has the parent's trainer, but not the lock."""
    with pytest.raises(ValueError, match=rf"process {os.getpid()} does not hold the lock on output_dir"):
        check_kept(tmp_path)
    unlock_folder(tmp_path)


def test_a_file_system_without_locks_is_watched_like_another_host(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    lock_folder(tmp_path)
    check_kept(tmp_path)
    content = (tmp_path / LOCK_FILE).read_text()
    unlock_folder(tmp_path)
    # Of this machine, but only its heartbeat would show that it lives.
    (tmp_path / LOCK_FILE).write_text(content)
    begun = time.monotonic()
    lock_folder(tmp_path)
    assert time.monotonic() - begun > 0.4
    unlock_folder(tmp_path)


def test_any_other_error_of_the_file_system_is_not_hidden(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "lockf", broken)
    with pytest.raises(OSError, match="input/output error"):
        lock_folder(tmp_path)


@pytest.mark.parametrize("content", ["my notes", "[1]", '{"program": "another"}'])
def test_a_file_of_the_same_name_that_is_not_ours_is_left_alone(content, tmp_path):
    (tmp_path / LOCK_FILE).write_text(content)
    with pytest.raises(ValueError, match=rf"{LOCK_FILE} is not a lock file of alpaca_ppo.*; move it away, or choose"):
        lock_folder(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text() == content
