"""The input of a reward source, and the error that names the source and the row at fault."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alpaca_ppo.config.fields import shown
from alpaca_ppo.types import EPISODE

Prompt = str | list[dict[str, Any]]

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
"""What every reward function is offered, whatever the dataset's columns."""
OF_EPISODES = ("environments", "episodes")
"""What they are offered in addition where there are environments."""
_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass(frozen=True)
class RewardBatch:
    """B responses as reward sources see them: every list has B entries."""

    prompts: list[Prompt]
    """Text or messages, as in the dataset."""
    completions: list[Prompt]
    """Text, or a list of one assistant message if the prompt is messages."""
    completion_ids: list[list[int]]
    """The token ids that the policy chose, including the stop token, without padding."""
    columns: dict[str, list[Any]]
    """Every other dataset column, by name."""
    episodes: Sequence[Any] = ()
    """The episode of each row (`environments.episode.Episode`); empty without environments."""

    def __len__(self) -> int:
        return len(self.prompts)

    def row(self, index: int) -> "RewardBatch":
        """Returns a batch with row `index` only."""
        one = slice(index, index + 1)
        columns = {name: values[one] for name, values in self.columns.items()}
        return RewardBatch(
            self.prompts[one], self.completions[one], self.completion_ids[one], columns, self.episodes[one]
        )

    def arguments(self) -> dict[str, list[Any]]:
        """Returns the arguments of a reward function by name: the lists themselves, not copies."""
        own: Any = (self.prompts, self.completions, self.completion_ids)
        return {**dict(zip(RESERVED_COLUMNS, own, strict=True)), **self.columns}

    def objects(self) -> dict[str, list[Any]]:
        """Returns further arguments by name, which belong to the run and are not copied."""
        of_episodes = [episode.environment for episode in self.episodes], list(self.episodes)
        return dict(zip(OF_EPISODES, of_episodes, strict=True)) if self.episodes else {}


class RewardError(ValueError):
    """A reward source returned unusable scores or raised an exception.

    `source` is its name. `row` is the index in the scored batch, or None if no single row is at fault.
    """

    def __init__(self, source: str, problem: str, batch: RewardBatch, row: int | None) -> None:
        example = row or 0
        place = f"row {row}" if row is not None else f"a batch of {len(batch)} rows; the first row:"
        super().__init__(
            f"reward source {source!r} {problem}, on {place}\n"
            f"  prompt: {shown(batch.prompts[example])}\n  completion: {shown(batch.completions[example])}"
        )
        self.source = source
        self.row = row


class RowFailure(RewardError):
    """A row that has no usable score although the source works: its call raised, or its score is not finite."""


def copied(value: Any) -> Any:
    """Returns a copy of an entry of a source's arguments: a source that changes what it is given affects neither other
    sources nor the run. Several responses to one prompt have the same row, of which each gets a copy.
    """
    # deepcopy takes several times as long for lists of token ids.
    if type(value) is list and _IMMUTABLE.issuperset(map(type, value)):
        return value.copy()
    return copy.deepcopy(value)


def make_reward_batch(
    prompts: Sequence[Prompt],
    completions: Sequence[Prompt],
    completion_ids: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
) -> RewardBatch:
    """Returns the batch of these rows, of which there is at least one.

    A text completion of a message prompt becomes an assistant message; the rows become columns.

    Raises:
        ValueError: if the lists differ in length, or a column has the name of another argument.
    """
    episodes = [row[EPISODE] for row in rows] if EPISODE in rows[0] else []
    if clash := [name for name in rows[0] if name in (*RESERVED_COLUMNS, *(OF_EPISODES if episodes else ()))]:
        raise ValueError(f"the dataset columns {clash} have the names of arguments of reward functions; rename them")
    as_messages: list[Prompt] = [
        [{"role": "assistant", "content": completion}]
        if isinstance(prompt, list) and isinstance(completion, str)
        else completion
        for prompt, completion, _, _ in zip(prompts, completions, completion_ids, rows, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", EPISODE)}
    for row, episode in enumerate(episodes):
        as_messages[row] = episode.completion or as_messages[row]
    return RewardBatch(list(prompts), as_messages, [list(ids) for ids in completion_ids], columns, episodes)
