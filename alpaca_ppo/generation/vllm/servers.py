"""The servers from which this process samples: one started here, or those that `vllm_urls` names.

The processes of a machine share the files of the weights. The first of them writes these, each loads them into the
servers that it is responsible for, and all go on once every server has them.
"""

import ipaddress
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from alpaca_ppo.adapters.adapter_set import POLICY
from alpaca_ppo.config.names import check_url
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.generation.backends import PolicyWeights
from alpaca_ppo.generation.vllm import weights as files
from alpaca_ppo.generation.vllm.process import ServerProcess, installed_version
from alpaca_ppo.generation.vllm.server import MODEL, Publication, Server, check_version, together
from alpaca_ppo.http_json import RequestFailed
from alpaca_ppo.models.policy import Policy

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank."""
_OURS = "model uds host port served-model-name dtype logprobs-mode gpu-memory-utilization".split()
"""Flags of the server that are not for `vllm_args`."""


def gathered(item: Any) -> list[Any]:
    """The item of each process, on all of them."""
    found: list[Any] = gather_object([item]) if PartialState().num_processes > 1 else [item]
    return found


def everywhere(action: Callable[[], Any]) -> None:
    """Does this process's part of something, and waits until every process has done its own.

    Raises:
        ValueError: on all of them, if one cannot.
    """
    problem = ""
    try:
        action()
    except (ValueError, OSError, RequestFailed) as error:
        problem = str(error)
    if found := next(filter(None, gathered(problem)), ""):
        raise ValueError(found)


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Servers:
    """The servers of this process.

    Args:
        args: of the run.

    Raises:
        ValueError: if the options name no server and no way to start one, or one that cannot be used.
    """

    def __init__(self, args: PPOConfig) -> None:
        self._args = args
        self._urls = args.vllm_urls or []
        if args.load_in_4bit:
            raise ValueError(
                "generation_backend is 'vllm' and load_in_4bit is True, but vLLM gets the base as whole weights; set "
                "generation_backend: auto"
            )
        for url in self._urls:
            check_url("vllm_urls", url)
        self._remote = not all(map(is_loopback, self._urls))
        if not self._urls:
            if args.vllm_python is None:
                raise ValueError(
                    "generation_backend is 'vllm', but vllm_python and vllm_urls are null; set vllm_python to the "
                    "interpreter that alpaca-ppo vllm-env DIR has made, or vllm_urls to servers that run"
                )
            for word in args.vllm_args or []:
                if word.startswith("--") and word[2:].partition("=")[0] in _OURS:
                    raise ValueError(f"vllm_args has {word!r}, which the run sets itself; leave it out")
            check_version(installed_version(args.vllm_python), f"vllm_python {args.vllm_python!r}")
        self.all: list[Server] = []
        self._responsible, self._writes = True, True
        self._folder = Path()
        self._guard: ServerProcess | None = None
        self._process: ServerProcess | None = None
        self._current: Publication | None = None
        self._dtype, self._lora_rank, self._device = torch.float32, 0, torch.device("cpu")
        self.restarts = 0
        """How often a server that had ended was started again, since whoever counts has set it to 0."""

    def publish(self, policy: Policy, weights: PolicyWeights, version: int) -> None:
        """Gives the servers the policy's weights. Every process must call this.

        Raises:
            ValueError: on every process, if one has no room for them, or a server does not take them.
        """
        old = self._current
        if old is None:
            self._meet(policy)
        folder, adapted = self._folder / str(version), policy.adapters is not None
        self._current = Publication(f"{self._folder.name}-{version}", folder)
        if adapted:
            self._current = Publication(self._current.version, self._folder / "base", folder)
        if old is None or not adapted:
            tensors = files.copied(weights(base=True), self._dtype, keep=self._writes)
            self._write(partial(files.write_model, self._current.model, policy, tensors, self._dtype))
        if adapted:
            tensors = files.copied(weights(), None, keep=self._writes)
            self._write(partial(files.write_adapter, folder, policy, tensors))
        everywhere(partial(self._load, self._current))
        if old is not None and self._writes:
            shutil.rmtree(old.adapter or old.model)

    def _write(self, action: Callable[[], Any]) -> None:
        """Lets the process that writes the files of this machine do so; the others wait for it."""
        everywhere(action if self._writes else lambda: None)

    def _meet(self, policy: Policy) -> None:
        """Finds out what the policy needs, who else is on this machine, and where the files go."""
        files.check_policy(policy)
        args, self._device = self._args, policy.model.device
        self._dtype = getattr(torch, args.vllm_dtype or ("bfloat16" if args.bf16 else str(policy.model.dtype)[6:]))
        if policy.adapters is not None:
            config = policy.adapters.config_of(POLICY)
            self._lora_rank = max([config.r, *(config.rank_pattern or {}).values()])
        machines = gathered("" if self._remote else platform.node())
        rank = PartialState().process_index
        peers = [other for other, machine in enumerate(machines) if machine == machines[rank]]
        place, self._writes = peers.index(rank), rank == peers[0]

        def make_folder() -> None:
            shared = Path(args.output_dir).absolute() if self._remote else None
            self._folder = files.make_folder(shared, files.bytes_of(policy, self._dtype))
            self._guard = ServerProcess([], {}, None, [self._folder])

        self._write(make_folder)
        self._folder = gathered(self._folder)[peers[0]]
        own = self._urls[place :: len(peers)]
        self._responsible = bool(own) or not self._urls
        self.all = [Server(url) for url in own or self._urls[place % max(len(self._urls), 1) :][:1]]

    def _load(self, new: Publication) -> None:
        if not self._urls and (self._process is None or self._has_ended()):
            self._start(lambda: None)
            return
        for server in self.all:
            if not server.config:
                together([server.check(lora=new.adapter is not None)])
        if self._responsible:
            together(server.load(new) for server in self.all)
        for server in self.all:
            server.loaded = new

    def revive(self, poll: Callable[[], Any]) -> None:
        """Starts the server of this process again if it has ended; calls `poll` meanwhile.

        Raises:
            ValueError: if it has been started again before, or cannot be.
        """
        if self._process is not None and self._has_ended():
            if self.restarts:
                raise ValueError(f"the vLLM server has ended twice: {self._process.reason()}")
            self.restarts += 1
            warnings.warn(f"the vLLM server has ended ({self._process.reason()}), and is started again", stacklevel=2)
            self._start(poll)

    def _has_ended(self) -> bool:
        """Whether the server that was started here no longer runs; one that does not answer is given time to end."""
        return self._process is not None and not self.all[0].answers() and self._process.ends()

    def _start(self, poll: Callable[[], Any]) -> None:
        """Starts a server on the current weights."""
        assert self._current is not None and self._args.vllm_python is not None
        if self._process is not None:
            self._process.stop()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        rank = PartialState().process_index
        socket = self._folder / f"{rank}.sock"
        socket.unlink(missing_ok=True)
        log = Path(self._args.output_dir).absolute() / f"vllm_{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = ServerProcess(self._command(socket, self._current), self._variables(), log, [])
        server = Server("http://vllm", str(socket))
        self._process.wait(server.answers, poll)
        together([server.check(lora=self._lora_rank > 0)])
        together([server.load(self._current, started_on=self._current.model)])
        self.all = [server]

    def _command(self, socket: Path, current: Publication) -> list[str]:
        args = self._args
        flags: dict[str, Any] = {
            "uds": socket,
            "model": current.model,
            "served-model-name": MODEL,
            "dtype": str(self._dtype)[6:],
            "max-model-len": args.longest_row,
            "gpu-memory-utilization": args.vllm_gpu_memory_utilization,
            "logprobs-mode": "processed_logprobs",
            # The model's own settings of sampling do not count.
            "generation-config": "vllm",
        }
        switches = ["enable-scale-out", "skip-tokenizer-init", "disable-uvicorn-access-log"]
        if self._lora_rank:
            flags["max-lora-rank"] = next(rank for rank in _RANKS if rank >= self._lora_rank)
            # The next version is loaded before the last one goes.
            flags["max-cpu-loras"] = 2
            switches.append("enable-lora")
        switches.append("enable-sleep-mode" if self._device.type == "cuda" else "enforce-eager")
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        module = "vllm.entrypoints.openai.api_server"
        assert args.vllm_python is not None
        return [args.vllm_python, "-m", module, *words, *(f"--{name}" for name in switches), *(args.vllm_args or [])]

    def _variables(self) -> dict[str, str]:
        found = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self._device.type != "cuda":
            # Otherwise the first request waits for a compiler, and the cache takes most of the memory.
            room = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2")
            return found | {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": room}
        number = self._device.index or 0
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return found | {"CUDA_VISIBLE_DEVICES": visible[number] if visible else str(number)}

    def wake(self) -> None:
        """Brings back the memory that `sleep` has freed."""
        if any(server.asleep for server in self.all):
            torch.cuda.empty_cache()
            together(server.wake("weights", "kv_cache") for server in self.all)

    def sleep(self) -> None:
        """Frees the memory of the GPU that a server started here shares with this process."""
        if self._process is not None and self._device.type == "cuda":
            together(server.sleep() for server in self.all)
