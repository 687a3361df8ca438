"""`examples.gpu_smoke` on a CPU: every check runs and holds, or says what it needs; a failure is reported."""

from examples import gpu_smoke

NOT_HERE = {
    "two processes over NCCL = one",
    "ZeRO 2 = one process",
    "ZeRO 3 = one process",
    "FSDP2 = one process",
    # An environment with vLLM, which `make vllm-test` has.
    "vLLM on the trainer's GPU = trainer in bfloat16",
}


def verdicts(printed):
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {name.removeprefix("| "): verdict for name, verdict, _ in rows[1:]}


def test_every_check_holds_on_a_cpu_or_says_what_it_needs(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    assert gpu_smoke.main(["--minutes", "20"]) == 0
    printed = capsys.readouterr().out
    found = verdicts(printed)
    assert printed.splitlines()[-1].endswith(f"s for {len(found)} checks: {len(found) - 5} held, 5 not here")
    assert found.keys() == gpu_smoke.CHECKS.keys()
    assert {name for name, verdict in found.items() if verdict != "held"} == NOT_HERE


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
