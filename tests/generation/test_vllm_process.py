"""The process of a vLLM server, in whose place `fake_vllm` runs: its start, its deaths, and what they leave behind."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from alpaca_ppo.async_calls import await_all
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.generation import Turns, make_backend
from alpaca_ppo.generation.vllm import local_server, sampling, weights
from tests.fake_vllm import fake_python
from tests.generation.test_turns import Script
from tests.generation.test_vllm import Setting
from tests.tiny_runs import tiny_config, tiny_trainer

PROGRAM = """
import sys
from pathlib import Path
from alpaca_ppo.generation.vllm import weights
from tests.generation.test_vllm import Setting
if __name__ == "__main__":
    weights.MEMORY = Path(sys.argv[3])
    setting = Setting(Path(sys.argv[1]), vllm_python=sys.argv[2])
    setting.sync()
    print("ready", flush=True)
    {then}
"""


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place of its own for the weights, because tests of other files write theirs at the same time."""
    with tempfile.TemporaryDirectory(dir=weights.MEMORY) as folder:
        monkeypatch.setattr(weights, "MEMORY", Path(folder))
        yield


def folders() -> set[Path]:
    return set(weights.MEMORY.glob("alpaca_ppo-vllm-*"))


def servers(folder: Path) -> list[psutil.Process]:
    """The servers that were started with the interpreter in `folder`, by their environment."""
    found = []
    # Of a process that ends meanwhile, both are None.
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = " ".join(process.info["cmdline"] or [])
        started_by = (process.info["environ"] or {}).get("STARTED_BY")
        if started_by == str(folder) and "fake_vllm.py" in command and "watchdog.py" not in command:
            found.append(process)
    return found


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "in vain for a minute"
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """A setting whose server runs; at the end nothing of it is left."""
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    monkeypatch.setattr(sampling, "RETRY_DELAYS", (0.1, 0.1, 0.1))
    before = folders()
    options = {"query_len": 40, "vllm_args": ["--max-num-seqs", "7"], "vllm_gpu_memory_utilization": 0.3}
    setting = Setting(tmp_path, vllm_python=fake_python(tmp_path), **options)
    setting.sync()
    assert len(servers(tmp_path)) == 1 and len(folders() - before) == 1
    yield setting
    del setting.backend
    until(lambda: not servers(tmp_path) and folders() <= before)


def test_a_server_is_started_on_the_weights_and_listens_on_a_socket_alone(started: Setting, tmp_path: Path) -> None:
    (process,) = servers(tmp_path)
    words = process.cmdline()
    given = dict(zip(words, words[1:], strict=False))
    assert given["--dtype"] == "float32" and given["--max-model-len"] == "45" and given["--max-num-seqs"] == "7"
    assert given["--gpu-memory-utilization"] == "0.3"
    assert given["--logprobs-mode"] == "processed_logprobs" and {"--enable-scale-out", "--skip-tokenizer-init"} < {
        *words
    }
    assert Path(given["--uds"]).parent.stat().st_mode & 0o777 == 0o700
    assert not process.net_connections("inet")
    variables = process.environ()
    assert variables["GLOO_SOCKET_IFNAME"] == "lo" and variables["VLLM_HOST_IP"] == "127.0.0.1"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1" and variables["VLLM_NO_USAGE_STATS"] == "1"
    assert not {"PYTHONPATH", "RANK", "MASTER_PORT"} & {*variables}
    # Temporary files go with the folder, and seeds are used in a CPU's whole prompts alone.
    assert variables["TMPDIR"] == str(Path(given["--uds"]).parent) and "--no-enable-chunked-prefill" in words


def test_a_server_that_is_killed_in_a_rollout_is_started_again_for_the_same_tokens(
    started: Setting, tmp_path: Path
) -> None:
    class KillsAtFirstTurn(Script):
        killed = 0

        def on_stop(self, turn: Any) -> Any:
            if not self.killed:
                (process,) = servers(tmp_path)
                self.killed = process.pid
                process.kill()
            return super().on_stop(turn)

    started.sync()
    expected, script = started.sampled(turns=Turns(Script())), KillsAtFirstTurn()
    with pytest.warns(UserWarning, match="has ended .signal SIGKILL: .*, and is started again"):
        found = started.sampled(turns=Turns(script))
    assert torch.equal(found.responses, expected.responses)
    assert script.killed not in [process.pid for process in servers(tmp_path)]
    # One that has ended between two rollouts is started on the new weights.
    servers(tmp_path)[0].kill()
    until(lambda: not servers(tmp_path))
    with pytest.warns(UserWarning, match="SIGKILL: .*, and is started again"):
        started.sync()
    assert torch.equal(started.sampled(turns=Turns(Script())).responses, expected.responses)


