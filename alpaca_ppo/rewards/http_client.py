"""Requests to servers that may be slow, broken or hostile: JSON is sent with POST, and JSON is read.

An answer has a limit in time, its last byte included, and in size; compressed answers are refused, because a small one
may be huge, and redirects are not followed, because they would take the data and the key elsewhere. Retries are not
here: `reward_retries` calls a reward function again.
"""

import asyncio
import json
import os
import ssl
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx2 as httpx

from alpaca_ppo.config.credentials import REMOVED, without_credentials
from alpaca_ppo.config.urls import shown_url

_CONNECT_SECONDS = 10.0
"""To a host that does not answer at all, so that another server can be asked soon."""
_SHOWN_BYTES = 2000
_SHOWN_CHARS = 160


class RequestFailed(Exception):
    """A server gave no usable answer: no connection, none in time, an HTTP status other than success, or something that
    is too large, compressed, no JSON or of another form. The message names the server and shows no credential.
    """

    def __init__(self, url: str, problem: str, *, status: int | None = None) -> None:
        super().__init__(f"{shown_url(url)} {without_credentials(problem)}")
        self.status = status


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
    parts, key = urlsplit(url), key_from(key_variable)
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key and not parts.username else {}
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS), verify=_ssl()) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            text, status = await _beginning(response, max_bytes), response.status_code
            problem = _problem(response, text, max_bytes, key_variable)
    except TimeoutError:
        raise RequestFailed(url, f"did not answer within {seconds:g} s; allow it more time, or send less") from None
    # Their texts may hold the address, so that they are neither chained nor shown as they are.
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        text, status = b"", None
        problem = f"could not be asked ({type(error).__name__}: {_shortened(str(error))}); check that it runs"
    if not problem:
        try:
            return json.loads(text.decode())
        # Deep nesting is a RecursionError.
        except (ValueError, RecursionError) as error:
            shown = _shortened(text[:_SHOWN_BYTES].decode(errors="replace"))
            problem = f"sent an answer that is no JSON ({type(error).__name__}): {shown!r}; check its address"
    for secret in filter(None, (key, parts.password, unquote(parts.password or ""))):
        problem = problem.replace(secret, REMOVED)
    raise RequestFailed(url, problem, status=status) from None


@cache
def _ssl() -> ssl.SSLContext:
    """Made once: it reads the certificates of all authorities."""
    return httpx.create_ssl_context()


def _problem(response: Any, text: bytes, max_bytes: int, key_variable: str) -> str:
    """Why the answer is not read; empty if it is."""
    status, encoding = response.status_code, response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        return f"sent an answer compressed with {encoding[:20]!r}, which was not asked for; turn it off"
    if 300 <= status < 400:
        place = _shortened(shown_url(response.headers.get("Location", "")))
        return f"redirects to {place!r} (HTTP status {status}), which is not followed; give that address itself"
    if not 200 <= status < 300:
        remedy = f"the environment variable {key_variable}" if status in (401, 403) else "its log, address and requests"
        shown = _shortened(text[:_SHOWN_BYTES].decode(errors="replace"))
        return f"answered with HTTP status {status}: {shown!r}; check {remedy}"
    return f"sent an answer of more than {max_bytes} bytes; check its address" if len(text) > max_bytes else ""


async def _beginning(response: Any, max_bytes: int) -> bytes:
    """The body as it is sent, or a part of it that has more than `max_bytes`."""
    found = bytearray()
    async for part in response.aiter_raw():
        found += part
        if len(found) > max_bytes:
            break
    return bytes(found)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
