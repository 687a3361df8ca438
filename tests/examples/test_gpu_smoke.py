"""`examples.gpu_smoke` on a CPU: every check runs and holds, or says what it needs; a failure is reported."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from examples import gpu_smoke, same_run

NEEDS_A_GPU = {
    "two processes over NCCL = one",
    "ZeRO 2 = one process",
    "ZeRO 3 = one process",
}


def verdicts(printed):
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {name.removeprefix("| "): verdict for name, verdict, _ in rows[1:]}


def test_every_check_holds_on_a_cpu_or_says_what_it_needs(capsys):
    assert gpu_smoke.main(["--minutes", "20"]) == 0
    printed = capsys.readouterr().out
    found = verdicts(printed)
    assert printed.splitlines()[-1].endswith(f"s for {len(found)} checks: {len(found) - 3} held, 3 not here")
    assert found.keys() == gpu_smoke.CHECKS.keys()
    assert {name for name, verdict in found.items() if verdict != "held"} == NEEDS_A_GPU


def test_a_check_that_fails_or_breaks_is_reported_and_the_others_still_run(monkeypatch, capsys):
    def breaks(machine):
        raise RuntimeError("no kernel image")

    checks = {
        "beyond its bound": lambda machine: gpu_smoke.require(False, "2 nats"),
        "broken": breaks,
        "fine": lambda machine: "0 nats",
    }
    monkeypatch.setattr(gpu_smoke, "CHECKS", checks)
    assert gpu_smoke.main([]) == 1
    captured = capsys.readouterr()
    assert verdicts(captured.out) == {"beyond its bound": "failed", "broken": "failed", "fine": "held"}
    assert "| broken | failed | RuntimeError: no kernel image |" in captured.out
    assert "no kernel image" in captured.err


def test_a_check_is_stopped_after_a_third_of_the_time_and_the_others_still_run(monkeypatch, capsys):
    checks = {"hangs": lambda machine: time.sleep(60), "fine": lambda machine: "0 nats"}
    monkeypatch.setattr(gpu_smoke, "CHECKS", checks)
    before = signal.getsignal(signal.SIGALRM)
    assert gpu_smoke.main(["--minutes", "0.03"]) == 1
    printed = capsys.readouterr().out
    assert verdicts(printed) == {"hangs": "stopped", "fine": "held"}
    # 0.03 * 60 / 3 = 0.6
    assert "| hangs | stopped | after 0.6 s |" in printed
    assert printed.splitlines()[-1].endswith("1 stopped, 1 held; more --minutes give every check its time")
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_no_check_begins_when_the_time_is_used(monkeypatch, capsys):
    monkeypatch.setattr(gpu_smoke, "CHECKS", {"first": lambda machine: "0 nats", "second": lambda machine: "0 nats"})
    assert gpu_smoke.main(["--minutes", "0"]) == 0
    printed = capsys.readouterr().out
    assert set(verdicts(printed).values()) == {"no time"}
    assert printed.splitlines()[-1] == "0 s for 2 checks: 2 no time; more --minutes give every check its time"


def test_a_stopped_check_ends_the_processes_that_it_launched(tmp_path, monkeypatch):
    # A launcher that starts a process of its own. Then the time is over, and both would sleep on.
    launcher = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
os.kill(os.getppid(), signal.SIGALRM)
time.sleep(60)
"""
    popen = subprocess.Popen
    monkeypatch.setattr(
        same_run.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", launcher], **options)
    )
    with pytest.raises(gpu_smoke.OutOfTime), gpu_smoke.time_limit(60):
        same_run.launch(tmp_path, "single", "full", 192)
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):
        # Whoever inherits it may never ask how it ended.
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    raise AssertionError("the launcher's process is still there")