def test_a_server_that_ends_twice_ends_the_run(started: Setting, tmp_path: Path) -> None:
    class KillsAtEachTurn(Script):
        def on_stop(self, turn: Any) -> Any:
            for process in servers(tmp_path):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            return super().on_stop(turn)

    with pytest.warns(UserWarning, match="started again"), pytest.raises(ValueError, match="vLLM server .*SIGKILL"):
        started.sampled(turns=Turns(KillsAtEachTurn()))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ('sys.exit("torch.OutOfMemoryError: CUDA out of memory")', "exit status 1: torch.OutOfMemoryError: CUDA out"),
        (
            'sys.exit("(Worker) ValueError: head_dim 8 is not supported\\nRuntimeError: see root cause above")',
            "exit status 1: ValueError: head_dim 8 is not supported",
        ),
        (
            'sys.exit("ValueError: no space\\nValueError: Tokenizer not available when `skip_tokenizer_init=True`")',
            "exit status 1: ValueError: no space",
        ),
        ('sys.exit("no such model")', "exit status 1: no such model"),
        ("sys.exit(3)", "exit status 3: without a word"),
        ("import os; os.kill(os.getpid(), 11)", "signal SIGSEGV"),
    ],
)
def test_a_server_that_ends_while_it_starts_says_why(
    tmp_path: Path, first: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, python = folders(), fake_python(tmp_path, first=first)
    setting = Setting(tmp_path, vllm_python=python)
    with pytest.raises(ValueError, match=f"could not be started: {said}.*its log is {tmp_path}/vllm_0.log"):
        setting.sync()
    assert f"vLLM starts; its log is {tmp_path}/vllm_0.log" in capsys.readouterr().out
    del setting
    until(lambda: folders() <= before)


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    before = folders()
    setting = Setting(tmp_path, vllm_python=fake_python(tmp_path, first="time.sleep(1000)"), ddp_timeout=1)
    with pytest.raises(ValueError, match=f"was not ready within 0.4 s .ddp_timeout.; see {tmp_path}/vllm_0.log"):
        setting.sync()
    del setting
    until(lambda: folders() <= before)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("no/such/python", "vllm_python is 'no/such/python', which cannot be run"),
        (sys.executable, "whose environment has no vLLM; alpaca-ppo vllm-env DIR makes one"),
        ("0.31.2", r"is vLLM 0\.31\.2; 0\.32\.x is needed"),
        ("/bin/false", r"vllm_python is '/bin/false', which cannot be run \(exit status 1\); alpaca-ppo vllm-env"),
    ],
)
def test_an_interpreter_without_the_right_vllm_is_refused_before_models_load(
    tmp_path: Path, python: str, said: str
) -> None:
    python = fake_python(tmp_path, version=python) if python[0].isdigit() else python
    with pytest.raises(ValueError, match=said):
        make_backend("vllm", tiny_config(tmp_path, generation_backend="vllm", vllm_python=python))


