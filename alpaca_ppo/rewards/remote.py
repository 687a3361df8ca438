"""`RemoteReward`: a reward source that asks HTTP servers.

What is sent and answered is in `wire_formats`, how requests are made in `http_client`. `examples/reward_server.py` is a
server. Calling again after a failure is left to `reward_retries`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.urls import check_url, shown_url
from alpaca_ppo.rewards.batch import Prompt, RewardBatch
from alpaca_ppo.rewards.http_client import RequestFailed, http_session, key_from, post_json, require_aiohttp
from alpaca_ppo.rewards.wire_formats import (
    WIRE_FORMATS,
    RemoteScores,
    max_answer_bytes,
    openrlhf_request,
    openrlhf_scores,
    plain_request,
    plain_scores,
    rendered,
)

KEY_VARIABLE = "REWARD_API_KEY"
"""The environment variable whose key is sent to every server, as a bearer token."""
_CONCURRENT = 16
"""Requests under way at once in one event loop, as when the rows of a batch are asked about one by one."""
_WHEN_SLOW = "; give it more time (reward_url_timeout), or fewer rows at once (rollout_batch_size)"


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
        wire_format: plain or openrlhf; see docs/rewards.md.
        timeout: seconds that a server may take for a request.
        columns: of the dataset that the plain form sends; None = all.
        label_column: of the dataset that the openrlhf form sends as labels; None = empty labels.
        processing_class: the policy's tokenizer, with which the openrlhf form renders prompts that are messages.
        chat_template_kwargs: of its chat template.
        name: of the source in metrics and errors.

    Raises:
        ValueError: for an invalid argument, or without aiohttp.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        wire_format: Literal["plain", "openrlhf"] = "plain",
        timeout: float = 60.0,
        columns: Sequence[str] | None = None,
        label_column: str | None = None,
        processing_class: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        name: str = "remote_reward",
    ) -> None:
        require_aiohttp("RemoteReward")
        self.urls = [url] if isinstance(url, str) else list(url)
        if not self.urls:
            raise ValueError("RemoteReward got no url; give the address of at least one server")
        for address in self.urls:
            check_url("RemoteReward(url)", address)
        if wire_format not in WIRE_FORMATS:
            raise ValueError(f"RemoteReward(wire_format={shown(wire_format)}) must be one of {', '.join(WIRE_FORMATS)}")
        if not 0 < timeout <= 86400:
            raise ValueError(f"RemoteReward(timeout={timeout}) must be above 0 and at most a day, in seconds")
        if label_column is not None and wire_format != "openrlhf":
            raise ValueError(
                f"RemoteReward(label_column={label_column!r}) is of the openrlhf form, but wire_format is "
                f"{wire_format!r}, which sends columns by name; leave it out, or set wire_format='openrlhf'"
            )
        if columns is not None and wire_format != "plain":
            raise ValueError(
                f"RemoteReward(columns={list(columns)}) is of the plain form, but wire_format is {wire_format!r}; "
                "leave it out, or name one column as label_column"
            )
        key_from(KEY_VARIABLE)
        self.__name__ = name
        self.wire_format, self.timeout = wire_format, float(timeout)
        self._columns, self._label_column = columns, label_column
        self._tokenizer, self._template_kwargs = processing_class, dict(chat_template_kwargs or {})
        self._turn = 0
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

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
    ) -> list[float | list[float] | None]:
        """Returns the score of each row. `environments` are objects of this process, and are not sent.

        Raises:
            RemoteServersFailed: if a request has no usable answer from any server.
            ValueError: for rows that cannot be sent.
        """
        parts = [
            RewardBatch(
                prompts[part], completions[part], completion_ids[part], {n: v[part] for n, v in columns.items()}
            )
            for part in _parts(prompts, len(self.urls))
        ]
        first, self._turn = self._turn, self._turn + len(parts)
        bodies = [self._body(part) for part in parts]
        async with http_session(self.timeout) as session:
            requests = [
                self._ask(session, body, [len(ids) for ids in part.completion_ids], first + number)
                for number, (part, body) in enumerate(zip(parts, bodies, strict=True))
            ]
            # All are awaited before the session is closed, also after one has failed.
            answers = await asyncio.gather(*requests, return_exceptions=True)
        found: list[tuple[RemoteScores, int]] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        if log_metric is not None:
            self._log(found, log_metric)
        return [reward for scores, _ in found for reward in scores.rewards]

    def _log(self, found: Sequence[tuple[RemoteScores, int]], log_metric: Callable[[str, float], None]) -> None:
        for scores, _ in found:
            for name, values in scores.metrics.items():
                for value in values:
                    log_metric(name, value)
        if len(self.urls) > 1:
            log_metric(f"{self.__name__}/failed_requests", sum(failed for _, failed in found))

    def _body(self, batch: RewardBatch) -> bytes:
        columns = batch.columns
        wanted = self._columns if self.wire_format == "plain" else [self._label_column] if self._label_column else []
        missing = [name for name in wanted or () if name not in columns]
        if missing:
            raise ValueError(f"the dataset has no column {missing[0]!r} to send, only {list(columns)}; check its name")
        if self.wire_format == "plain":
            kept = columns if self._columns is None else {name: columns[name] for name in self._columns}
            return plain_request(RewardBatch(batch.prompts, batch.completions, batch.completion_ids, kept))
        queries, prompts = rendered(batch.prompts, batch.completions, self._tokenizer, self._template_kwargs)
        labels = columns[self._label_column] if self._label_column else [""] * len(batch)
        return openrlhf_request(queries, prompts, labels)

    async def _ask(self, session: Any, body: bytes, tokens: Sequence[int], turn: int) -> tuple[RemoteScores, int]:
        """The scores of one request, and how many servers failed before."""
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_CONCURRENT))
        failures = []
        for number in range(len(self.urls)):
            url = self.urls[(turn + number) % len(self.urls)]
            try:
                async with gate:
                    answer = await post_json(
                        session,
                        url,
                        body,
                        key_variable=KEY_VARIABLE,
                        max_bytes=max_answer_bytes(tokens),
                        when_slow=_WHEN_SLOW,
                    )
                return self._scores(url, answer, tokens), number
            except RequestFailed as failure:
                failures.append(failure)
        raise RemoteServersFailed(
            "the reward server " + str(failures[0])
            if len(failures) == 1
            else f"none of {len(failures)} reward servers gave a usable answer: " + " | ".join(map(str, failures))
        )

    def _scores(self, url: str, answer: Any, tokens: Sequence[int]) -> RemoteScores:
        try:
            return plain_scores(answer, tokens) if self.wire_format == "plain" else openrlhf_scores(answer, len(tokens))
        except ValueError as error:
            raise RequestFailed(url, str(error), secrets=(key_from(KEY_VARIABLE) or "",)) from None


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
