"""Responses of several turns: what a sampler asks at the end of each turn, and what it does with the reply.

A turn is what the policy chooses up to the end that `StopRule` finds, or up to a limit. Then a `TurnHandler`, such as
an environment, may append tokens to the row, after which the policy goes on.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Pending(Enum):
    """The type of `PENDING`."""

    PENDING = "pending"


# What a `TurnHandler` returns for a turn whose reply it does not know yet.
PENDING = Pending.PENDING

# None ends the response. Otherwise token ids that are appended, with `response_mask` False, because the policy did not
# choose them; if there are none, the policy goes on after its own last token. Tokens beyond the width of the responses
# are left out, and the response ends there.
Reply = Sequence[int] | None


@dataclass(frozen=True)
class Turn:
    """A turn of the policy that has ended.

    Attributes:
        row: b * n + j for sample j of prompt b.
        response: token ids of the response so far, with what was appended to earlier turns.
        response_mask: as long as `response`; True = a token the policy chose.
        start: position of the turn's first token in `response`.
        stopped: True = `StopRule` ended it, False = cut off after `Turns.max_turn_tokens` tokens.
    """

    row: int
    response: list[int]
    response_mask: list[bool]
    start: int
    stopped: bool


class TurnHandler(Protocol):
    """Decides how a response goes on after a turn. An exception in it ends the sampling.

    A reply may depend on `Turn.row` and the conversation, but not on the order of calls.
    """

    def on_stop(self, turn: Turn) -> Reply | Pending:
        """Returns the reply to a turn, or `PENDING` if `ready` will return it. All rows wait for this call. It is not
        made for a response that ends here by its width.
        """
        ...

    def ready(self, timeout: float) -> Sequence[tuple[int, Reply]]:
        """Returns the replies to pending turns since the last call, each with its row; waits up to `timeout` seconds
        for one.
        """
        ...


@dataclass(frozen=True)
class Turns:
    """How responses of several turns are sampled. `truncate_after` counts tokens of the turn.

    Attributes:
        max_turn_tokens: the most tokens of a turn; None sets no limit.
    """

    handler: TurnHandler
    max_turn_tokens: int | None = None

    def limit(self, position: int, width: int) -> int:
        """The response position before which a turn that begins at `position` must end, in a response of at most
        `width` tokens.
        """
        return width if self.max_turn_tokens is None else min(width, position + self.max_turn_tokens)

    def replies(self, pending: Container[int], timeout: float) -> Iterator[tuple[int, Reply]]:
        """Yields what `handler.ready` returns; the caller removes each row from `pending`. Raises ValueError for a
        reply to another row.
        """
        for row, reply in self.handler.ready(timeout):
            if row not in pending:
                raise ValueError(f"ready() answered row {row}, which waits for none; return each turn's answer once")
            yield row, reply


def check_reply(reply: Reply, row: int, vocabulary: int) -> list[int] | None:
    """Returns `reply` as a list; raises ValueError if it is neither None nor token ids below `vocabulary`."""
    if reply is None:
        return None
    if isinstance(reply, str) or not isinstance(reply, Sequence):
        raise ValueError(f"the turn handler answered row {row} with {reply!r}; return None or a sequence of token ids")
    for token in reply:
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"the turn handler gave row {row} the token {token!r}; use ids from 0 to {vocabulary - 1}")
    return list(reply)
