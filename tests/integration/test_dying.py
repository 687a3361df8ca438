"""Real processes that die, raise or are told to end: the others follow soon, the cause is on the screen, nothing is
lost.
"""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from alpaca_ppo.checkpoint.directory import FolderLock
from alpaca_ppo.distributed.collectives import is_lost_peer, record_error
from tests.integration.launching import ENVIRONMENT, ROOT, command, survivors
from tests.tools.torture import LAUNCHER, Victim, check_outcome, check_promises, outcome
from tests.tools.warm_python import warm_python

SCRIPT = Path(__file__).with_name("run_killed.py")
SOON = 200
"""Seconds for a whole run, its start included."""


def launch(folder, *settings, launcher="accelerate"):
    if launcher == "torchrun":
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        whole = [warm_python(), *torchrun, str(SCRIPT), str(folder), *settings]
    else:
        whole = command(SCRIPT, folder, *settings, config="ddp", python=warm_python())
    return subprocess.run(whole, capture_output=True, text=True, env=ENVIRONMENT, timeout=SOON)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("trouble", "launcher", "cause"),
    [
        ("raise@reward:3", "accelerate", "RuntimeError: the judge has gone home"),
        ("exit@update:5", "torchrun", "exitcode  : 1"),
    ],
)
def test_when_one_rank_dies_the_others_end_soon_and_the_last_words_say_why(trouble, launcher, cause, tmp_path):
    ended = launch(tmp_path / "run", f"trouble={trouble}", "rank=1", launcher=launcher)
    assert ended.returncode != 0
    report = ended.stderr.rpartition("Root Cause (first observed failure)")[2]
    assert "rank      : 1 " in report
    assert cause in report
    check_promises(tmp_path / "run")


@pytest.mark.proof
def test_ranks_agree_to_end_whichever_got_the_signal_and_the_run_goes_on_to_the_same_end(tmp_path):
    assert launch(tmp_path / "whole").returncode == 0
    parts = tmp_path / "parts"
    # Rank 1 alone is killed, then told to end, in an update; then rank 0, in a rollout; then all, by the launcher.
    for what, where, rank, code in (
        ("SIGKILL", "update:9", 1, -9),
        ("SIGTERM", "update:3", 1, 143),
        ("SIGINT", "reward:2", 0, 130),
    ):
        ended = launch(parts, f"trouble={what}@{where}", f"rank={rank}")
        assert ended.returncode == 1
        # The launcher may send a SIGTERM of its own to the rank that ends last, which has left train() by then.
        assert f"exitcode  : {code} " in ended.stderr
        check_promises(parts)
        assert what == "SIGKILL" or "continue with --resume_from_checkpoint, or resume" in ended.stdout
    own = command(SCRIPT, parts, "hold=0.5", config="ddp", python=warm_python())
    with subprocess.Popen(own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) as last:
        time.sleep(0.1)
        while not (parts / "checkpoint-3").exists():
            assert last.poll() is None
            time.sleep(0.05)
        last.send_signal(signal.SIGTERM)
        output, _ = last.communicate(timeout=SOON)
    assert last.returncode == 1
    assert "checkpoint-3; continue with --resume_from_checkpoint, or resume_from_checkpoint: true" in output
    assert output.rstrip().endswith("got signal: 15")
    assert launch(parts).returncode == 0
    check_outcome(parts, outcome(tmp_path / "whole"))


@pytest.mark.proof
def test_ranks_end_soon_after_their_launcher_is_killed_and_a_run_started_at_once_waits_for_them(tmp_path, capsys):
    parts = tmp_path / "parts"
    # A real launcher: the ranks know theirs by its command line.
    # After the kill the run would take 6 seconds to end by itself, and its ranks notice it in 3.
    victim = Victim(parts, processes=2, hold=1.5)
    assert victim.kill_in("step_with_rollouts", occurrence=2, delay=0.1, ranks=[LAUNCHER])
    assert victim.wait() == -signal.SIGKILL
    ranks = [psutil.Process(victim.phase(rank)[0]) for rank in (0, 1)]
    # What the next run does first.
    lock = FolderLock(parts)
    lock.acquire()
    assert f"is locked by process {ranks[0].pid} on" in capsys.readouterr().out
    lock.release()
    assert survivors(ranks, seconds=30) == []
    assert f"the launcher (process {victim.process.pid}) has died" in parts.with_suffix(".log").read_text()
    for folder in (parts, tmp_path / "whole"):
        assert launch(folder).returncode == 0
    check_outcome(parts, outcome(tmp_path / "whole"))


def test_a_process_that_only_waits_to_be_reaped_has_ended_and_one_that_sleeps_has_not():
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        assert survivors([process], seconds=0.1) == [process]
        child.kill()
        # Popen has not asked for its exit status yet.
        assert survivors([process], seconds=60) == [] and process.status() == psutil.STATUS_ZOMBIE
    assert survivors([process], seconds=60) == []


@pytest.mark.proof
@pytest.mark.parametrize(
    "setting", [f"deepspeed={ROOT / 'examples/deepspeed_configs/zero3.json'}", "fsdp=true"], ids=["zero3", "fsdp"]
)
def test_ranks_that_hold_parts_of_one_model_end_together_and_go_on_to_the_same_end(setting, tmp_path):
    # Three steps: in the first the update is interrupted, in the second the rollout.
    zero = (setting, "use_cpu=false", "total_episodes=30")
    assert launch(tmp_path / "whole", *zero).returncode == 0
    parts = tmp_path / "parts"
    for trouble, cause in (("SIGKILL@update:2", "exitcode  : -9 "), ("raise@reward:1", "the judge has gone home")):
        ended = launch(parts, *zero, f"trouble={trouble}", "rank=1")
        assert ended.returncode == 1 and cause in ended.stderr
    # Rank 1 in an update, then rank 0 while its responses are scored.
    for where, rank in (("update:3", 1), ("reward:2", 0)):
        ended = launch(parts, *zero, f"trouble=SIGTERM@{where}", f"rank={rank}")
        assert "continue with --resume_from_checkpoint, or resume" in ended.stdout, ended.stderr
        check_promises(parts)
    assert launch(parts, *zero).returncode == 0
    check_outcome(parts, outcome(tmp_path / "whole"))


def test_the_launcher_learns_of_an_exception_and_not_of_its_consequences(tmp_path, monkeypatch):
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    lost = RuntimeError("[pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert is_lost_peer(lost)
    with pytest.raises(RuntimeError), record_error():
        raise lost
    assert not told.exists()
    with pytest.raises(ValueError, match="mine"), record_error():
        raise ValueError("mine")
    assert "ValueError: mine" in told.read_text()
