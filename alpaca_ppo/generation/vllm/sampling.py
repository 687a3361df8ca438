"""The rows of one call of the sampler, each of which sends one request after the other until its response has ended.

A request has all tokens so far, whose beginning the server has in its cache. A token depends on the row's key and the
position at which its request begins, never on other rows, their order or the server.
"""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.async_calls import Call, CallTimeout, RowCall, RowCalls
from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation.backends import GenerateOptions
from alpaca_ppo.generation.responses import Generation, SamplingParams, StopRule, unfilled, unpadded
from alpaca_ppo.generation.turns import Pending, Reply, Turn, check_reply
from alpaca_ppo.generation.vllm.local_server import LocalServer
from alpaca_ppo.generation.vllm.server import Server, request_params
from alpaca_ppo.http_json import RequestFailed
from alpaca_ppo.types import PromptBatch

# At a time; a server queues those that it cannot decode at once.
_MOST_REQUESTS = 256
# Seconds after which `before_token` is called again.
_WAIT = 0.05
# Seconds until a request that has failed is made again.
RETRY_DELAYS = (0.5, 2.0, 8.0)
# The most tokens of a request if something else than stop tokens, which a server does not know, may end a turn.
_PIECE = 64


@dataclass
class _Row:
    """A response so far; its mask and log-probs are in `Sampling._out`.

    Attributes:
        failures: how often the current request has failed.
        server: which was asked last.
        matched: the state of `StopStrings.advance`.
    """

    index: int
    prompt: list[int]
    server: Server
    tokens: list[int] = field(default_factory=list)
    turn_start: int = 0
    stopped: bool = False
    failures: int = 0
    matched: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))


