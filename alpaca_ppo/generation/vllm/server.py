"""Requests to a vLLM server, to load weights and to sample tokens, and checks of its answers."""

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from alpaca_ppo.async_calls import await_all, error_text
from alpaca_ppo.config.names import shown_url
from alpaca_ppo.generation.responses import SamplingParams, StopRule
from alpaca_ppo.http_json import RequestFailed, ask_json

# The versions that were tried: others have different routes and fields, or reset less after new weights.
VERSIONS = "0.32"
# The name under which servers that this package starts serve the model.
MODEL = "policy"
_ASK_SECONDS = 60.0
# The parts of `ddp_timeout` in which a server must start, answer a request for tokens, and do anything else. A hang,
# the start after it, and what then has to be done again must end before the other processes give up.
START_SHARE, REQUEST_SHARE, CALL_SHARE = 0.4, 0.4, 0.2
# After which a server that still works is asked whether its engine lives.
_HEALTH_SECONDS = 2.0
# Attempts to empty the prefix cache, a tenth of a second apart: abandoned requests may still hold blocks of it.
_RESETS = 50
# The most tokens of the prompt that shows whether it was emptied; a block of the cache has up to 256.
_PROBE = 513
# The SHA-256 of no bytes: what is left of a weight that vLLM has packed on a CPU.
_PACKED = hashlib.sha256().hexdigest()
# What vLLM sends for a log-prob that is not finite.
_NOT_FINITE = -9999.0


@dataclass(frozen=True)
class Publication:
    """A version of the policy's weights as files.

    Attributes:
        model: the folder of a whole model: the policy, or, with an `adapter`, its base.
        adapter: the folder of the policy's adapter, if any.
        digests: SHA-256 of the weights of `model` that are not all zeros, by vLLM's names.
    """

    version: str
    model: Path
    adapter: Path | None = None
    digests: Mapping[str, str] = field(default_factory=dict)


def request_params(params: SamplingParams, rule: StopRule) -> dict[str, Any]:
    """The settings of `params` under vLLM's names. An answer includes the stop token that ends it."""
    # 0 takes the likeliest token, whatever top_k and top_p are.
    temperature = params.temperature if params.do_sample else 0.0
    choice = {"temperature": temperature, "top_k": params.top_k or -1, "top_p": params.top_p or 1.0}
    # The model's own stop tokens are among those of the rule.
    return {"stop_token_ids": rule.stop_ids, "ignore_eos": True, "logprobs": 0, "detokenize": False, **choice}


def together(calls: Iterable[Awaitable[Any]], poll: Callable[[], Any] = lambda: None) -> None:
    """Awaits all requests at once, and calls `poll` meanwhile; raises ValueError for the first that failed."""
    for value in await_all(list(calls), poll):
        if isinstance(value, RequestFailed):
            raise ValueError(f"the vLLM server at {value}") from value
        if isinstance(value, BaseException):
            raise value


