"""A vLLM server that this process starts, and starts again if it has ended."""

import warnings
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.generation.vllm.process import END_SECONDS, ServerProcess, server_command, server_variables
from alpaca_ppo.generation.vllm.server import START_SHARE, Publication, Server, together
from alpaca_ppo.http_json import RequestFailed


class LocalServer(Server):
    """A server on this process's `device`, which listens on a socket in `folder`, takes adapters up to `lora_rank` (0:
    no adapters) and computes in `dtype`.
    """

    def __init__(self, args: PPOConfig, folder: Path, dtype: torch.dtype, lora_rank: int, device: torch.device) -> None:
        rank = PartialState().process_index
        self._path = folder / f"{rank}.sock"
        super().__init__("http://vllm", str(self._path), args.ddp_timeout)
        self._log = Path(args.output_dir).absolute() / f"vllm_{rank}.log"
        self._args, self._folder, self._dtype, self._lora_rank, self.device = args, folder, dtype, lora_rank, device
        self._process: ServerProcess | None = None

    def start(self, new: Publication, poll: Callable[[], Any]) -> None:
        """Starts the server and waits until it has loaded `new`; calls `poll` meanwhile."""
        if self._process is not None:
            self._process.stop()
        torch.cuda.empty_cache()
        self._path.unlink(missing_ok=True)
        # With another path vLLM would compile the same model anew.
        link = self._log.with_suffix(".model")
        link.unlink(missing_ok=True)
        link.symlink_to(new.model)
        command = server_command(self._args, link, self._path, self._dtype, self._lora_rank, self.device)
        PartialState().print(f"vLLM starts; its log is {self._log}", flush=True)
        self._process = ServerProcess(command, server_variables(self.device, self._folder), self._log, [link])
        try:
            self._process.wait(lambda: self.answers(poll), poll, START_SHARE * self._args.ddp_timeout)
        finally:
            link.unlink(missing_ok=True)
        # It has read the model, but no adapter.
        self.asleep, self.loaded, self._held = False, replace(new, adapter=None), {}
        together([self.check(None, self._dtype, lora=self._lora_rank > 0)], poll)
        together([self.load(new)], poll)

    def publish(self, new: Publication, poll: Callable[[], Any]) -> None:
        """Lets the server load `new`; starts it if it does not run, and again if it ends meanwhile."""
        if self._process is None:
            self.start(new, poll)
        else:
            self.wake_up(poll)
            self._attempt(self.load(new), new, poll)

    def wake_up(self, poll: Callable[[], Any]) -> None:
        """Restores what `rest` has freed; starts the server again if that fails, such as for lack of memory."""
        if self.asleep and self.loaded is not None:
            torch.cuda.empty_cache()
            self._attempt(self.wake(), self.loaded, poll)

    def rest(self, poll: Callable[[], Any]) -> None:
        """Frees memory of the GPU that it shares with this process."""
        if self.device.type == "cuda" and self.loaded is not None:
            self._attempt(self.sleep(), self.loaded, poll)
            if not self.asleep:
                # It was started again.
                together([self.sleep()], poll)

    def _attempt(self, call: Coroutine[Any, Any, None], weights: Publication, poll: Callable[[], Any]) -> None:
        """Awaits `call`; if the server has ended, or gives no usable answer, starts it again on `weights`."""
        try:
            together([call], poll)
        except ValueError as error:
            # Without a failed request the server did answer, but wrongly; a new start would not change that.
            if not isinstance(error.__cause__, RequestFailed) and self.answers(poll):
                raise
            self.restart(weights, poll)

    def restart(self, weights: Publication, poll: Callable[[], Any]) -> None:
        """Ends the server if it still runs, and starts it again on `weights`."""
        warnings.warn(f"the vLLM server has ended ({self.reason(poll)}), and is started again", stacklevel=2)
        self.start(weights, poll)

    def reason(self, poll: Callable[[], Any]) -> str:
        """Why it has ended, in words; ends it if it still runs."""
        assert self._process is not None
        return self._process.reason(poll, within=0.0 if self.answers(poll) else END_SECONDS)