class Sampling:
    """Samples the responses of one call of `Backend.generate`. The `timeout` of a request is in seconds; a server that
    exceeds it is started again, or removed from `servers` (`_retry`).
    """

    def __init__(
        self,
        servers: list[Server],
        timeout: float,
        vocab_size: int,
        prompts: PromptBatch,
        params: SamplingParams,
        options: GenerateOptions,
    ) -> None:
        self._servers, self._timeout, self._vocab_size = servers, timeout, vocab_size
        self._params, self._turns, self._hooks = params, options["turns"], options["hooks"]
        self._rule = StopRule(params, torch.device("cpu"))
        self._request = request_params(params, self._rule)
        self._keys = params.random_keys(prompts["prompt_ids"]).cpu()
        rows, n = len(self._keys), params.num_return_sequences
        tokens = unpadded(prompts)
        self._rows = [_Row(i, tokens[i // n], servers[0]) for i in range(rows)]
        self._calls = RowCalls(most=_MOST_REQUESTS)
        # Rows whose responses are not complete, and those of them that wait for a reply instead of for a server.
        self._unfinished = set(range(rows))
        self._pending: set[int] = set()
        self._restarted_at = 0.0
        self._out = unfilled(params, rows)

    def run(self) -> Generation:
        """Samples every row to its end. An exception abandons all requests, also on the servers."""
        try:
            for row in self._rows:
                self._send(row)
            while self._unfinished:
                self._hooks.before_token()
                all_pending = len(self._pending) == len(self._unfinished)
                for call in self._calls.finished(0.0 if all_pending else _WAIT):
                    self._receive(call)
                if self._turns is not None and self._pending:
                    for index, reply in self._turns.replies(self._pending, _WAIT if all_pending else 0.0):
                        self._pending.remove(index)
                        self._append_reply(self._rows[index], reply)
        finally:
            self._calls.abandon()
        return self._out

    def _limit(self, row: _Row) -> int:
        """The position before which the current turn of `row` must end."""
        width = self._params.max_new_tokens
        return width if self._turns is None else self._turns.limit(row.turn_start, width)

    def _send(self, row: _Row, delay: float = 0.0) -> None:
        """Asks for the next tokens of `row`."""
        position = len(row.tokens)
        most = self._limit(row) - position
        if not self._rule.only_stop_ids:
            most = min(most, _PIECE)
        seed = int(uniforms(self._keys[row.index : row.index + 1], position) * 2**52)
        request = self._request | {"max_tokens": most, "seed": seed}
        arguments = {"row": row, "tokens": row.prompt + row.tokens, "params": request, "delay": delay}
        self._calls.start(row.index, Call(self._sample, arguments, self._timeout))

    async def _sample(self, row: _Row, **arguments: Any) -> tuple[list[int], list[float]]:
        """Rows of one prompt go to the server that has its beginning in the cache, after a failure to another."""
        prompt, servers = row.index // self._params.num_return_sequences, [*self._servers]
        row.server = servers[(prompt + row.failures) % len(servers)]
        return await row.server.sample(**arguments, vocab_size=self._vocab_size)

    def _receive(self, call: RowCall) -> None:
        """Appends what a server answers; asks again if it did not."""
        row, error = self._rows[call.row], call.error
        if isinstance(error, RequestFailed | CallTimeout):
            self._retry(row, error, call.began)
        elif error is not None:
            raise error
        else:
            row.failures = 0
            self._append_sampled(row, *call.value)

    def _retry(self, row: _Row, error: RequestFailed | CallTimeout, began: float) -> None:
        """Makes the request of `row` again, which began at `began` and had no answer:

        - A server of this process that has ended or hangs is started again, however often the request has failed.
        - Another server that hangs is removed, with a warning.
        - Without a restart, a failure after the last of `RETRY_DELAYS` and a hang of the only server raise ValueError.
        """
        server, hangs = row.server, isinstance(error, CallTimeout)
        restarts = isinstance(server, LocalServer) and self._restart_ended(server, began, hangs=hangs)
        # The message of `RequestFailed` begins with the server.
        problem = str(error) or f"{server.name} did not answer within {self._timeout:g} s"
        if not restarts and (row.failures >= len(RETRY_DELAYS) or (hangs and self._servers == [server])):
            raise ValueError(f"the vLLM server at {problem}; docs/vllm.md lists the causes") from error
        if hangs and not restarts and server in self._servers:
            warnings.warn(f"the vLLM server at {problem}; the run goes on without it", stacklevel=2)
            self._servers.remove(server)
        row.failures = min(row.failures + 1, len(RETRY_DELAYS))
        self._send(row, RETRY_DELAYS[row.failures - 1])

    def _restart_ended(self, server: LocalServer, began: float, *, hangs: bool) -> bool:
        """Whether the server was started again after `began`; starts it again if it has ended or `hangs`. Raises
        ValueError if that is the second time.
        """
        poll = self._hooks.before_token
        if began <= self._restarted_at:
            return True
        if not hangs and server.answers(poll):
            return False
        if self._restarted_at:
            raise ValueError(f"the vLLM server has ended twice: {server.reason(poll)}")
        assert server.loaded is not None
        server.restart(server.loaded, poll)
        self._restarted_at = time.monotonic()
        return True

    def _append_sampled(self, row: _Row, tokens: list[int], logprobs: list[float]) -> None:
        """Appends the sampled tokens up to the one that ends the turn. Without one, asks for more, up to the limit."""
        start = len(row.tokens) - row.turn_start
        ids, positions = torch.tensor(tokens), torch.arange(start, start + len(tokens))
        # `StopRule` reads one token of each row. Without stop strings it keeps no state: tokens may pass for rows.
        size = 1 if self._params.stop_strings else len(tokens)
        kept = len(tokens)
        for first in range(0, len(tokens), size):
            part = slice(first, first + size)
            ends, row.matched = self._rule(ids[part], positions[part], row.matched)
            row.stopped = bool(ends.any())
            if row.stopped:
                kept = first + int(ends.int().argmax()) + 1
                break
        self._append(row, tokens[:kept], logprobs[:kept], chosen=True)
        if row.stopped or len(row.tokens) == self._limit(row):
            self._end_turn(row)
        else:
            self._send(row)

    def _append(self, row: _Row, tokens: list[int], logprobs: list[float], *, chosen: bool) -> None:
        """Appends tokens to a response, with the log-probs of those that the policy has chosen and zero for others."""
        columns = slice(len(row.tokens), len(row.tokens) + len(tokens))
        row.tokens += tokens
        self._out.responses[row.index, columns] = torch.tensor(tokens, dtype=torch.long)
        self._out.response_mask[row.index, columns] = chosen
        self._out.logprobs[row.index, columns] = torch.tensor(logprobs)

    def _end_turn(self, row: _Row) -> None:
        """Finishes a row of full width, and every row if there are no turns; asks how others go on."""
        position = len(row.tokens)
        if self._turns is None or position == self._params.max_new_tokens:
            self._finish(row)
            return
        mask = self._out.response_mask[row.index, :position].tolist()
        turn = Turn(row.index, list(row.tokens), mask, row.turn_start, stopped=row.stopped)
        reply = self._turns.handler.on_stop(turn)
        if isinstance(reply, Pending):
            self._pending.add(row.index)
        else:
            self._append_reply(row, reply)

    def _append_reply(self, row: _Row, reply: Reply) -> None:
        """Appends the reply to a turn and begins the next; finishes the row if there is no reply or no room left."""
        width = self._params.max_new_tokens
        appended = check_reply(reply, row.index, self._vocab_size)
        if appended is not None:
            kept = appended[: width - len(row.tokens)]
            self._append(row, kept, [0.0] * len(kept), chosen=False)
            if len(row.tokens) < width:
                row.turn_start, row.matched = len(row.tokens), torch.zeros(1, dtype=torch.long)
                self._send(row)
                return
            # The reply filled the row, so the response was cut off.
            row.stopped = False
        self._finish(row)

    def _finish(self, row: _Row) -> None:
        """Reports a row whose response is complete."""
        self._unfinished.remove(row.index)
        self._out.stopped[row.index] = row.stopped
        self._hooks.on_finished([row.index], self._out[[row.index]])
