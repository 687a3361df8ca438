"""A server that speaks as much of vLLM's protocol as this package uses, without vLLM: for tests of seconds.

A token is a function of the files of the weights, the tokens before it, the request's seed and the number of tokens
drawn from that seed, so that whoever sends other seeds, tokens or stale weights gets other tokens. It is a program of
the standard library, which the script of `fake_python` starts in place of vLLM, or runs in a thread of a test.
"""

import hashlib
import json
import random
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VOCABULARY = 64
ROUTES = (
    "/version /openapi.json /server_info /v1/models /collective_rpc /v1/load_lora_adapter /v1/unload_lora_adapter "
    "/update_weight_version /reset_prefix_cache /sleep /wake_up /inference/v1/generate /health /metrics /weight_checker"
).split()


def digest(folder: Path) -> str:
    """What a model or an adapter in `folder` is known by."""
    (file,) = folder.glob("*model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8]


def held(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights in `folder`, as a server on a CPU knows them: without those that it packs."""
    (file,) = folder.glob("*model.safetensors")
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    plain = [name for name in entries if name != "__metadata__" and "_proj." not in name]
    places = {name: slice(*(start + offset for offset in entries[name]["data_offsets"])) for name in plain}
    return {f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(content[place]).hexdigest() for name, place in places.items()}


def sample(loaded: str, tokens: list[int], params: dict[str, Any]) -> list[tuple[int, float]]:
    """The tokens that follow `tokens`, each with its log-prob, up to a stop token or `max_tokens`."""
    found: list[tuple[int, float]] = []
    while len(found) < params["max_tokens"] and not (found and found[-1][0] in params["stop_token_ids"]):
        drawn = None if params["temperature"] == 0 else (params["seed"], len(found))
        numbers = random.Random(repr((loaded, tokens, [token for token, _ in found], drawn)))
        found.append((numbers.randrange(VOCABULARY), -numbers.random()))
    return found


def is_check(path: str, body: Any) -> bool:
    """Whether a request only asks for what the server holds; one for a token shows its cache."""
    return path in ("/health", "/metrics", "/weight_checker") or (
        path.endswith("/generate") and "seed" not in body["sampling_params"]
    )


class FakeVLLM:
    """What the server knows, and what it was asked.

    Args:
        config: replaces entries of the `model_config` that it reports.
        answer: replaces `sample`.
    """

    def __init__(self, answer: Callable[..., list[tuple[int, float]]] = sample, **config: Any) -> None:
        self.config = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_model_len": 512, **config}
        self.answer, self.version, self.routes = answer, "0.32.0", list(ROUTES)
        self.loaded, self.weights, self.adapters = "", "default", dict[str, str]()
        self.held = dict[str, str]()
        self.keeps = set[str]()
        """The names of weights that it does not replace."""
        self.stored: Callable[[dict[str, str]], dict[str, str]] = lambda held: held
        """Changes the SHA-256 of what it has loaded, as another layout would."""
        self.asked: list[tuple[str, Any]] = []
        self.cached, self.hits = set[tuple[int, ...]](), 0
        """The prompts in its cache, and how many of their tokens it has found there."""
        self.before: Callable[[str, Any], Any] = lambda path, body: None
        """Called with each request but checks; what it returns in place of None is sent as it is."""
        self.after: Callable[[dict[str, Any]], Any] = lambda answer: answer
        """Changes the answer to a request for tokens."""
        self.sees = True
        """Whether it sees the folders that it is given."""
        self.lives = True
        """Whether the engine does, without which the rest answers nothing but this."""
        self.resets = True
        """Whether it says if it has emptied that cache."""
        self.counts = True
        """Whether it counts, for `/metrics`, what its prefix cache has found."""
        self.asleep = False
        self.working = 0
        """Requests for tokens that are being answered."""

    @property
    def published(self) -> list[dict[str, Any]]:
        """The bodies of the requests by which it was given models and adapters, in order."""
        routes = ("/collective_rpc", "/v1/load_lora_adapter")
        bodies = [body for path, body in self.asked if path in routes]
        return [body for body in bodies if "is_checkpoint_format" not in body.get("kwargs", {})]

    def respond(self, path: str, body: Any) -> Any:
        """The JSON value that answers a request; those that only check are not among `asked`."""
        route = path.partition("?")[0]
        if not is_check(path, body):
            self.asked.append((path, body))
        if route not in self.routes:
            raise LookupError(route)
        wakes = route == "/wake_up"
        assert self.asleep == wakes or route in ("/health", "/version"), "asleep" if self.asleep else "awake already"
        match route:
            case "/health":
                assert self.lives, "engine dead"
            case "/sleep" | "/wake_up":
                self.asleep = not wakes
            case "/version":
                return {"version": self.version}
            case "/openapi.json":
                return {"paths": dict.fromkeys(self.routes, {})}
            case "/server_info":
                return {"vllm_config": {"model_config": self.config}}
            case "/v1/models":
                return {"data": [{"id": "policy"}]}
            case "/metrics":
                return f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}' if self.counts else ""
            case "/weight_checker":
                if body["action"] == "reset":
                    self.held = {name: hashlib.sha256(b"zeros").hexdigest() for name in self.held}
                return {"checksums": self.held}
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                folder = Path(body["kwargs"]["weights_path"])
                assert self.sees and list(folder.glob("*.safetensors")), "Repo id must be in the form"
                if body["kwargs"].get("is_checkpoint_format", True):
                    assert (folder / "config.json").is_file()
                    kept = {name: digest for name, digest in self.held.items() if name.rpartition(":")[2] in self.keeps}
                    self.loaded, self.held = digest(folder), self.stored(held(folder)) | kept
                return {"results": [None]}
            case "/v1/load_lora_adapter":
                assert (Path(body["lora_path"]) / "adapter_config.json").is_file()
                self.adapters[body["lora_name"]] = digest(Path(body["lora_path"]))
            case "/v1/unload_lora_adapter":
                self.adapters.pop(body["lora_name"], None)
            case "/update_weight_version":
                self.weights = body["new_version"]
            case "/reset_prefix_cache":
                self.cached.clear()
                return {"success": self.working == 0} if self.resets else {}
            case "/inference/v1/generate":
                prompt = tuple(body["token_ids"])
                self.hits += len(prompt) * (prompt in self.cached)
                self.cached.add(prompt)
                if is_check(path, body):
                    return {"choices": [{"weight_versions": [{"version": self.weights}]}]}
                adapter = "" if body["model"] == "policy" else self.adapters[body["model"]]
                found = self.answer(self.loaded + adapter, body["token_ids"], body["sampling_params"])
                entries = [{"token_id": token, "logprob": logprob} for token, logprob in found]
                choice = {
                    "token_ids": [token for token, _ in found],
                    "logprobs": {"content": entries},
                    "weight_versions": [{"version": self.weights, "start": 0, "end": len(found)}],
                }
                return self.after({"model": body["model"], "choices": [choice]})
        return {}


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def address_string(self) -> str:
        return "client"

    def log_message(self, *words: Any) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def _answer(self, body: Any) -> None:
        fake: FakeVLLM = self.server.fake
        with suppress(OSError):
            try:
                instead = None if is_check(self.path, body) else fake.before(self.path, body)
                if instead is not None:
                    self.wfile.write(instead)
                    self.close_connection = True
                    return
                status, value = 200, fake.respond(self.path, body)
            except LookupError as missing:
                status, value = 404, {"error": f"no {missing}"}
            except AssertionError as refused:
                status, value = 500, {"error": str(refused)}
            content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 512
    fake: Any


class ServedInThread:
    """A fake in threads of this process: a context manager that gives its address."""

    def __init__(self, fake: FakeVLLM, host: str = "127.0.0.1") -> None:
        ThreadingHTTPServer.request_queue_size = 512
        self._server: Any = ThreadingHTTPServer((host, 0), _Handler)
        self._server.fake = fake
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self.url

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def fake_python(folder: Path, *, version: str = "0.32.0", first: str = "") -> str:
    """Writes an interpreter that starts this file for vLLM's server, and says that it has vLLM `version`.

    Args:
        folder: where it is written.
        version: of vLLM.
        first: a line of Python that the server runs before it serves, with `words`, its command line, and `fake`.
    """
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit; fi\n'
        f"exec {sys.executable} -S {Path(__file__).resolve()} '{first}' \"$@\"\n"
    )
    script.chmod(0o755)
    return str(script)


def main(words: list[str]) -> None:
    """Serves on the socket that a command line of vLLM names."""
    longest, dtype = (words[words.index(name) + 1] for name in ("--max-model-len", "--dtype"))
    fake = FakeVLLM(max_model_len=int(longest), dtype=f"torch.{dtype}")
    model = Path(words[words.index("--model") + 1])
    fake.loaded, fake.held = digest(model), held(model)
    first = words.pop(0)
    exec(first, {"words": words, "fake": fake, "time": time, "sys": sys})
    with _UnixServer(words[words.index("--uds") + 1], _Handler) as server:
        server.fake = fake
        server.serve_forever(poll_interval=0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
