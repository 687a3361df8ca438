"""A server on this machine that answers each request with bytes of a test's choice, well-formed or not."""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What a client sent."""

    path: str
    headers: dict[str, str]
    body: Any


def response(body: Any, *, status: str = "200 OK", headers: str = "") -> bytes:
    """A well-formed answer; a body that is not bytes becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


class RawServer:
    """Answers with what `answer` returns for a request: bytes, or several with `pause` seconds before each.

    Use it as a context manager. `requests` has what came, in order; `arrived` is called with each request.
    """

    def __init__(self, answer: Callable[[Request], Any], *, pause: float = 0.0) -> None:
        self.answer, self._pause = answer, pause
        self.requests: list[Request] = []
        self.arrived: Callable[[Request], Any] = lambda request: None
        self._ended = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"http://{self.address}/score"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "RawServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, suppress(OSError):
            if not (first := stream.readline()):
                return
            lines = iter(stream.readline, b"\r\n")
            headers = dict(line.decode().strip().split(": ", 1) for line in lines)
            body = json.loads(stream.read(int(headers.get("Content-Length", 0))) or "null")
            request = Request(first.decode().split()[1], headers, body)
            self.requests.append(request)
            self.arrived(request)
            answer = self.answer(request)
            for part in [answer] if isinstance(answer, bytes) else answer:
                if self._ended.wait(self._pause):
                    return
                connection.sendall(part)
