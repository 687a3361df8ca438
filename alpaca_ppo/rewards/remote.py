"""`RemoteReward`: a reward source that asks HTTP servers, which may be slow, broken or hostile.

The scores are checked as those of any function. `examples/reward_server.py` is a server. An answer has a limit in time,
its last byte included, and in size; it is read as it is sent, because a small compressed one may be huge, and redirects
are not followed, because they would take the data and the key elsewhere. Calling again after a failure is left to
`reward_retries`.
"""

import asyncio
import json
import math
import os
import ssl
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx2 as httpx

from alpaca_ppo.config.credentials import REMOVED, without_credentials
from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.names import check_url, shown_url
from alpaca_ppo.rewards.batch import Prompt

KEY_VARIABLE = "REWARD_API_KEY"
"""The environment variable whose key is sent to every server, as a bearer token."""
_CONNECT_SECONDS = 10.0
"""To a host that does not answer at all, so that another server can be asked soon."""


class RequestFailed(Exception):
    """A server gave no usable answer: no connection, none in time, an HTTP status other than success, or something that
    is too large, no JSON or of another form. The message names the server and shows no credential.
    """

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{shown_url(url)} {without_credentials(problem)}")


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
        parts = _parts(prompts, len(self.urls))
        first, self._turn = self._turn, self._turn + len(parts)
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
            raise ValueError(
                f"a column of {list(sent)} or a prompt cannot be sent as JSON ({type(error).__name__}: {error}); name "
                "the columns to send, RemoteReward(columns=[...])"
            ) from error
        answers = await asyncio.gather(
            *(
                self._ask(body, completion_ids[part], turn)
                for turn, (part, body) in enumerate(zip(parts, bodies, strict=True), first)
            )
        )
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
                rewards = answer.get("rewards") if isinstance(answer, dict) else None
                if isinstance(rewards, list) and len(rewards) == len(completion_ids):
                    return answer, number
                form = f'{{"rewards": [...]}} with {len(completion_ids)} entries'
                raise RequestFailed(url, f"sent {shown(answer)}; it must send {form}")
            except RequestFailed as failure:
                failures.append(failure)
        raise RemoteServersFailed("the reward server " + ", and ".join(map(str, failures)))


def _parts(prompts: Sequence[Prompt], count: int) -> list[slice]:
    """Up to `count` parts of the rows, with about equally many prompts, whose responses stay together."""
    begins = [row for row, prompt in enumerate(prompts) if row == 0 or prompt != prompts[row - 1]]
    borders = [*begins[:: math.ceil(len(begins) / count)], len(prompts)]
    return [slice(*ends) for ends in pairwise(borders)]


def key_from(variable: str) -> str:
    """The key in an environment variable, empty if it is not set.

    Raises:
        ValueError: for a key that no HTTP header can carry; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {variable} holds characters that no HTTP header can; set it anew")
    return key


async def post_json(url: str, body: bytes, *, key_variable: str, seconds: float, max_bytes: int) -> Any:
    """Sends `body` and returns the JSON value of the answer.

    Args:
        url: where to. A user and a password in it are sent as basic authentication, in place of the key.
        body: JSON.
        key_variable: the environment variable whose key, if it is set, is sent as a bearer token.
        seconds: that the request may take, from its beginning to the last byte of the answer.
        max_bytes: that the answer may have.

    Raises:
        RequestFailed: see there.
    """
    parts, key, answer = urlsplit(url), key_from(key_variable), bytearray()
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key and not parts.username else {}
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS), verify=_ssl()) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > max_bytes:
                    break
        said = shown(answer.decode(errors="replace"))
        if not response.is_success:
            status = response.status_code
            problem = f"answered with HTTP status {status}: {said}; check its log, address and {key_variable}"
        elif len(answer) > max_bytes:
            problem = f"sent an answer of more than {max_bytes} bytes; check its address"
        else:
            try:
                return json.loads(answer.decode())
            # Deep nesting is a RecursionError.
            except (ValueError, RecursionError) as error:
                problem = f"sent an answer that is no JSON ({type(error).__name__}): {said}; check its address"
    except TimeoutError:
        problem = f"did not answer within {seconds:g} s; allow it more time, or send less"
    # Their texts may hold the address, so that they are neither chained nor shown as they are.
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        problem = f"could not be asked ({type(error).__name__}: {shown(str(error))}); check that it runs"
    for secret in filter(None, (key, parts.password, unquote(parts.password or ""))):
        problem = problem.replace(secret, REMOVED)
    raise RequestFailed(url, problem) from None


@cache
def _ssl() -> ssl.SSLContext:
    """Made once: it reads the certificates of all authorities."""
    return httpx.create_ssl_context()
