"""A language model as judge, behind an OpenAI-compatible HTTP interface.

How it is asked, its key and the cache on disk are in `rewards.chat_model`.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alpaca_ppo.evaluation.judges import Comparison
from alpaca_ppo.evaluation.win_rates import both_orders
from alpaca_ppo.rewards.chat_model import (
    SECONDS,
    ChatModel,
    ChatUnavailable,
    DecisionCache,
    as_text,
    cache_key,
)
from alpaca_ppo.rewards.http_client import RequestFailed, http_session

TEMPLATE = """\
Two assistants have answered the same request. Decide which answer helps the user more: is it correct, does it do what \
was asked, is it clear? Neither the order of the answers nor their length counts.

[Request]
{prompt}

[Answer A]
{answer_a}

[Answer B]
{answer_b}

Explain your decision in a few sentences. Then end with [[A]] if answer A is better, [[B]] if answer B is better, or \
[[C]] if they are equally good."""
_REMINDER = "End with your verdict: exactly one of [[A]], [[B]] and [[C]]."
_VERDICTS = {"A": 1.0, "B": 0.0, "C": 0.5}
_CONCURRENT = 8


class ChatJudge:
    """Asks a chat model about each pair, in both orders; ties count half.

    Args:
        url: of the interface, up to and without /chat/completions.
        model: its name there.
        template: with {prompt}, {answer_a} and {answer_b}, and the names of any columns of the dataset.
        cache: file of the verdicts so far; created if there is none.
        retries: times that a request is repeated which failed or was answered without a verdict.
        pause: seconds before the first of these, then twice as many each time.
        stop: asked before each pair; True leaves the remaining pairs undecided.

    Raises:
        ValueError: without aiohttp.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        cache: Path,
        template: str | None = None,
        retries: int = 3,
        pause: float = 1.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._chat = ChatModel(url, model, retries=retries, pause=pause)
        self.template, self.stop = template or TEMPLATE, stop
        self.problems: list[str] = []
        """Why pairs were left undecided in the last call."""
        self._has_answered = False
        self._verdicts = DecisionCache(cache, "verdict")

    def __call__(self, comparisons: Sequence[Comparison]) -> list[float | None]:
        """The verdicts.

        Raises:
            ValueError: if the interface refuses the request, or none of the first requests to it is answered.
        """
        self.problems = []
        prompts = [self._prompt(pair) for pair in comparisons]
        prompts += [self._prompt(pair.swapped()) for pair in comparisons]
        missing = [text for text in dict.fromkeys(prompts) if self._verdicts.get(self._key(text)) is None]
        # In a notebook, this thread already runs an event loop.
        with ThreadPoolExecutor(max_workers=1) as thread:
            thread.submit(lambda: asyncio.run(self._ask_all(missing))).result()
        if missing and len(self.problems) == len(missing) and not self._has_answered:
            raise ValueError(
                f"eval_judge {self._chat.url} answered none of {len(missing)} requests, the last time: "
                f"{self.problems[-1]}; check eval_judge and eval_judge_model"
            )
        self._has_answered |= len(self.problems) < len(missing)
        found = [self._verdicts.get(self._key(text)) for text in prompts]
        first, second = found[: len(comparisons)], found[len(comparisons) :]
        return [both_orders(a, None if b is None else 1 - b) for a, b in zip(first, second, strict=True)]

    def _prompt(self, pair: Comparison) -> str:
        values = {**pair.columns, "prompt": as_text(pair.prompt), "answer_a": pair.own, "answer_b": pair.other}
        try:
            return self.template.format(**values)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(
                f"eval_judge_template cannot be filled in ({type(error).__name__}: {error}); it may name "
                f"{', '.join(values)}, and a brace of the text itself is written twice"
            ) from error

    def _key(self, prompt: str) -> str:
        return cache_key(self._chat.url, self._chat.model, prompt)

    async def _ask_all(self, prompts: Sequence[str]) -> None:
        """Asks about each prompt and keeps its verdict, several at a time; a refusal ends the asking."""
        gate = asyncio.Semaphore(_CONCURRENT)
        async with http_session(SECONDS) as session:
            tasks = [asyncio.ensure_future(self._ask(session, gate, prompt)) for prompt in prompts]
            try:
                await asyncio.gather(*tasks)
            except RequestFailed as error:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise ValueError(
                    f"eval_judge refuses requests for the model {self._chat.model!r}: {error}; check eval_judge and "
                    f"eval_judge_model too"
                ) from error

    async def _ask(self, session: object, gate: asyncio.Semaphore, prompt: str) -> None:
        async with gate:
            if self.stop():
                return
            try:
                verdict = await self._chat.ask(session, prompt, _verdict, _REMINDER)
            except ChatUnavailable as error:
                self.problems.append(str(error))
                return
        self._verdicts.keep(self._key(prompt), verdict)


def _verdict(text: str) -> float | None:
    """The verdict on the answer A."""
    verdicts = re.findall(r"\[\[([ABC])\]\]", text)
    return _VERDICTS[verdicts[-1]] if verdicts else None
