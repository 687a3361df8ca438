"""`generation_backend: vllm`: samples from vLLM servers, which get the weights after each update.

Each process of the run starts a server, or uses those that `vllm_urls` names. The processes of a machine share the
files of the weights: the first of them writes these, and all go on once every server has loaded them.
"""

import os
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from alpaca_ppo.adapters.adapter_set import POLICY
from alpaca_ppo.config.names import check_url, is_this_machine
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list, raise_on_all_ranks
from alpaca_ppo.distributed.preemption import SamplingStopped
from alpaca_ppo.distributed.weight_sums import whole_sums
from alpaca_ppo.generation.backends import Backend, GenerateOptions, PolicyWeights
from alpaca_ppo.generation.responses import Generation, SamplingParams
from alpaca_ppo.generation.vllm import weights as files
from alpaca_ppo.generation.vllm.local_server import LocalServer
from alpaca_ppo.generation.vllm.process import ServerProcess, check_options
from alpaca_ppo.generation.vllm.sampling import Sampling
from alpaca_ppo.generation.vllm.server import REQUEST_SHARE, Publication, Server, together
from alpaca_ppo.models.policy import Policy
from alpaca_ppo.types import PromptBatch


class VLLMBackend(Backend):
    """Log-probs are those of the distribution that was sampled from: in evaluation, that of `top_k`, `top_p` or the
    likeliest token.

    Raises:
        ValueError: without the options of a run, or for options that name no usable server.
    """

    takes_turns = takes_stop_strings = has_own_weights = True
    args: PPOConfig

    def __init__(self, args: PPOConfig | None = None) -> None:
        if args is None:
            raise ValueError("backend is 'vllm', which needs the options of a run; use a trainer, or backend='auto'")
        super().__init__(args)
        self._urls = args.vllm_urls or []
        for url in self._urls:
            check_url("vllm_urls", url)
        if not self._urls:
            check_options(args)
        # Those that this process samples from: `vllm_urls`, or `_local`, which it starts.
        self.servers: list[Server] = []
        self._local: LocalServer | None = None
        self._publications = 0
        # `_prepare` sets what follows.
        self._dtype, self._lora_rank = torch.float32, 0
        # Of the weights' files, and whether this process writes them.
        self._folder, self._writes, self._writer = Path(), True, 0
        # Of the last base that was written, or of the whole model.
        self._digests: dict[str, str] = {}
        # Removes the folder when this process ends.
        self._guard: ServerProcess | None = None

    def sync(self, policy: Policy, weights: PolicyWeights) -> None:
        """Gives the servers the policy's weights as a new version.

        Raises:
            ValueError: if there is no room for them, or what is written or what a server has loaded is not the policy.
            RuntimeError: if that happened on another process.
            SamplingStopped: if `poll` raises it on any process.
        """
        state = PartialState()
        number, adapted = self._publications, policy.adapters is not None
        if number == 0:
            self._prepare(policy)
        self._publications += 1
        if self._urls:
            # Those that some process has removed are removed on all, unless none would be left.
            left = set.intersection(*gather_list({server.name for server in self.servers}, state))
            self.servers = [server for server in self.servers if server.name in left] or self.servers
        folder = self._folder / str(number)
        version = f"{self._folder.name}-{number}"
        model = self._folder / "base" if adapted else folder
        # The base of an adapter does not change.
        base_changed = number == 0 or not adapted
        base = files.copied(weights(base=True), self._dtype, keep=self._writes) if base_changed else {}
        adapter = files.copied(weights(), None, keep=self._writes) if adapted else {}
        # Not from `weights`, so that a tensor that these leave out is noticed.
        base_sums = whole_sums(files.live_tensors(policy, adapter=False), self._dtype) if base_changed else {}
        adapter_sums = whole_sums(files.live_tensors(policy, adapter=True), None) if adapted else {}
        with raise_on_all_ranks(state):
            if base:
                files.write_model(model, policy, base, self._dtype)
                self._digests = files.digests(files.check_written(model, base_sums, base))
            if adapter:
                files.write_adapter(folder, policy, adapter)
                files.check_written(folder, adapter_sums, {})
        if base_changed:
            self._digests = gather_list(self._digests, state)[self._writer]
        _on_all_ranks(partial(self._load, Publication(version, model, folder if adapted else None, self._digests)))
        if self._writes and number > 0:
            shutil.rmtree(self._folder / str(number - 1))
        self.half_precision = any(server.half_precision for server in self.servers)

    def _prepare(self, policy: Policy) -> None:
        """Chooses the dtype, and makes the folder of the weights and the servers. All ranks must call this."""
        files.check_policy(policy)
        dtype = self.args.vllm_dtype or ("bfloat16" if self.args.bf16 else None)
        self._dtype = getattr(torch, dtype) if dtype else policy.model.dtype
        if policy.adapters is not None:
            config = policy.adapters.config_of(POLICY)
            self._lora_rank = max([config.r, *(config.rank_pattern or {}).values()])
        state = PartialState()
        # Servers on other machines read the files from output_dir, which one process writes: all count as one machine.
        remote = not all(map(is_this_machine, self._urls))
        machines = gather_list("" if remote else platform.node(), state)
        peers = [rank for rank, machine in enumerate(machines) if machine == machines[state.process_index]]
        self._writer, self._writes = peers[0], state.process_index == peers[0]
        with raise_on_all_ranks(state):
            if self._writes:
                output_dir = Path(self.args.output_dir).absolute()
                output_dir.mkdir(parents=True, exist_ok=True)
                shared = output_dir if remote else None
                self._folder = files.make_folder(shared, files.bytes_of(policy, self._dtype))
                # A watchdog without a server.
                self._guard = ServerProcess(command=[], variables={}, log=Path(os.devnull), folders=[self._folder])
        self._folder = gather_list(self._folder, state)[self._writer]
        if self._urls:
            # The processes of a machine send their first prompts to different servers.
            first = peers.index(state.process_index) % len(self._urls)
            urls, timeout = self._urls[first:] + self._urls[:first], self.args.ddp_timeout
            self.servers = [Server(url, timeout=timeout) for url in urls]
            lora = self._lora_rank > 0
            checks = [server.check(self._folder, self._dtype, lora=lora) for server in self.servers]
            _on_all_ranks(partial(together, checks, self.poll))
        else:
            self._local = LocalServer(self.args, self._folder, self._dtype, self._lora_rank, policy.model.device)
            self.servers = [self._local]

    def _load(self, new: Publication) -> None:
        """Loads weights into the server of this process, or, on the first process of a machine, into `vllm_urls`."""
        if self._local is not None:
            self._local.publish(new, self.poll)
            return
        if self._writes:
            together([server.load(new) for server in self.servers], self.poll)
        for server in self.servers:
            server.loaded = new

    def wake(self) -> None:
        if self._local is not None:
            self._local.wake_up(self.poll)

    def sleep(self) -> None:
        if self._local is not None:
            self._local.rest(self.poll)

    def generate(
        self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> Generation:
        longest = int(prompts["query_attn_masks"].sum(dim=1).max()) + params.max_new_tokens
        most = min(server.longest_row for server in self.servers)
        if longest > most:
            raise ValueError(f"rows have up to {longest} tokens, but the vLLM server takes {most}; set --max-model-len")
        timeout = REQUEST_SHARE * self.args.ddp_timeout
        vocab_size = model.config.get_text_config().vocab_size
        return Sampling(self.servers, timeout, vocab_size, prompts, params, options).run()


def _on_all_ranks(work: Callable[[], None]) -> None:
    """Does `work`; its error, or the signal that stops it, ends the sampling on every rank. All must call this."""
    state, stopped = PartialState(), False
    with raise_on_all_ranks(state):
        try:
            work()
        except SamplingStopped:
            stopped = True
    if any(gather_list(stopped, state)):
        raise SamplingStopped
