"""A language model behind an OpenAI-compatible HTTP interface (`POST <url>/chat/completions`), and a cache of what it
has decided.

Evaluations ask it which answer is better (`evaluation.chat_judge`); `examples/rewards/judge.py` asks it for scores. The
key comes from the environment variable OPENAI_API_KEY only, and is sent to no other place than `url`. Leaves out
streaming and other interfaces: put a gateway in front of those.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from alpaca_ppo.config.urls import check_url
from alpaca_ppo.rewards.http_client import RequestFailed, post_json, require_aiohttp

KEY_VARIABLE = "OPENAI_API_KEY"
SECONDS = 120.0
"""That a request may take."""
_MAX_BYTES = 2**20
_TEMPORARY = (408, 409, 425, 429)
_LONGEST_PAUSE = 60.0

T = TypeVar("T")


class ChatUnavailable(Exception):
    """A request that failed in a way that may pass, or an answer without a decision, after all retries."""


class ChatModel:
    """Asks a chat model for decisions that can be read from its answers.

    Args:
        url: of the interface, up to and without /chat/completions.
        model: its name there.
        retries: times that a request is repeated which failed or was answered without a decision.
        pause: seconds before the first of these, then twice as many each time, up to a minute.
        repeats_failed: whether requests that failed are repeated here. False leaves it to the caller.

    Raises:
        ValueError: for an address that cannot be one, or without aiohttp.
    """

    def __init__(self, url: str, model: str, *, retries: int, pause: float, repeats_failed: bool = True) -> None:
        check_url("the interface of a chat model", url)
        require_aiohttp(f"asking {model}")
        self.url, self.model = url.rstrip("/"), model
        self._retries, self._pause, self._repeats_failed = retries, pause, repeats_failed

    async def ask(
        self,
        session: Any,
        prompt: str,
        read: Callable[[str], T | None],
        reminder: str,
        *,
        before_request: Callable[[], Any] = lambda: None,
        on_tokens: Callable[[int], Any] = lambda count: None,
    ) -> T:
        """Returns the decision on `prompt`.

        Args:
            session: of `http_client.http_session`.
            prompt: the user's message.
            read: returns the decision in an answer, None if it has none.
            reminder: the next message after an answer without one.
            before_request: called before each request; what it raises ends the asking.
            on_tokens: called with the tokens of each answer and its request, as the interface counts them.

        Raises:
            ChatUnavailable: without a decision after all retries.
            RequestFailed: if the interface refuses the request.
        """
        messages, problem = [{"role": "user", "content": prompt}], ""
        for attempt in range(self._retries + 1):
            pause = self._pause * 2.0 ** (attempt - 1) if attempt else 0.0
            await asyncio.sleep(min(pause, _LONGEST_PAUSE))
            before_request()
            try:
                text, tokens = await self._complete(session, messages)
            except ChatUnavailable as error:
                if not self._repeats_failed:
                    raise
                problem = str(error)
                continue
            on_tokens(tokens)
            if (decision := read(text)) is not None:
                return decision
            problem = f"an answer without a verdict: {text[-80:]!r}"
            messages = [*messages[:1], {"role": "assistant", "content": text}, {"role": "user", "content": reminder}]
        raise ChatUnavailable(problem)

    async def _complete(self, session: Any, messages: Sequence[dict[str, str]]) -> tuple[str, int]:
        """The answer and the tokens that it cost."""
        body = json.dumps({"model": self.model, "messages": list(messages), "temperature": 0}).encode()
        url = f"{self.url}/chat/completions"
        try:
            answer = await post_json(session, url, body, key_variable=KEY_VARIABLE, max_bytes=_MAX_BYTES)
        except RequestFailed as error:
            if error.status is not None and error.status < 500 and error.status not in _TEMPORARY:
                raise
            raise ChatUnavailable(str(error)) from error
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise ChatUnavailable(f"an answer of another form ({type(error).__name__})") from error
        if not isinstance(text, str):
            raise ChatUnavailable("an answer without text")
        usage = answer.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else 0
        return text, max(tokens, 0) if isinstance(tokens, int) else 0


class DecisionCache:
    """Decisions as numbers, kept in a file of JSON lines so that each is paid for once.

    Args:
        path: of the file; created with the first decision.
        field: under which a line has the number.
    """

    def __init__(self, path: Path, field: str) -> None:
        self._path, self._field = path, field
        self.entries: dict[str, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for line in lines:
            # A run that was killed while writing leaves an incomplete line, which is asked for again.
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                self.entries[str(entry["key"])] = {**entry, field: float(entry[field])}

    def get(self, key: str) -> float | None:
        """The decision, None if there is none."""
        return self.entries[key][self._field] if key in self.entries else None

    def keep(self, key: str, decision: float, **others: Any) -> None:
        """Adds a decision, and `others` to its line."""
        self.entries[key] = {"key": key, self._field: decision, **others}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(self.entries[key]) + "\n")


def cache_key(*parts: Any) -> str:
    """A hash of plain values, under which a decision about them is kept."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def as_text(prompt: Any) -> str:
    """Returns a prompt of text as it is, and messages as one line "role: content" each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)
