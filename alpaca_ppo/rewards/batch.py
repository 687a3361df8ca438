"""What a reward source is given, and the error that names the source and row at fault."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Prompt = str | list[dict[str, Any]]

_SHOWN = 300
_RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class RewardBatch:
    """B responses as reward sources see them, one entry a row in every list."""

    prompts: list[Prompt]
    """Text or messages, as the dataset has them."""
    completions: list[Prompt]
    """Text; where the prompt is messages, a list of one assistant message."""
    completion_ids: list[list[int]]
    """The policy's token ids of each response, stop token included, padding not."""
    columns: dict[str, list[Any]]
    """Every other dataset column."""

    def __len__(self) -> int:
        return len(self.prompts)

    def row(self, index: int) -> "RewardBatch":
        """The batch of row `index` alone."""
        one = slice(index, index + 1)
        columns = {name: values[one] for name, values in self.columns.items()}
        return RewardBatch(self.prompts[one], self.completions[one], self.completion_ids[one], columns)


class RewardError(ValueError):
    """A reward source gave no usable scores. `source` is its name; `row` the index in the scored batch, or None where
    no single row is at fault."""

    def __init__(self, source: str, problem: str, batch: RewardBatch, row: int | None) -> None:
        shown = row or 0
        place = f"row {row}" if row is not None else f"a batch of {len(batch)} rows, which starts with this one"
        super().__init__(
            f"reward source {source!r} {problem}, on {place}\n"
            f"  prompt: {_shortened(batch.prompts[shown])}\n  completion: {_shortened(batch.completions[shown])}"
        )
        self.source = source
        self.row = row


def reward_batch(
    prompts: Sequence[Prompt],
    completions: Sequence[Prompt],
    completion_ids: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
) -> RewardBatch:
    """The batch of these rows, at least one: completions given as text become messages where the prompt is messages,
    rows become columns.

    Raises:
        ValueError: where the four differ in number, the rows differ in their columns, or a column has the
            name of another argument.
    """
    counts = {
        "prompts": len(prompts),
        "completions": len(completions),
        "completion_ids": len(completion_ids),
        "rows": len(rows),
    }
    if len(set(counts.values())) > 1:
        raise ValueError(f"the lists to score differ in number: {counts}; give one entry a row in each")
    names = list(rows[0])
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"row {index} has the columns {list(row)} but row 0 has {names}; fill the missing ones with None"
            )
    clash = [name for name in names if name in _RESERVED]
    if clash:
        raise ValueError(
            f"the dataset has the columns {clash}, which reward functions get as arguments of their own; rename them"
        )
    replies: list[Prompt] = [
        [{"role": "assistant", "content": completion}]
        if isinstance(prompt, list) and isinstance(completion, str)
        else completion
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in names if name != "prompt"}
    return RewardBatch(list(prompts), replies, [list(ids) for ids in completion_ids], columns)


def _shortened(text: Prompt) -> str:
    shown = repr(text)
    if len(shown) <= _SHOWN:
        return shown
    # The end of a prompt is what the response continues, so both ends stay.
    half = _SHOWN // 2
    return f"{shown[:half]} ... ({len(shown) - 2 * half} characters) ... {shown[-half:]}"
