"""`examples.gpu_smoke` on a CPU: every check runs and holds, or says what it needs; a failure is reported."""

import re

from examples import gpu_checks, gpu_smoke, gpu_vllm
from tests.fake_vllm import fake_python

NEED_GPUS = {"two processes over NCCL = one", "ZeRO 2 = one process", "ZeRO 3 = one process", "FSDP2 = one process"}


def lines(printed):
    """The verdict and the figure of each check."""
    found = re.findall(r"^(.+) \| (.*) \| (ok|FAILED|left out|no time) \(\d+ s\)$", printed, re.MULTILINE)
    return {name: (verdict, figure) for name, figure, verdict in found}


def test_every_check_holds_on_a_cpu_or_says_what_it_needs(capsys):
    assert gpu_smoke.main(["--minutes", "20"]) == 0
    printed = capsys.readouterr().out
    found = lines(printed)
    assert found.keys() == gpu_smoke.CHECKS.keys()
    left_out = NEED_GPUS | gpu_vllm.CHECKS.keys()
    assert printed.splitlines()[-1].endswith(
        f"s for {len(found)} checks: {len(found) - len(left_out)} ok, {len(left_out)} left out"
    )
    assert {name for name, (verdict, _) in found.items() if verdict != "ok"} == left_out


def test_what_a_vllm_server_is_not_told_stops_a_run_and_what_fails_hides_nothing(capsys, tmp_path, monkeypatch):
    """The stand-in's log-probs are no model's. It is one process, which passes for the engine."""
    monkeypatch.setattr(gpu_vllm, "PROMPT_LEN", 30)
    python = fake_python(tmp_path, first="EngineCore = 1")
    assert gpu_smoke.main(["--only", "vLLM", "--minutes", "10", "--vllm_python", python]) == 1
    found = lines(capsys.readouterr().out)
    assert found.keys() == gpu_vllm.CHECKS.keys()
    others = {name for name in found if "=" in name or "killed" in name}
    assert {name: verdict for name, (verdict, _) in found.items() if name not in others} == {
        "vLLM, weights not reloaded": "ok",
        "vLLM, cache not reset": "ok",
        "vLLM, stale head": "ok",
        "vLLM, listening sockets": "ok",
        "vLLM asleep beside a full trainer": "left out",
    }
    assert {found[name][0] for name in others} == {"FAILED"}
    assert "not the policy's: lm_head.weight" in found["vLLM, stale head"][1]
    for when in ("sampling", "publishing"):
        assert found[f"vLLM, engine killed in {when}"][1].startswith("8 of 8 responses equal, log-probs within 0.0e+00")
    assert "bound 0.0001" in found["vLLM in float32 = trainer"][1]
    assert "bound 0.09" in found["vLLM in bfloat16 = trainer"][1]


def test_a_check_that_fails_breaks_or_hangs_is_reported_and_the_others_still_run(monkeypatch, capsys):
    def breaks(machine):
        raise RuntimeError("no kernel image")

    def hangs(machine):
        while True:
            pass

    checks = {
        "beyond its bound": lambda machine: gpu_checks.require(False, "2 nats"),
        "broken": breaks,
        "hangs": hangs,
        "fine": lambda machine: "0 nats",
    }
    monkeypatch.setattr(gpu_smoke, "CHECKS", checks)
    assert gpu_smoke.main(["--minutes", "0.05"]) == 1
    captured = capsys.readouterr()
    found = lines(captured.out)
    assert found.keys() == checks.keys()
    assert found["beyond its bound"] == ("FAILED", "2 nats")
    assert found["broken"] == ("FAILED", "RuntimeError: no kernel image") and "no kernel image" in captured.err
    assert found["hangs"] == ("FAILED", "stopped after 1 s; more --minutes give it time")
    assert found["fine"] == ("ok", "0 nats")


def test_a_socket_outside_of_loopback_is_told_from_one_inside():
    inside, outside = ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"], ["0.0.0.0", "::", "10.0.0.1", "fe80::1"]
    assert all(map(gpu_vllm.is_loopback, inside)) and not any(map(gpu_vllm.is_loopback, outside))