def _limited(method: Callable[..., Awaitable[None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """Gives a method of `Server` its `patience`, after which it raises RequestFailed. For an answer in which a field is
    missing or has another type, it raises ValueError. Both name the server.
    """

    @wraps(method)
    async def limited(server: "Server", *args: Any, **keywords: Any) -> None:
        try:
            async with asyncio.timeout(server.patience):
                await method(server, *args, **keywords)
        except TimeoutError as error:
            raise RequestFailed(server.name, f"did not answer within {server.patience:g} s (ddp_timeout)") from error
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the vLLM server at {server.name} gave a wrong answer: {error_text(error)}") from error

    return limited


class Server:
    """A vLLM server at `url`, or on the Unix socket with the path `socket`, for processes that wait for one another up
    to `timeout` seconds.

    Attributes:
        name: of the server in messages.
        patience: seconds after which `check`, `load`, `wake` and `sleep` fail.
        half_precision: whether it computes in less than 32 bits; set by `check`.
        longest_row: the most tokens of a prompt and its response; set by `check`.
        loaded: the weights that it holds; None before the first `load`.
        asleep: whether `sleep` has freed its memory.
    """

    def __init__(self, url: str, socket: str | None = None, timeout: float = math.inf) -> None:
        self._url, self._socket = url.rstrip("/"), socket
        self.name = shown_url(url) if socket is None else socket
        self.patience = CALL_SHARE * timeout
        self.half_precision = False
        self.longest_row = 0
        self.loaded: Publication | None = None
        self.asleep = False
        # The name under which it serves the model.
        self._model = MODEL
        self._health_asked_at = 0.0
        # SHA-256 of the weights that it holds, by name.
        self._held: dict[str, str] = {}
        # Names of the weights that it holds as they were published; others are packed for the processor, or parts.
        self._comparable: set[str] = set()

    async def ask(self, path: str, body: Any = None, **options: Any) -> Any:
        """What the server answers; see `ask_json`."""
        content = None if body is None else json.dumps(body).encode()
        options = {"seconds": _ASK_SECONDS, "max_bytes": 2**24, **options}
        return await ask_json(self._url + path, content, key_variable="VLLM_API_KEY", socket=self._socket, **options)

    async def _ask_patiently(self, path: str, body: Any, **options: Any) -> Any:
        """As `ask`, without a limit of its own: every `_HEALTH_SECONDS` one of the requests that wait also asks for
        the server's health, and fails if its engine has ended.
        """
        request = asyncio.create_task(self.ask(path, body, **{"seconds": math.inf, **options}))
        try:
            while not (await asyncio.wait([request], timeout=_HEALTH_SECONDS))[0]:
                if time.monotonic() - self._health_asked_at >= _HEALTH_SECONDS:
                    self._health_asked_at = time.monotonic()
                    await self.ask("/health", parse=str)
            return request.result()
        finally:
            request.cancel()
            # Breaks a reference cycle: its exception's traceback holds this frame.
            del request

    def answers(self, poll: Callable[[], Any] = lambda: None) -> bool:
        """Whether it answers at all, and its engine lives; calls `poll` meanwhile."""
        return not isinstance(await_all([self.ask("/health", parse=str)], poll)[0], RequestFailed)

    @_limited
    async def check(self, folder: Path | None, dtype: torch.dtype, *, lora: bool) -> None:
        """Checks how the server was started, and sets `half_precision` and `longest_row`. It must hold its weights in
        `dtype`, in which they are written, and load adapters if `lora`. `folder` is where weights are written for a
        server that this run did not start: it must see the folder, and its model's name is read.

        Raises:
            ValueError: for another version or dtype, a missing flag or a wrong answer, or if it does not see `folder`.
            RequestFailed: without a usable answer.
        """
        check_version((await self.ask("/version"))["version"], f"the vLLM server at {self.name}")
        paths = (await self.ask("/openapi.json"))["paths"]
        needed = {"/collective_rpc": "VLLM_SERVER_DEV_MODE=1", "/inference/v1/generate": "--enable-scale-out"}
        if lora:
            needed["/v1/load_lora_adapter"] = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        missing = [flag for path, flag in needed.items() if path not in paths]
        if not missing:
            config = (await self.ask("/server_info?config_format=json"))["vllm_config"]["model_config"]
            # Rounding to another dtype would hide a small change of a tensor.
            if config["dtype"] != str(dtype):
                problem = f"computes in {config['dtype']}, but its weights would be written in {dtype}"
                raise ValueError(f"the vLLM server at {self.name} {problem}; set vllm_dtype to the former")
            self.half_precision, self.longest_row = config["dtype"] != "torch.float32", config["max_model_len"]
            if type(self.longest_row) is not int or self.longest_row < 2:
                raise TypeError(f"max_model_len is {self.longest_row!r}")
            if config["logprobs_mode"] != "processed_logprobs":
                missing = ["--logprobs-mode processed_logprobs"]
        if missing:
            raise ValueError(f"the vLLM server at {self.name} was started without {missing[0]}; docs/vllm.md has all")
        if folder is not None:
            self._model = (await self.ask("/v1/models"))["data"][0]["id"]
            await self._check_folder(folder)

    async def _check_folder(self, folder: Path) -> None:
        """Lets the server read the empty file in `folder`, which changes no weight; raises ValueError if it cannot."""
        # In checkpoint format a missing folder would end the server.
        empty = {"weights_path": str(folder), "is_checkpoint_format": False}
        try:
            await self._ask_patiently("/collective_rpc", {"method": "reload_weights", "kwargs": empty})
        except RequestFailed as error:
            # Raises RequestFailed itself if it does not answer at all.
            await self.ask("/health", parse=str)
            problem = f"does not see {folder}, where weights are written for it"
            remedy = "give its host or container that folder under the same path"
            raise ValueError(f"the vLLM server at {self.name} {problem}; {remedy}: {error}") from error

    @_limited
    async def load(self, new: Publication) -> None:
        """Loads weights, empties the cache of what older ones computed, and checks both.

        Raises:
            ValueError: for a wrong answer, or if the server has lost the last weights, then holds other weights or old
                results, or requests of others keep its cache filled.
            RequestFailed: without a usable answer.
        """
        old = self.loaded
        if old is not None and old.adapter is not None:
            # The base is not loaded anew.
            await self._check_not_restarted(old)
        if old is None:
            # Makes all weights zero, so that the checksums show a tensor that the reload leaves out.
            await self._ask_patiently("/weight_checker", {"action": "reset"})
            self._held = await self._checksums()
        if old is None or old.model != new.model:
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(new.model)}}
            await self._ask_patiently("/collective_rpc", arguments)
        if new.adapter is not None:
            adapter = {"lora_name": new.version, "lora_path": str(new.adapter)}
            await self._ask_patiently("/v1/load_lora_adapter", adapter, parse=str)
        await self.ask("/update_weight_version", {"new_version": new.version})
        await self._empty_cache()
        await self._check_loaded(new)
        self.loaded = new
        if old is not None and old.adapter is not None:
            await self.ask("/v1/unload_lora_adapter", {"lora_name": old.version}, parse=str)

    async def _check_not_restarted(self, old: Publication) -> None:
        """Raises ValueError unless the server still has the weights `old`."""
        answer = await self._probe([0])
        if (found := _versions(answer["choices"][0])) != [old.version]:
            problem = f"has weights {', '.join(found)} instead of {old.version}"
            cause = "it was started again, or another run uses it; resume, with a server for this run"
            raise ValueError(f"the vLLM server at {self.name} {problem}: {cause}")

    async def _empty_cache(self) -> None:
        """Raises ValueError if requests of others keep the cache filled."""
        for _ in range(_RESETS):
            if (await self._ask_patiently("/reset_prefix_cache", {}))["success"] is True:
                return
            await asyncio.sleep(0.1)
        raise ValueError(f"the vLLM server at {self.name} still works for somebody; let no other run use it")

    async def _check_loaded(self, new: Publication) -> None:
        """Raises ValueError if the server holds other weights than `new`, or results of older ones."""
        problem, held, equal = "", self._held, self._comparable
        # The base of an adapter stays.
        if new.adapter is None or self.loaded is None or self.loaded.adapter is None:
            held = await self._checksums()
            equal = {name for name, digest in held.items() if new.digests.get(name) == digest}
            different = (self._comparable & new.digests.keys()) - equal
            kept = {name for name, digest in held.items() if digest == self._held.get(name) != _PACKED}
            old = {} if self.loaded is None else self.loaded.digests
            # Under other layouts than the files', a tensor must at least have changed with these. All were zeros before
            # the first, as those without a digest are.
            unchanged = {name for name in kept if old.get(name) != new.digests.get(name)}
            stale = different | unchanged
            if stale or not equal:
                names = ", ".join(sorted(stale)[:3]) or "none of them"
                problem = f"holds other weights than the published ones ({names})"
        # The same prompt every time: after the reset, the first blocks of it must be computed anew.
        before = await self._cached_tokens()
        await self._probe([0] * min(self.longest_row - 1, _PROBE))
        if await self._cached_tokens() > before:
            problem = "answers from the prefix cache of older weights"
        if problem:
            raise ValueError(f"the vLLM server at {self.name} {problem}; it would not sample from the trained policy")
        # Set last, so that the checksums belong to the weights of `loaded`.
        self._held, self._comparable = held, self._comparable or equal

    async def _probe(self, tokens: list[int]) -> Any:
        """The answer to a request for one token, without an adapter."""
        body = {"model": self._model, "token_ids": tokens, "sampling_params": {"max_tokens": 1}}
        return await self._ask_patiently("/inference/v1/generate", body)

    async def _checksums(self) -> dict[str, str]:
        """SHA-256 of the weights that it holds, by name; of parts on several GPUs that are not alike, all of them."""
        answer = await self._ask_patiently("/weight_checker", {"action": "checksum"})
        found = dict[str, list[str]]()
        for name, digest in sorted(answer["checksums"].items()):
            found.setdefault(name.rpartition(":")[2].replace(".base_layer", ""), []).append(digest)
        return {name: digests[0] if len({*digests}) == 1 else " ".join(digests) for name, digests in found.items()}

    async def _cached_tokens(self) -> float:
        """How many tokens of prompts it has found in its prefix cache so far."""
        lines = (await self.ask("/metrics", parse=str)).splitlines()
        found = [line.split()[-1] for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
        if not found:
            raise ValueError(f"the vLLM server at {self.name} was started with --disable-log-stats; leave that out")
        if not all(re.fullmatch(r"[\d.e+]+", number) for number in found):
            raise TypeError(f"vllm:prefix_cache_hits_total is {' and '.join(found)}")
        return sum(map(float, found))

    @_limited
    async def wake(self) -> None:
        """Restores the memory that `sleep` has freed. Memory that is mapped already must not be mapped again."""
        if self.asleep:
            await self._ask_patiently("/wake_up", {})
            self.asleep = False

    @_limited
    async def sleep(self) -> None:
        """Frees memory of its GPU: weights go to the host, the cache is dropped.

        Level 1, because weights that level 2 has dropped came back wrong
        (https://github.com/vllm-project/vllm/issues/29341).
        """
        await self._ask_patiently("/sleep?level=1", {})
        self.asleep = True

    async def sample(
        self, tokens: list[int], params: dict[str, Any], *, vocab_size: int, delay: float = 0.0
    ) -> tuple[list[int], list[float]]:
        """The next tokens that the loaded weights sample, and their log-probs in nats. `tokens` are the prompt and the
        response so far, `params` are `request_params` with `max_tokens` and `seed`. The request is made after `delay`
        seconds, and an answer with an id of `vocab_size` or above is refused.

        Raises:
            RequestFailed: without a usable answer.
            ValueError: for an answer that does not fit the request.
        """
        await asyncio.sleep(delay)
        assert self.loaded is not None, "weights are published before responses are sampled"
        model = self._model if self.loaded.adapter is None else self.loaded.version
        body = {"model": model, "token_ids": tokens, "sampling_params": params}
        max_bytes = 2**20 + 2048 * params["max_tokens"]
        answer = await self._ask_patiently("/inference/v1/generate", body, max_bytes=max_bytes)
        try:
            if answer["model"] != model:
                raise ValueError(f"it is of {answer['model']} instead of {model}")
            if any(choice.get("finish_reason") == "abort" for choice in answer["choices"]):
                raise RequestFailed(self.name, "aborted a request, as it does when its engine ends; check its log")
            return _parsed(answer, params, self.loaded.version, vocab_size)
        # A field may be missing, or have another type or size.
        except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the vLLM server at {self.name} gave a wrong answer: {error_text(error)}") from error


def _parsed(answer: Any, params: dict[str, Any], version: str, vocab_size: int) -> tuple[list[int], list[float]]:
    """The tokens and log-probs of an answer to a request with `params`. Raises ValueError if it does not fit the
    request or is not of the weights `version`, and other errors if a field is missing or of another type.
    """
    most, stops = params["max_tokens"], params["stop_token_ids"]
    (choice,) = answer["choices"]
    tokens = choice["token_ids"]
    entries = [(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    if not all(type(token) is int for token in tokens) or not all(type(value) in (int, float) for _, value in entries):
        raise TypeError("a token or a log-prob is no number")
    versions = _versions(choice)
    problems = {
        f"it is of weights {', '.join(versions)} instead of {version}": versions != [version],
        f"{len(tokens)} tokens instead of 1 to {most}": not 1 <= len(tokens) <= most,
        f"{len(tokens)} tokens without a stop token": len(tokens) < most and not set(tokens[-1:]) & set(stops),
        "tokens after a stop token": set(tokens[:-1]) & set(stops),
        f"tokens outside of the vocabulary of {vocab_size}": not all(0 <= token < vocab_size for token in tokens),
        "log-probs of other tokens": [token for token, _ in entries] != tokens,
        "a log-prob above 0": any(logprob > 1e-3 for _, logprob in entries),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(problem)
    return tokens, [value if value > _NOT_FINITE else math.nan for _, value in entries]


def _versions(choice: Any) -> list[str]:
    """The versions of the weights that have sampled the tokens of an answer."""
    return sorted({str(span["version"]) for span in choice["weight_versions"]})


def check_version(version: str, where: str) -> None:
    """Raises ValueError for a version of vLLM, found at `where`, that was not tried."""
    if ".".join(version.split(".")[:2]) != VERSIONS:
        raise ValueError(f"{where} is vLLM {version}; {VERSIONS}.x is needed (alpaca-ppo vllm-env makes it)")
