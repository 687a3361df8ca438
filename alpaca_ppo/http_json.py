"""JSON from HTTP servers that may be slow, broken or hostile.

An answer is limited in time, to its last byte, and in size. Compressed answers are not decoded, because a small one may
be huge; redirects are not followed, because they would send the data and the key elsewhere.
"""

import asyncio
import json
import os
import ssl
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

import httpx2 as httpx

from alpaca_ppo.config.credentials import REMOVED, without_credentials
from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.names import leads_to_this_machine, shown_url

# For a host that does not answer at all, so that another server can be asked soon.
_CONNECT_SECONDS = 10.0


class RequestFailed(Exception):
    """A server gave no usable answer: no connection, a timeout, an HTTP status other than success, or an answer that is
    too large, no JSON or of another form. The message begins with `server`, as it is shown, and has no credential.
    """

    def __init__(self, server: str, problem: str) -> None:
        super().__init__(f"{server} {without_credentials(problem)}")


def key_from(variable: str) -> str:
    """The key in an environment variable, empty if it is not set.

    Raises:
        ValueError: for a key that no HTTP header can hold; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {variable} holds characters that no HTTP header can; set it anew")
    return key


async def ask_json(
    url: str,
    body: bytes | None,
    *,
    key_variable: str,
    seconds: float,
    max_bytes: int,
    socket: str | None = None,
    parse: Callable[[str], Any] = json.loads,
) -> Any:
    """Sends `body` and returns what `parse` makes of the answer, by default its JSON value.

    Args:
        url: a user and a password in it are sent as basic authentication, instead of the key.
        body: JSON, which is posted; None asks with GET.
        key_variable: the environment variable whose key, if it is set, is sent as a bearer token.
        seconds: limit of the request, to the last byte of the answer.
        max_bytes: limit of the answer.
        socket: path of the Unix socket on which the server listens, instead of the host and port of `url`.
        parse: from the answer's text to what is returned; its ValueError means that the answer is no JSON.

    Raises:
        RequestFailed: if there is no usable answer. A ValueError as `key_from`.
    """
    parts, key = urlsplit(url), key_from(key_variable)
    checks = "its log" if socket else f"its log, address and {key_variable}"
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if key and not parts.username:
        headers["Authorization"] = f"Bearer {key}"
    answer = bytearray()

    def quoted(text: str) -> str:
        # Credentials are removed first: in a text that is shortened, a part of one could be left.
        for secret in filter(None, (key, parts.password, unquote(parts.password or ""))):
            text = text.replace(secret, REMOVED)
        return shown(text)

    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                verify=_ssl(),
                # A proxy is for other machines, and would get the key.
                trust_env=bool(socket is None and getproxies()) and not leads_to_this_machine(parts.hostname or ""),
                transport=httpx.AsyncHTTPTransport(verify=_ssl(), uds=socket) if socket else None,
            ) as client,
            client.stream("GET" if body is None else "POST", url, content=body, headers=headers) as response,
        ):
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > max_bytes:
                    break
        if not response.is_success:
            text = quoted(answer.decode(errors="replace"))
            problem = f"answered with HTTP status {response.status_code}: {text}; check {checks}"
        elif len(answer) > max_bytes:
            problem = f"sent an answer of more than {max_bytes} bytes; check its address"
        else:
            try:
                return parse(answer.decode())
            # Deep nesting is a RecursionError.
            except (ValueError, RecursionError) as error:
                text = quoted(answer.decode(errors="replace"))
                problem = f"sent an answer that is no JSON ({type(error).__name__}): {text}; check its address"
    except TimeoutError:
        problem = f"did not answer within {seconds:g} s; allow it more time, or send less"
    # Their texts may hold the address, so they are neither chained nor shown unchanged.
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        problem = f"could not be asked ({type(error).__name__}: {quoted(str(error))}); check that it runs"
    raise RequestFailed(socket or shown_url(url), problem) from None


@cache
def _ssl() -> ssl.SSLContext:
    """Made once, because it reads the certificates of all authorities."""
    return httpx.create_ssl_context()
