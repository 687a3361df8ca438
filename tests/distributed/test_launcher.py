"""A rank ends when its launcher is killed; a run that no launcher started lives on, whatever its environment says."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from alpaca_ppo.distributed import launcher
from alpaca_ppo.distributed.launcher import launched_rank
from alpaca_ppo.distributed.preemption import PreemptionHandler
from alpaca_ppo.trainer import preflight
from tests.integration.launching import ENVIRONMENT, ROOT
from tests.tiny_runs import tiny_config

RANK = """
import signal, sys, time
from alpaca_ppo.distributed import launcher
launcher._POLL_SECONDS, launcher._SIGNAL_SECONDS = 0.05, 0.1
launcher._SAVE_SECONDS = 0.5 if "deaf" in sys.argv else 30.0
def save(*_):
    launcher.end_without_launcher()
    print("saved", flush=True)
    sys.exit(143)
if "saves" in sys.argv:
    signal.signal(signal.SIGTERM, save)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
if "imports" in sys.argv:
    # Only what comes before the slow imports counts.
    sys.modules["alpaca_ppo.trainer.ppo_trainer"] = None
    try:
        import alpaca_ppo.trainer
    except ImportError:
        pass
else:
    launcher.watch_launcher()
    launcher.watch_launcher()
if "signalled" in sys.argv:
    launcher.end_without_launcher()
print("started", flush=True)
time.sleep(1.2 if "signalled" in sys.argv or "shell" in sys.argv else 60)
print("lived on", flush=True)
"""
# What a launcher does that has no other work: it starts its rank and waits.
LAUNCHER = """
import os, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "none"
subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""


def output_of_orphan(parent, arguments, folder):
    """Starts `parent`, kills it once its child has started, and returns what the child says."""
    read, write = os.pipe()
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*parent, *arguments], env=environment, stdout=write, stderr=write, cwd=folder)
    os.close(write)
    with os.fdopen(read) as output:
        first = output.readline()
        assert first == "started\n", first + output.read()
        process.kill()
        process.wait(timeout=60)
        return output.read()


@pytest.fixture
def torchrun(tmp_path):
    """A script of the name of a launcher."""
    (tmp_path / "torchrun").write_text(LAUNCHER)
    return [sys.executable, str(tmp_path / "torchrun")]


def test_a_rank_ends_soon_after_its_launcher_is_killed_and_says_why(torchrun, tmp_path):
    said = output_of_orphan(torchrun, [RANK], tmp_path)
    assert "has died, so this rank ends too; everything saved is intact: continue with --resume_from" in said
    assert "lived on" not in said


def test_a_rank_whose_launcher_is_killed_saves_first_if_it_can(torchrun, tmp_path):
    said = output_of_orphan(torchrun, [RANK, "saves"], tmp_path)
    assert "has died, so this rank ends too" in said and said.endswith("saved\n")


def test_a_rank_that_does_not_stop_when_it_is_asked_to_is_ended(torchrun, tmp_path):
    assert output_of_orphan(torchrun, [RANK, "deaf"], tmp_path).endswith("asked\n")


def test_a_rank_watches_its_launcher_before_the_trainer_is_imported(torchrun, tmp_path):
    said = output_of_orphan(torchrun, [RANK, "imports"], tmp_path)
    assert "has died, so this rank ends too" in said and "lived on" not in said


def test_a_rank_that_got_a_signal_saves_and_ends_by_itself(torchrun, tmp_path):
    assert output_of_orphan(torchrun, [RANK, "signalled"], tmp_path) == "lived on\n"


@pytest.mark.parametrize("start", ["nohup", pytest.param("setsid", marks=pytest.mark.proof)])
def test_a_run_lives_on_when_its_shell_ends_even_with_a_launchers_variables(start, tmp_path):
    # A shell in which somebody has exported them.
    shell = ["bash", "-c", f'export TORCHELASTIC_RUN_ID=none RANK=0\n{start} "$@" & wait', "bash", sys.executable]
    assert output_of_orphan(shell, ["-c", RANK, "shell"], tmp_path) == "lived on\n"


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("python -m accelerate.commands.launch --num_processes 2 train.py", True),
        ("/venv/bin/python -u -m deepspeed.launcher.launch --world_info=e30= train.py", True),
        ("/venv/bin/python /venv/bin/torchrun train.py", True),
        ("python -X faulthandler /venv/lib/accelerate/commands/launch.py train.py", True),
        ("python -m ipykernel_launcher -f kernel.json", False),
        ("bash run.sh", False),
        ("", False),
    ],
)
def test_launchers_are_known_by_their_command(command, launches, monkeypatch):
    class Parent:
        def __init__(self, pid):
            assert pid == os.getppid()

        def cmdline(self):
            return command.split()

    monkeypatch.setattr(psutil, "Process", Parent)
    assert launcher.launcher_command() == (tuple(command.split()) if launches else None)


def test_a_parent_that_has_ended_is_no_launcher(monkeypatch):
    def gone(pid):
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr(psutil, "Process", gone)
    assert launcher.launcher_command() is None


def test_the_rank_is_the_one_that_accelerate_will_take(monkeypatch):
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launched_rank() == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    assert launched_rank() == 5
    monkeypatch.setenv("RANK", "3")
    assert launched_rank() == 3


def test_a_script_watches_its_launcher_from_its_first_check_on(monkeypatch, tmp_path):
    watched = []
    monkeypatch.setattr(preflight, "watch_launcher", lambda: watched.append(True))
    preflight.check_start(tiny_config(tmp_path), None)
    assert watched == [True]


def test_a_signal_is_noted_by_the_watch(monkeypatch):
    class Main:
        is_main_process, num_processes = False, 1

    monkeypatch.setattr(launcher, "_stopping", False)
    handler = PreemptionHandler(Main())
    with pytest.raises(SystemExit), handler.install():
        assert not launcher._stopping
        os.kill(os.getpid(), signal.SIGTERM)
        assert launcher._stopping
