"""Requests to servers that may be slow, broken or hostile: JSON is sent with POST, and JSON is read.

The client is aiohttp, of the extra `http`. An answer has a limit in time, its last byte included, and in size;
compressed answers are refused, because a small one may be huge, and redirects are not followed, because they would take
the data and the key elsewhere. Retries are not here: `reward_retries` calls a reward function again.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from alpaca_ppo.config.credentials import REMOVED, without_credentials
from alpaca_ppo.config.urls import shown_url

_CONNECT_SECONDS = 10.0
"""To a host that does not answer at all, so that another server can be asked soon."""
_SHOWN_BYTES = 2000
_SHOWN_CHARS = 160


class RequestFailed(Exception):
    """A server gave no usable answer.

    Args:
        url: of the server, of which the message shows no credential.
        problem: what went wrong, as the end of a sentence that begins with the server.
        status: the HTTP status that says so, if one does.
        secrets: texts that the message must not contain, such as the key that was sent.
    """

    def __init__(self, url: str, problem: str, *, status: int | None = None, secrets: tuple[str, ...] = ()) -> None:
        for secret in filter(None, secrets):
            problem = problem.replace(secret, REMOVED)
        super().__init__(f"{shown_url(url)} {without_credentials(problem)}")
        self.status = status


def require_aiohttp(user: str) -> Any:
    """Returns the module aiohttp, for `user`, which is named in the error.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ValueError(f"{user} needs the package aiohttp; pip install 'alpaca_ppo[http]' or aiohttp") from error
    return aiohttp


def key_from(variable: str) -> str | None:
    """Returns the key in an environment variable, None if it is not set.

    Raises:
        ValueError: for a key that no HTTP header can carry; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {variable} holds characters that no HTTP header can; set it anew")
    return key or None


@asynccontextmanager
async def http_session(seconds: float) -> AsyncIterator[Any]:
    """A session for `post_json`, of the event loop that runs.

    Args:
        seconds: that a request may take, from its beginning to the last byte of the answer.
    """
    aiohttp = require_aiohttp("a request")
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _CONNECT_SECONDS))
    jar = aiohttp.DummyCookieJar()
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        timeout=timeout, headers=headers, cookie_jar=jar, auto_decompress=False
    ) as session:
        yield session


async def post_json(
    session: Any, url: str, body: bytes, *, key_variable: str, max_bytes: int, when_slow: str = ""
) -> Any:
    """Sends `body` and returns the JSON value of the answer.

    Args:
        session: of `http_session`.
        url: where to. A user and a password in it are sent as basic authentication, in place of the key.
        body: JSON.
        key_variable: the environment variable whose key, if it is set, is sent as a bearer token.
        max_bytes: that the answer may have.
        when_slow: what to do if there is no answer in time, as the end of a message.

    Raises:
        RequestFailed: if there is no connection, no answer in time, an HTTP status other than success, or an answer
            that is too large, compressed, or no JSON.
    """
    aiohttp = require_aiohttp("a request")
    parts, key = urlsplit(url), key_from(key_variable)
    secrets = (key or "", parts.password or "", unquote(parts.password or ""))

    def failed(problem: str, status: int | None = None) -> RequestFailed:
        return RequestFailed(url, problem, status=status, secrets=secrets)

    headers = {} if key is None or parts.username else {"Authorization": f"Bearer {key}"}
    try:
        async with session.post(url, data=body, headers=headers, allow_redirects=False, proxy=_proxy(url)) as response:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise failed(f"sent an answer compressed with {encoding[:20]!r}, which was not asked for; turn it off")
            if problem := await _refusal(response, key_variable):
                raise failed(problem, response.status)
            text, is_whole = await _beginning(response, max_bytes)
    except TimeoutError:
        total = session.timeout.total
        raise failed(f"did not answer within {total:g} s{when_slow}") from None
    # Their texts may hold the address, so that they are neither chained nor shown as they are. aiohttp raises a
    # ValueError for some headers that it cannot read.
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise failed(
            f"could not be asked ({type(error).__name__}: {_shortened(str(error))}); check that it runs and that this "
            "machine reaches it"
        ) from None
    if not is_whole:
        raise failed(f"sent an answer of more than {max_bytes} bytes, the most that it may have; check its address")
    try:
        return json.loads(text.decode())
    # Deep nesting is a RecursionError.
    except (ValueError, RecursionError) as error:
        shown = _shortened(text[:_SHOWN_BYTES].decode(errors="replace"))
        raise failed(f"sent an answer that is no JSON ({type(error).__name__}): {shown!r}; check its address") from None


async def _refusal(response: Any, key_variable: str) -> str | None:
    """What an HTTP status other than success means."""
    status = response.status
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        place = _shortened(shown_url(response.headers.get("Location", "")))
        return f"redirects to {place!r} (HTTP status {status}), which is not followed; give that address itself"
    text, _ = await _beginning(response, _SHOWN_BYTES)
    reason = _shortened(text.decode(errors="replace"))
    return f"answered with HTTP status {status}: {reason!r}; " + (
        "look into its log"
        if status >= 500
        else f"check the environment variable {key_variable}"
        if status in (401, 403)
        else "check its address and the form of the requests"
    )


async def _beginning(response: Any, max_bytes: int) -> tuple[bytes, bool]:
    """The body, or `max_bytes` of it, and whether that is all."""
    found = bytearray()
    async for part in response.content.iter_any():
        found += part
        if len(found) > max_bytes:
            return bytes(found[:max_bytes]), False
    return bytes(found), True


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for `url`."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
