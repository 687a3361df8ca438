"""A reward server: scores of a reward model or a reward function over HTTP, for `reward_url`.

    python -m examples.reward_server outputs/reward_model --port 8000
    python -m examples.reward_server my_rewards.py:right_result --host 0.0.0.0

POST /score takes the plain form, POST /get_reward that of OpenRLHF (see docs/rewards.md). If the environment variable
REWARD_API_KEY is set, requests must bring it. One request is scored at a time; for several at once, start several
servers. It needs `pip install 'alpaca_ppo[http]'`.
"""

import argparse
import asyncio
import hmac
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web

from alpaca_ppo.rewards import RewardScorer, build_reward
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
        built = build_reward(source, batch_size=batch_size, device=device)
        # A row that the source leaves to others has no score.
        self._scorer = RewardScorer(built.sources, built.weights, measures=True)
        self._scorer.offer(None)
        self.name = self._scorer.names[0]
        self._lock = asyncio.Lock()

    def app(self) -> web.Application:
        """The application that answers requests."""
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.add_routes([web.post("/score", self._answer(plain)), web.post("/get_reward", self._answer(openrlhf))])
        return app

    def _answer(self, read: Callable[[Any], dict[str, Any]]) -> Callable[[web.Request], Any]:
        """The handler of requests that `read` turns into the arguments of a scorer."""

        async def handle(request: web.Request) -> web.Response:
            key = os.environ.get(KEY_VARIABLE, "").strip()
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if key and not hmac.compare_digest(given.encode(), key.encode()):
                return web.json_response({"error": f"the key is not that of {KEY_VARIABLE}"}, status=401)
            try:
                arguments = read(await request.json())
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                return web.json_response({"error": f"a request of another form: {error!r}"}, status=400)
            try:
                async with self._lock:
                    return web.json_response(await asyncio.to_thread(self._score, arguments))
            except Exception as error:
                return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

        return handle

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
        return {"rewards": rewards, "metrics": logged, "extra_logs": logged}


def plain(request: Any) -> dict[str, Any]:
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


def openrlhf(request: Any) -> dict[str, Any]:
    """The same in {"query", "prompts", "labels"}; a function gets the labels as the column `labels`."""
    queries = _list(request["query"], "query")
    prompts = _list(request.get("prompts") or [""] * len(queries), "prompts", len(queries))
    labels = _list(request.get("labels") or [""] * len(queries), "labels", len(queries))
    return {
        "prompts": prompts,
        "completions": [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)],
        "completion_ids": [[] for _ in queries],
        "rows": [{"labels": label} for label in labels],
    }


def _list(value: Any, name: str, count: int | None = None) -> list[Any]:
    if not isinstance(value, list) or count not in (None, len(value)):
        raise ValueError(f"{name} is no list" if count is None else f"{name} is no list of {count} values")
    return value


async def serve(server: RewardServer, host: str, port: int) -> None:
    """Answers requests until SIGINT (Ctrl-C) or SIGTERM."""
    stopped = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0][1]
        print(f"{server.name} scores at http://{host}:{bound}/score and /get_reward", flush=True)
        await stopped.wait()
        print("stopped")
    finally:
        await runner.cleanup()


def main(argv: list[str] | None = None) -> None:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or hub id of a reward model, module:function or file.py:function")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 = every one")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 = any that is free, which is printed")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per forward pass of a reward model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of a reward model")
    given = parser.parse_args(argv)
    server = RewardServer(given.source, batch_size=given.batch_size, device=given.device)
    asyncio.run(serve(server, given.host, given.port))


if __name__ == "__main__":
    main()
