"""A reward server: scores of a reward model or a reward function over HTTP, for `reward_url`.

    python -m examples.reward_server outputs/reward_model --port 8000
    python -m examples.reward_server my_rewards.py:right_result --host 0.0.0.0

POST /score takes what docs/rewards.md says. If the environment variable REWARD_API_KEY is set, requests must bring it.
One request is scored at a time; for several at once, start several servers.
"""

import argparse
import hmac
import json
import math
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from alpaca_ppo.rewards import build_reward
from alpaca_ppo.rewards.remote import KEY_VARIABLE

_MAX_REQUEST_BYTES = 2**30


class RewardServer:
    """Scores requests with one reward source.

    Args:
        source: as in `reward_funcs`.
        batch_size: sequences that one forward pass of a reward model may have.
        device: of a reward model.
    """

    def __init__(self, source: Any, *, batch_size: int = 8, device: str | None = None) -> None:
        # A row that the source leaves to others has no score.
        self._scorer = build_reward(source, batch_size=batch_size, measures=True)
        if device is not None:
            self._scorer.to(device)
        self._scorer.offer(None)
        self.name = self._scorer.names[0]
        self._lock = threading.Lock()

    def answer(self, authorization: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """The HTTP status and the JSON of the answer to a request."""
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if key and not hmac.compare_digest(authorization.removeprefix("Bearer ").encode(), key.encode()):
            return 401, {"error": f"the key is not that of {KEY_VARIABLE}"}
        try:
            arguments = read(json.loads(body))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return 400, {"error": f"a request of another form: {error!r}"}
        try:
            with self._lock:
                return 200, self._score(arguments)
        except Exception as error:
            return 500, {"error": f"{type(error).__name__}: {error}"}

    def _score(self, arguments: dict[str, Any]) -> dict[str, Any]:
        result = self._scorer(**arguments)
        totals = result.by_source[self.name].tolist()
        if result.rewards.dim() == 2:
            # Of each token; what comes after a row's last one is padding.
            rows = zip(result.rewards.tolist(), arguments["completion_ids"], strict=True)
            scores = [rewards[: len(ids)] for rewards, ids in rows]
        else:
            scores = totals
        logged = {name: total / count for name, (total, count) in self._scorer.logged.pop().items()}
        rewards = [None if math.isnan(total) else score for total, score in zip(totals, scores, strict=True)]
        return {"rewards": rewards, "metrics": logged}


def read(request: Any) -> dict[str, Any]:
    """The arguments of a `RewardScorer` in {"prompts", "completions", "completion_ids", "columns"}."""
    columns, prompts = request.get("columns") or {}, _list(request["prompts"], "prompts")
    count = len(prompts)
    columns = {name: _list(values, name, count) for name, values in columns.items()}
    return {
        "prompts": prompts,
        "completions": _list(request["completions"], "completions", count),
        "completion_ids": _list(request.get("completion_ids") or [[] for _ in prompts], "completion_ids", count),
        "rows": [{name: values[row] for name, values in columns.items()} for row in range(count)],
    }


def _list(value: Any, name: str, count: int | None = None) -> list[Any]:
    if not isinstance(value, list) or count not in (None, len(value)):
        raise ValueError(f"{name} is no list" if count is None else f"{name} is no list of {count} values")
    return value


def serve(server: RewardServer, host: str, port: int) -> None:
    """Answers requests until SIGINT (Ctrl-C) or SIGTERM."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, answer = 404, {"error": "the address is /score"}
            if length > _MAX_REQUEST_BYTES:
                status, answer = 413, {"error": f"a request of more than {_MAX_REQUEST_BYTES} bytes"}
            elif self.path == "/score":
                status, answer = server.answer(self.headers.get("Authorization", ""), self.rfile.read(length))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing about each request."""

    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stopped.set())
    with ThreadingHTTPServer((host, port), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        print(f"{server.name} scores at http://{host}:{http.server_port}/score", flush=True)
        stopped.wait()
        http.shutdown()
    print("stopped")


def main(argv: list[str] | None = None) -> None:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or hub id of a reward model, module:function or file.py:function")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 = every one")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 = any that is free, which is printed")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per forward pass of a reward model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of a reward model")
    given = parser.parse_args(argv)
    serve(RewardServer(given.source, batch_size=given.batch_size, device=given.device), given.host, given.port)


if __name__ == "__main__":
    main()