def test_an_interpreter_that_fails_is_refused_with_the_last_line_that_it_writes(tmp_path: Path) -> None:
    (python := tmp_path / "python").write_text(
        "#!/bin/sh\necho Traceback >&2\necho 'Error: no libpython' >&2\nexit 1\n"
    )
    python.chmod(0o755)
    with pytest.raises(ValueError, match=r"python', which cannot be run \(Error: no libpython\)"):
        make_backend("vllm", tiny_config(tmp_path, generation_backend="vllm", vllm_python=str(python)))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("first", "then", "number"),
    [("", "sys.stdin.read()", signal.SIGKILL), ("", "pass", None), ("time.sleep(1000)", "pass", signal.SIGKILL)],
    ids=["killed", "ends", "killed while the server starts"],
)
def test_nothing_is_left_of_a_server_however_the_run_ends(
    tmp_path: Path, first: str, then: str, number: signal.Signals | None
) -> None:
    before, script, link = folders(), tmp_path / "run.py", tmp_path / "vllm_0.model"
    script.write_text(PROGRAM.format(then=then))
    root = str(Path(__file__).parents[2])
    run = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), fake_python(tmp_path, first=first), str(weights.MEMORY)],
        env={**os.environ, "STARTED_BY": str(tmp_path), "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert run.stdout is not None and run.stdin is not None
    with run.stdout, run.stdin:
        assert any(line.startswith(b"vLLM starts" if first else b"ready") for line in run.stdout)
        if number is not None:
            until(lambda: len(servers(tmp_path)) == 1)
            assert link.is_symlink() == bool(first)
            run.send_signal(number)
        run.wait(timeout=60)
    until(lambda: not servers(tmp_path) and not link.is_symlink() and folders() <= before)


def test_a_server_ends_although_its_watchdog_was_killed(started: Setting, tmp_path: Path) -> None:
    (process,) = servers(tmp_path)
    watchdog = process.parent()
    assert watchdog is not None and "watchdog.py" in " ".join(watchdog.cmdline())
    watchdog.kill()
    # The fixture waits until nothing is left.


AT_LOAD = """
def before(path, body):
    if path == "/collective_rpc":
        {then}
fake.before = before
"""
SIGNALS_THE_RUN = """
import os, signal
watchdog = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()
os.kill(int(watchdog[1]), signal.SIGTERM)
time.sleep(1000)
"""
GENERATE = "/inference/v1/generate"
STOPS_ITSELF = SIGNALS_THE_RUN.replace("time.sleep(1000)", "os.kill(os.getpid(), signal.SIGSTOP)")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("fake.lives = False; time.sleep(1000)", "it did not answer"),
        ("time.sleep(1000)", "it did not answer"),
    ],
    ids=["killed", "engine killed", "hangs"],
)
def test_a_server_that_dies_or_hangs_while_it_loads_weights_is_started_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, said: str
) -> None:
    monkeypatch.setattr("alpaca_ppo.generation.vllm.server._HEALTH_SECONDS", 0.1)
    monkeypatch.setattr("alpaca_ppo.generation.vllm.local_server.END_SECONDS", 1.0)
    python = fake_python(tmp_path, first=AT_LOAD.format(then=then))
    # A fifth of it is waited for a server that hangs, and two fifths for one that starts.
    setting = Setting(tmp_path, vllm_python=python, query_len=40, ddp_timeout=40)
    setting.sync()
    old = setting.sampled()
    with torch.no_grad():
        setting.policy.head.weight += 1
    with pytest.warns(UserWarning, match=f"has ended .{said}.*, and is started again"):
        setting.sync()
    new = setting.sampled()
    assert not torch.equal(new.responses, old.responses)
    whole = Setting(tmp_path / "whole", policy=setting.policy, vllm_python=fake_python(tmp_path), query_len=40)
    whole.sync()
    assert torch.equal(whole.sampled().responses, new.responses)


def test_a_server_that_gives_a_wrong_answer_is_not_started_again(tmp_path: Path) -> None:
    wrong = """
def before(path, body):
    if path == "/update_weight_version" and body["new_version"].endswith("-1"):
        fake.resets = False
fake.before = before
"""
    setting = Setting(tmp_path, vllm_python=fake_python(tmp_path, first=wrong), query_len=40)
    setting.sync()
    with pytest.raises(ValueError, match=r"gave a wrong answer: .*success"):
        setting.sync()


@pytest.mark.parametrize(("ends", "timeout"), [("", 5), ("fake.lives = False", 1800)], ids=["hangs", "ends"])
def test_a_server_that_hangs_in_a_rollout_is_started_again_after_one_timeout_and_one_that_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, timeout: int
) -> None:
    # As vLLM does that was asked to end, which waits for its clients.
    monkeypatch.setattr("alpaca_ppo.generation.vllm.local_server.END_SECONDS", 1.0)
    # As much time for the rest as if requests had more.
    monkeypatch.setattr("alpaca_ppo.generation.vllm.local_server.START_SHARE", 900)
    monkeypatch.setattr("alpaca_ppo.generation.vllm.server.CALL_SHARE", 900)
    hangs = f"""
import pathlib
mark = pathlib.Path(words[words.index("--uds") + 1] + ".hung")
def before(path, body):
    if path.endswith("generate") and not mark.exists():
        mark.touch()
        {ends}
        time.sleep(1000)
fake.before = before
"""
    setting = Setting(tmp_path, vllm_python=fake_python(tmp_path, first=hangs), ddp_timeout=timeout, query_len=40)
    setting.sync()
    with pytest.warns(UserWarning, match="has ended .it did not answer.*, and is started again"):
        found = setting.sampled()
    assert torch.equal(setting.sampled().responses, found.responses)


