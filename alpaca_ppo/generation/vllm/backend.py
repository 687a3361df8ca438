"""`generation_backend: vllm`: samples from vLLM servers, which get the weights after each update.

Each process of the run starts a server, or uses those that `vllm_urls` names. The processes of a machine share the
files of the weights: the first of them writes these, and all go on once every server has loaded them.
"""

import platform
import shutil
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from alpaca_ppo.adapters.adapter_set import POLICY
from alpaca_ppo.config.names import check_url
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list, raise_on_all_ranks
from alpaca_ppo.generation.backends import Backend, PolicyWeights
from alpaca_ppo.generation.responses import Generation, SamplingParams
from alpaca_ppo.generation.vllm import weights as files
from alpaca_ppo.generation.vllm.process import ServerProcess, check_options, server_command, server_variables
from alpaca_ppo.generation.vllm.sampling import Sampling
from alpaca_ppo.generation.vllm.server import Publication, Server, together
from alpaca_ppo.models.policy import Policy
from alpaca_ppo.types import PromptBatch


class VLLMBackend(Backend):
    """Log-probs are those of the distribution that was sampled from: in evaluation, that of `top_k`, `top_p` or the
    likeliest token.

    Raises:
        ValueError: without the options of a run; if they name no server and no way to start one, or one that cannot be
            used.
    """

    takes_turns = takes_stop_strings = has_own_weights = True
    args: PPOConfig

    def __init__(self, args: PPOConfig | None = None) -> None:
        if args is None:
            raise ValueError("backend is 'vllm', which needs the options of a run; use a trainer, or backend='auto'")
        super().__init__(args)
        if args.load_in_4bit:
            raise ValueError("load_in_4bit is True, but generation_backend vllm gets whole weights; set it to auto")
        self._urls = args.vllm_urls or []
        for url in self._urls:
            check_url("vllm_urls", url)
        if not self._urls:
            check_options(args)
        self.servers: list[Server] = []
        """From which this process samples."""
        self._writes, self._folder = True, Path()
        self._guard: ServerProcess | None = None
        self._process: ServerProcess | None = None
        self._current: Publication | None = None
        self._published = 0
        self._dtype, self._lora_rank, self._device = torch.float32, 0, torch.device("cpu")
        self._restarts = 0
        """How often a server that had ended was started again in this rollout."""

    def sync(self, policy: Policy, weights: PolicyWeights) -> None:
        """Gives the servers the policy's weights, each time as another version.

        Raises:
            ValueError: if this process has no room for them, or a server does not take them.
            RuntimeError: if that happened on another process.
        """
        first, adapted, number = self._current is None, policy.adapters is not None, self._published
        if first:
            self._meet(policy)
        folder, version = self._folder / str(number), f"{self._folder.name}-{number}"
        new = Publication(version, self._folder / "base", folder) if adapted else Publication(version, folder)
        self._current, self._published = new, number + 1
        base = files.copied(weights(base=True), self._dtype, keep=self._writes) if first or not adapted else {}
        adapter = files.copied(weights(), None, keep=self._writes) if adapted else {}
        with raise_on_all_ranks(PartialState()):
            if base:
                files.write_model(new.model, policy, base, self._dtype)
            if adapter:
                files.write_adapter(folder, policy, adapter)
        with raise_on_all_ranks(PartialState()):
            self._load(new)
        if self._writes and not first:
            shutil.rmtree(self._folder / str(number - 1))
        self.half_precision = any(server.half_precision for server in self.servers)

    def _meet(self, policy: Policy) -> None:
        """Finds out what the policy needs, who else is on this machine, and where the files go."""
        files.check_policy(policy)
        args, state, self._device = self.args, PartialState(), policy.model.device
        self._dtype = getattr(torch, args.vllm_dtype or ("bfloat16" if args.bf16 else str(policy.model.dtype)[6:]))
        if policy.adapters is not None:
            config = policy.adapters.config_of(POLICY)
            self._lora_rank = max([config.r, *(config.rank_pattern or {}).values()])
        remote = any(urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1") for url in self._urls)
        machines = gather_list("" if remote else platform.node(), state)
        peers = [rank for rank, machine in enumerate(machines) if machine == machines[state.process_index]]
        place = peers.index(state.process_index)
        self._writes = place == 0
        with raise_on_all_ranks(state):
            if self._writes:
                output_dir = Path(args.output_dir).absolute()
                output_dir.mkdir(parents=True, exist_ok=True)
                size = files.bytes_of(policy, self._dtype)
                self._folder = files.make_folder(output_dir if remote else None, size)
                self._guard = ServerProcess([], {}, Path("/dev/null"), [self._folder])
        self._folder = gather_list(self._folder, state)[peers[0]]
        # Each process sends its first prompt to another server.
        servers = deque(map(Server, self._urls))
        servers.rotate(-place)
        self.servers = list(servers)
        with raise_on_all_ranks(state):
            together(server.check(self._folder, lora=self._lora_rank > 0) for server in self.servers)

    def _load(self, new: Publication) -> None:
        """Loads weights into the server of this process, or the first process of a machine into those of all."""
        if not self._urls and (self._process is None or self._has_ended()):
            self._start(lambda: None)
            return
        self.wake()
        if self._writes or not self._urls:
            together(server.load(new) for server in self.servers)
        for server in self.servers:
            server.loaded = new

    def revive(self, poll: Callable[[], Any]) -> None:
        """Starts the server of this process again if it has ended; calls `poll` meanwhile.

        Raises:
            ValueError: if it has been started again before in this rollout, or cannot be.
        """
        if self._process is not None and self._has_ended():
            if self._restarts:
                raise ValueError(f"the vLLM server has ended twice: {self._process.reason()}")
            self._restarts += 1
            warnings.warn(f"the vLLM server has ended ({self._process.reason()}), and is started again", stacklevel=2)
            self._start(poll)

    def _has_ended(self) -> bool:
        """Whether the server that was started here no longer runs; one that does not answer is given time to end."""
        return self._process is not None and not self.servers[0].answers() and self._process.ends()

    def _start(self, poll: Callable[[], Any]) -> None:
        """Starts a server on the current weights."""
        assert self._current is not None
        if self._process is not None:
            self._process.stop()
        torch.cuda.empty_cache()
        rank = PartialState().process_index
        socket = self._folder / f"{rank}.sock"
        socket.unlink(missing_ok=True)
        log = Path(self.args.output_dir).absolute() / f"vllm_{rank}.log"
        command = server_command(self.args, self._current.model, socket, self._dtype, self._lora_rank, self._device)
        PartialState().print(f"vLLM starts; its log is {log}", flush=True)
        self._process = ServerProcess(command, server_variables(self._device, self._folder), log, [])
        server = Server("http://vllm", str(socket))
        self._process.wait(server.answers, poll)
        # It has read the model.
        server.loaded = replace(self._current, adapter=None)
        together([server.check(None, lora=self._lora_rank > 0)])
        together([server.load(self._current)])
        self.servers = [server]

    def wake(self) -> None:
        if any(server.asleep for server in self.servers):
            torch.cuda.empty_cache()
            together(server.wake() for server in self.servers)

    def sleep(self) -> None:
        """Only a server that was started here shares this process's GPU."""
        if self._process is not None and self._device.type == "cuda":
            together(server.sleep() for server in self.servers)

    def generate(self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **how: Any) -> Generation:
        rows = zip(prompts["queries"].tolist(), prompts["query_attn_masks"].tolist(), strict=True)
        tokens = [[token for token, real in zip(*row, strict=True) if real] for row in rows]
        longest, most = max(map(len, tokens)) + params.max_new_tokens, min(s.longest_row for s in self.servers)
        if longest > most:
            said = f"prompt and response have up to {longest} tokens, but the vLLM server takes {most}"
            raise ValueError(f"{said}; start it with a longer --max-model-len (vllm_args)")
        self._restarts = 0
        keys = params.random_keys(prompts["prompt_ids"]).cpu()
        return Sampling(self, model, tokens, keys, params, how["turns"], how["hooks"]).run()
