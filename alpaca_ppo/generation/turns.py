"""Responses of several turns: what a sampler asks at the end of each turn, and what it does with the answer.

A turn is what the policy chooses up to a stop token, a truncate token or a limit. Then something else may append tokens
to the row, and the policy goes on after these. What appends them, an environment say, is no part of this package: it is
a `TurnHandler`.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Pending(Enum):
    """The type of `PENDING`."""

    PENDING = "pending"


PENDING = Pending.PENDING
"""What a `TurnHandler` returns for a turn whose answer it does not know yet."""

Reply = Sequence[int] | None
"""None ends the response. Otherwise token ids that are appended; the policy did not choose them, so they are holes of
`response_mask`. An empty sequence lets the policy go on after its own last token, with no hole between the turns.
Tokens beyond the width of the responses are left out, and the response ends there."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy that has ended."""

    row: int
    """Of the call: row b * n + j is sample j of prompt b."""
    response: list[int]
    """Token ids of the response so far, what was appended to earlier turns included."""
    response_mask: list[bool]
    """As long as `response`; True = a token the policy chose."""
    start: int
    """Position of the turn's first token in `response`; the turn lasts to the end."""
    stopped: bool
    """True = ended by a stop or truncate token or a stop string, False = cut off after `Turns.max_turn_tokens`
    tokens."""


class TurnHandler(Protocol):
    """Decides how a response goes on after a turn.

    A response must not depend on when answers come, so answers may depend on `Turn.row` and on what was said, but
    neither on the order of calls nor on time. An exception ends the sampling.
    """

    def on_stop(self, turn: Turn) -> Reply | Pending:
        """Returns the answer to a turn, or `PENDING`; the answer then comes from `ready`.

        All rows wait for this call. It is not made for a response that has no token of the policy left, by its width or
        by `Turns.max_policy_tokens`: that one ends.
        """
        ...

    def ready(self, timeout: float) -> Sequence[tuple[int, Reply]]:
        """Returns the answers to pending turns that have come since the last call, each with its row.

        Args:
            timeout: where there is no answer, how long to wait for one, in seconds; 0 while other rows are sampled.
        """
        ...


@dataclass(frozen=True)
class Turns:
    """How responses of several turns are sampled.

    A truncate token counts from `truncate_after` tokens of the turn on.
    """

    handler: TurnHandler
    max_turn_tokens: int | None = None
    """The most tokens of a turn; None sets no limit."""
    max_policy_tokens: int | None = None
    """The most tokens of a response that the policy chooses, in all turns together; None sets no limit."""

    def check(self) -> None:
        """Raises ValueError if a limit is less than 1."""
        for name in ("max_turn_tokens", "max_policy_tokens"):
            limit = vars(self)[name]
            if limit is not None and limit < 1:
                raise ValueError(f"{name} ({limit}) must be at least 1; None sets no limit")

    def limit(self, *, position: int, chosen: int, width: int) -> int:
        """The response position before which a turn must end that begins at `position`.

        Args:
            position: of the turn's first token.
            chosen: tokens that the policy chose in earlier turns.
            width: of the responses.
        """
        ends = [width]
        if self.max_turn_tokens is not None:
            ends.append(position + self.max_turn_tokens)
        if self.max_policy_tokens is not None:
            ends.append(position + self.max_policy_tokens - chosen)
        return min(ends)

    def replies(self, pending: Container[int], timeout: float) -> Iterator[tuple[int, Reply]]:
        """Yields what `handler.ready` returns; the caller removes each row from `pending`.

        Raises:
            ValueError: for an answer to a row that is not pending.
        """
        for row, reply in self.handler.ready(timeout):
            if row not in pending:
                raise ValueError(
                    f"the turn handler's ready() returned an answer for row {row}, which waits for none; return the "
                    "answer to each pending turn once"
                )
            yield row, reply


def check_reply(reply: Reply, row: int, vocabulary: int) -> list[int] | None:
    """Returns `reply` as a list.

    Raises:
        ValueError: if it is neither None nor token ids below `vocabulary`.
    """
    if reply is None:
        return None
    if isinstance(reply, str) or not isinstance(reply, Sequence):
        raise ValueError(
            f"the turn handler answered row {row} with {reply!r}; an answer is None or a sequence of token ids"
        )
    for token in reply:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(
                f"the turn handler answered row {row} with {token!r} among its tokens; it must be a token id from 0 to "
                f"{vocabulary - 1}"
            )
    return list(reply)
