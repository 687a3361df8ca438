"""The input of a reward source, and the errors that name the source and the row at fault."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alpaca_ppo.config.fields import shown
from alpaca_ppo.types import EPISODE

Prompt = str | list[dict[str, Any]]

# Arguments of every reward function.
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
# Further arguments in runs with environments.
OF_EPISODES = ("environments", "episodes")
_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass(frozen=True)
class RewardBatch:
    """B responses as reward sources see them: every list has B entries.

    Attributes:
        prompts: text or messages, as in the dataset.
        completions: text; if the prompt is messages, the assistant's message in a list, or those of the episode.
        completion_ids: the token ids that the policy chose, including the stop token, without padding.
        columns: the dataset's other columns by name.
        episodes: the episode of each row (`environments.episode.Episode`); empty without environments.
    """

    prompts: list[Prompt]
    completions: list[Prompt]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    episodes: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def row(self, index: int) -> "RewardBatch":
        """Returns a batch with row `index` only."""
        one = slice(index, index + 1)
        columns = {name: values[one] for name, values in self.columns.items()}
        return RewardBatch(
            self.prompts[one], self.completions[one], self.completion_ids[one], columns, self.episodes[one]
        )


class RewardError(ValueError):
    """The reward source `source` raised an exception or returned unusable scores. `row` is the index in the scored
    batch; None if no single row is at fault.
    """

    def __init__(self, source: str, problem: str, batch: RewardBatch, row: int | None = None) -> None:
        example = row or 0
        place = f"row {row}" if row is not None else f"a batch of {len(batch)} rows; the first row:"
        super().__init__(
            f"reward source {source!r} {problem}, on {place}\n"
            f"  prompt: {shown(batch.prompts[example])}\n  completion: {shown(batch.completions[example])}"
        )
        self.source = source
        self.row = row


class RowFailure(RewardError):
    """A single row has no usable score: its call raised, or its score is not finite."""


def copied(value: Any) -> Any:
    """Returns a copy of an entry of a source's arguments, so that no source changes those of others or of the run."""
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
    """Returns the batch of at least one row. A text completion of a message prompt becomes an assistant message, or the
    messages of its episode.

    Raises:
        ValueError: if the lists differ in length, or a column has the name of another argument.
    """
    episodes = [row[EPISODE] for row in rows] if EPISODE in rows[0] else []
    reserved = (*RESERVED_COLUMNS, *OF_EPISODES) if episodes else RESERVED_COLUMNS
    if clash := [name for name in rows[0] if name in reserved]:
        raise ValueError(f"the dataset columns {clash} have the names of arguments of reward functions; rename them")
    replies: list[Prompt] = []
    # All four, to compare their lengths.
    for prompt, completion, _, row in zip(prompts, completions, completion_ids, rows, strict=True):
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if isinstance(prompt, list) and episodes:
            completion = row[EPISODE].messages or completion
        replies.append(completion)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", EPISODE)}
    return RewardBatch(list(prompts), replies, [list(ids) for ids in completion_ids], columns, episodes)
