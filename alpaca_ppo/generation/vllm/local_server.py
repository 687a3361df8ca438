"""A vLLM server that this process starts, and starts again if it has ended."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.generation.vllm.process import ServerProcess, server_command, server_variables
from alpaca_ppo.generation.vllm.server import Publication, Server, together


class LocalServer(Server):
    """A server on this process's `device`, which listens on a socket in `folder`, takes adapters up to `lora_rank` (0:
    no adapters) and computes in `dtype`.
    """

    def __init__(self, args: PPOConfig, folder: Path, dtype: torch.dtype, lora_rank: int, device: torch.device) -> None:
        rank = PartialState().process_index
        self._path = folder / f"{rank}.sock"
        super().__init__("http://vllm", str(self._path))
        self._log = Path(args.output_dir).absolute() / f"vllm_{rank}.log"
        self._args, self._folder, self._dtype, self._lora_rank, self.device = args, folder, dtype, lora_rank, device
        self._process: ServerProcess | None = None

    def start(self, new: Publication, poll: Callable[[], Any]) -> None:
        """Starts the server and waits until it has loaded `new`; calls `poll` meanwhile."""
        if self._process is not None:
            self._process.stop()
        torch.cuda.empty_cache()
        self._path.unlink(missing_ok=True)
        command = server_command(self._args, new.model, self._path, self._dtype, self._lora_rank, self.device)
        PartialState().print(f"vLLM starts; its log is {self._log}", flush=True)
        self._process = ServerProcess(command, server_variables(self.device, self._folder), self._log, [])
        self._process.wait(self.answers, poll)
        # It has read the model, but no adapter.
        self.asleep, self.loaded = False, replace(new, adapter=None)
        together([self.check(None, lora=self._lora_rank > 0)])
        together([self.load(new)])

    def restart(self, poll: Callable[[], Any]) -> None:
        """Starts a server that has ended again, on the weights that it had loaded."""
        assert self.loaded is not None
        warnings.warn(f"the vLLM server has ended ({self.reason()}), and is started again", stacklevel=2)
        self.start(self.loaded, poll)

    def has_ended(self) -> bool:
        """Whether it does not run; one that does not answer is given time to end."""
        return self._process is None or (not self.answers() and self._process.ends())

    def reason(self) -> str:
        """Why it has ended, in words."""
        assert self._process is not None
        return self._process.reason()