@pytest.mark.parametrize(
    ("first", "checkpoint"),
    [
        (SIGNALS_THE_RUN, 0),
        (AT_LOAD.format(then=SIGNALS_THE_RUN.replace("\n", "\n        ")), 1),
        (AT_LOAD.format(then=STOPS_ITSELF.replace("\n", "\n        ")), 1),
        (AT_LOAD.format(then=STOPS_ITSELF.replace("\n", "\n        ")).replace("/collective_rpc", GENERATE), 0),
    ],
    ids=["starts", "hangs", "stopped", "stopped before the first step"],
)
def test_a_signal_ends_a_run_whose_server_starts_hangs_or_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, checkpoint: int
) -> None:
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    before = folders()
    trainer = tiny_trainer(
        tmp_path, generation_backend="vllm", vllm_python=fake_python(tmp_path, first=first), mismatch_action="ignore"
    )
    with pytest.raises(Interrupted) as ended:
        trainer.train()
    assert ended.value.code == 143 and (tmp_path / f"checkpoint-{checkpoint}").is_dir()
    assert not (tmp_path / "vllm_0.model").is_symlink()
    del trainer, ended
    gc.collect()
    until(lambda: not servers(tmp_path) and folders() <= before)


def test_a_stopped_server_goes_on_to_end_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    notes = f'import signal; signal.signal(15, lambda *_: (open("{tmp_path}/ended", "w"), sys.exit(0)))'
    setting = Setting(tmp_path, vllm_python=fake_python(tmp_path, first=notes), query_len=40)
    setting.sync()
    (process,) = servers(tmp_path)
    process.suspend()
    del setting
    until(lambda: not servers(tmp_path))
    assert (tmp_path / "ended").exists()


def test_a_server_that_sleeps_is_woken_once_before_it_samples_or_loads(started: Setting) -> None:
    # As on a GPU; the stand-in refuses everything else while it sleeps, and to wake up twice.
    (server,) = started.backend.servers
    expected = started.sampled()
    await_all([server.sleep()])
    started.backend.wake()
    started.backend.wake()
    assert torch.equal(started.sampled().responses, expected.responses)
    await_all([server.sleep()])
    started.sync()
    assert torch.equal(started.sampled().responses, expected.responses)


def test_a_server_that_ends_instead_of_going_to_sleep_sleeps_once_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = """
import os
mark = words[words.index("--uds") + 1] + ".died"
def before(path, body):
    if path.startswith("/sleep") and not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)
fake.before = before
"""
    setting = Setting(tmp_path, vllm_python=fake_python(tmp_path, first=dies), query_len=40)
    setting.sync()
    (server,) = setting.backend.servers
    # As on a GPU, while the stand-in is started as on a CPU.
    for name in ("server_command", "server_variables"):
        started = getattr(local_server, name)
        on_cpu = lambda *given, started=started: started(*(torch.device("cpu") if d is gpu else d for d in given))  # noqa: E731
        monkeypatch.setattr(local_server, name, on_cpu)
    server.device = gpu = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="and is started again"):
        setting.backend.sleep()
    assert server.asleep
    setting.backend.wake()
    assert not server.asleep
    setting.sampled()


def test_a_server_that_cannot_wake_up_is_started_again(started: Setting, tmp_path: Path) -> None:
    (server,) = started.backend.servers
    expected, (old,) = started.sampled(), servers(tmp_path)
    server.asleep = True
    with pytest.warns(UserWarning, match="ended .it did not answer.*, and is started again"):
        started.backend.wake()
    assert not server.asleep and [process.pid for process in servers(tmp_path)] != [old.pid]
    assert torch.equal(started.sampled().responses, expected.responses)
