"""`RemoteReward`: a reward source that asks HTTP servers.

How requests are made is in `http_client`; the scores are checked as those of any function. `examples/reward_server.py`
is a server. Calling again after a failure is left to `reward_retries`.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.urls import check_url, shown_url
from alpaca_ppo.rewards.batch import Prompt
from alpaca_ppo.rewards.http_client import RequestFailed, key_from, post_json

KEY_VARIABLE = "REWARD_API_KEY"
"""The environment variable whose key is sent to every server, as a bearer token."""


class RemoteServersFailed(Exception):
    """No server gave a usable answer; the message names each, and what was wrong with it."""


class RemoteReward:
    """Scores from one or several HTTP servers, for `reward_funcs`.

    A call's rows are cut into as many requests as there are servers, between prompts, and the requests go to the
    servers in turn, all at once. If a server fails or sends a malformed answer, the next one is asked, and so on until
    each has been. Which server is asked first never depends on timing, except in repeated calls. Every server must give
    the same scores.

    Args:
        url: the address of a server, or several.
        timeout: seconds that a server may take for a request.
        columns: of the dataset that are sent; None = all.
        name: of the source in metrics and errors.

    Raises:
        ValueError: for an invalid argument.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        timeout: float = 60.0,
        columns: Sequence[str] | None = None,
        name: str = "remote_reward",
    ) -> None:
        self.urls = [url] if isinstance(url, str) else list(url)
        if not self.urls:
            raise ValueError("RemoteReward got no url; give the address of at least one server")
        for address in self.urls:
            check_url("RemoteReward(url)", address)
        if not 0 < timeout <= 86400:
            raise ValueError(f"RemoteReward(timeout={timeout}) must be above 0 and at most a day, in seconds")
        key_from(KEY_VARIABLE)
        self.__name__, self.timeout, self._columns = name, float(timeout), columns
        self._turn = 0

    def __repr__(self) -> str:
        return f"RemoteReward({', '.join(map(shown_url, self.urls))})"

    async def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Prompt],
        completion_ids: list[list[int]],
        log_metric: Callable[[str, float], None] | None = None,
        environments: Any = None,
        **columns: Any,
    ) -> list[Any]:
        """Returns the score of each row, unchecked. `environments` are objects of this process, and are not sent.

        Raises:
            RemoteServersFailed: if a request has no usable answer from any server.
            ValueError: for rows that cannot be sent.
        """
        if missing := [name for name in self._columns or () if name not in columns]:
            raise ValueError(f"the dataset has no column {missing[0]!r} to send, only {list(columns)}; check its name")
        sent = columns if self._columns is None else {name: columns[name] for name in self._columns}
        lists: dict[str, list[Any]] = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        parts = _parts(prompts, len(self.urls))
        first, self._turn = self._turn, self._turn + len(parts)
        bodies = [
            _as_json(
                {name: rows[part] for name, rows in lists.items()}
                | {"columns": {name: rows[part] for name, rows in sent.items()}}
            )
            for part in parts
        ]
        requests = [
            self._ask(body, completion_ids[part], first + number)
            for number, (part, body) in enumerate(zip(parts, bodies, strict=True))
        ]
        answers = await asyncio.gather(*requests)
        if log_metric is not None:
            for answer, _ in answers:
                for name, value in (answer.get("metrics") or {}).items():
                    # That of the whole request counts for each of its rows.
                    for each in value if isinstance(value, list) else [value] * len(answer["rewards"]):
                        log_metric(name, each)
            if len(self.urls) > 1:
                log_metric(f"{self.__name__}/failed_requests", sum(failed for _, failed in answers))
        return [reward for answer, _ in answers for reward in answer["rewards"]]

    async def _ask(self, body: bytes, completion_ids: list[list[int]], turn: int) -> tuple[dict[str, Any], int]:
        """The answer to one request, and how many servers failed before."""
        failures = []
        # Much more than numbers take for each row and token.
        max_bytes = 2**20 + sum(4096 + 64 * len(ids) for ids in completion_ids)
        for number in range(len(self.urls)):
            url = self.urls[(turn + number) % len(self.urls)]
            try:
                answer = await post_json(
                    url, body, key_variable=KEY_VARIABLE, seconds=self.timeout, max_bytes=max_bytes
                )
                return _checked(url, answer, len(completion_ids)), number
            except RequestFailed as failure:
                failures.append(failure)
        raise RemoteServersFailed("the reward server " + ", and ".join(map(str, failures)))


def _checked(url: str, answer: Any, count: int) -> dict[str, Any]:
    """The answer, if it is {"rewards": [...]} with an entry for each row, and perhaps {"metrics": {...}}."""
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        raise RequestFailed(url, f'sent {shown(answer)}; it must send {{"rewards": [...]}} with {count} entries')
    if not isinstance(answer.get("metrics") or {}, dict):
        raise RequestFailed(url, f"sent {shown(answer['metrics'])} as metrics; it must be an object")
    assert isinstance(answer, dict)
    return answer


def _as_json(request: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(request, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a column of {list(request['columns'])} or a prompt cannot be sent as JSON ({type(error).__name__}: "
            f"{error}); name the columns to send, RemoteReward(columns=[...])"
        ) from error


def _parts(prompts: Sequence[Prompt], count: int) -> list[slice]:
    """Up to `count` parts of the rows, about equally large, none of which ends between rows of the same prompt."""
    borders = [0]
    for number in range(1, count):
        border = max(round(number * len(prompts) / count), borders[-1])
        while 0 < border < len(prompts) and prompts[border] == prompts[border - 1]:
            border += 1
        if borders[-1] < border < len(prompts):
            borders.append(border)
    return [slice(start, stop) for start, stop in zip(borders, [*borders[1:], len(prompts)], strict=True)]
