"""`RemoteReward`: a reward source that asks HTTP servers, which may be slow, broken or hostile.

To the scorer it is a Python function: its scores are checked and its calls retried as those of any other.
`examples/reward_server.py` is a server.
"""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.names import check_url, shown_url
from alpaca_ppo.http_json import RequestFailed, ask_json, key_from
from alpaca_ppo.rewards.batch import Prompt

# The environment variable that holds the bearer token for every server.
KEY_VARIABLE = "REWARD_API_KEY"


class RemoteServersFailed(Exception):
    """No server gave a usable answer."""


class RemoteReward:
    """Scores from one or several HTTP servers, which must all give the same scores, for `reward_funcs`.

    A call's rows are split between prompts into one request per server, all sent at once. A request whose server fails
    or sends a malformed answer goes to the next one, until each has been asked. Which server gets a request first never
    depends on timing, except in repeated calls.

    Args:
        timeout: seconds that a server may take for a request, at most a day.
        columns: the dataset columns that are sent; None = all.
        name: of the source in metrics and errors.
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
        # Refuses an unusable key.
        key_from(KEY_VARIABLE)
        self.__name__ = name
        self.timeout, self._columns = float(timeout), columns
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
        """Returns the score of each row, unchecked. `environments` are not sent.

        Raises:
            RemoteServersFailed: if a request has no usable answer from any server.
            ValueError: for rows that cannot be sent.
        """
        if missing := [name for name in self._columns or () if name not in columns]:
            raise ValueError(f"the dataset has no column {missing[0]!r} to send, only {list(columns)}; check its name")
        sent = columns if self._columns is None else {name: columns[name] for name in self._columns}
        parts = _split_between_prompts(prompts, len(self.urls))
        turns = range(self._turn, self._turn + len(parts))
        self._turn = turns.stop
        requests = [
            {
                "prompts": prompts[part],
                "completions": completions[part],
                "completion_ids": completion_ids[part],
                "columns": {name: rows[part] for name, rows in sent.items()},
            }
            for part in parts
        ]
        try:
            bodies = [json.dumps(request, allow_nan=False).encode() for request in requests]
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"a column of {list(sent)} or a prompt cannot be sent as JSON ({type(error).__name__}: {error})"
            raise ValueError(f"{problem}; name the columns to send, RemoteReward(columns=[...])") from error
        answers = await asyncio.gather(*map(self._ask, bodies, [completion_ids[part] for part in parts], turns))
        if log_metric is not None:
            for answer, _ in answers:
                for metric, value in (answer.get("metrics") or {}).items():
                    # A single number counts once for each row.
                    for row_value in value if isinstance(value, list) else [value] * len(answer["rewards"]):
                        log_metric(metric, row_value)
            if len(self.urls) > 1:
                log_metric(f"{self.__name__}/failed_requests", sum(failed_servers for _, failed_servers in answers))
        return [reward for answer, _ in answers for reward in answer["rewards"]]

    async def _ask(self, body: bytes, completion_ids: list[list[int]], turn: int) -> tuple[dict[str, Any], int]:
        """Returns the first usable answer, from server `turn` on, and how many servers failed before; if all fail,
        raises `RemoteServersFailed`.
        """
        failures = []
        # Far more than the numbers take.
        max_bytes = 2**20 + sum(4096 + 64 * len(ids) for ids in completion_ids)
        for attempt in range(len(self.urls)):
            url = self.urls[(turn + attempt) % len(self.urls)]
            try:
                answer = await ask_json(url, body, key_variable=KEY_VARIABLE, seconds=self.timeout, max_bytes=max_bytes)
                found = answer if isinstance(answer, dict) else {}
                rewards, metrics = found.get("rewards"), found.get("metrics") or {}
                if isinstance(rewards, list) and len(rewards) == len(completion_ids) and isinstance(metrics, dict):
                    return found, attempt
                form = f'{{"rewards": [...]}} with {len(completion_ids)} entries; "metrics", if any, are an object'
                raise RequestFailed(shown_url(url), f"sent {shown(answer)}; it must send {form}")
            except RequestFailed as failure:
                failures.append(failure)
        raise RemoteServersFailed("the reward server " + ", and ".join(map(str, failures)))


def _split_between_prompts(prompts: Sequence[Prompt], count: int) -> list[slice]:
    """Splits rows into up to `count` slices with about equally many prompts each."""
    starts = [row for row, prompt in enumerate(prompts) if row == 0 or prompt != prompts[row - 1]]
    boundaries = [*starts[:: math.ceil(len(starts) / count)], len(prompts)]
    return [slice(start, end) for start, end in pairwise(boundaries)]
