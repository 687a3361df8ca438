"""The text that only a privileged critic reads: a column of the dataset, as token ids that come before the prompt's."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from alpaca_ppo.config.fields import shown

SEPARATOR = "\n"
"""Ends the text, so that it does not run into the prompt."""


def check_privileged_column(column: str, columns: Sequence[str], prompt_columns: Sequence[str]) -> None:
    """Checks that the dataset has the column, and that no prompt is made from it.

    Args:
        column: `privileged_column`.
        columns: all of the dataset's.
        prompt_columns: those that the prompts are made from.

    Raises:
        ValueError: if one of them is not so.
    """
    if column not in columns:
        raise ValueError(
            f"the dataset has no column {column!r}; its columns are {list(columns)}; set privileged_column to the one "
            "that only the critic is to read, or to null"
        )
    if column in prompt_columns:
        raise ValueError(
            f"privileged_column is {column!r}, but the prompts are made from that column, so the policy reads it too; "
            "choose another column, or change prompt_column or prompt_template"
        )


def tokenize_privileged(
    texts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, *, column: str, start: int
) -> list[list[int]]:
    """The token ids of each text and the separator together, without the tokenizer's special tokens: the prompt that
    follows has those.

    Args:
        texts: of the rows; may be empty, which leaves the separator.
        tokenizer: the policy's.
        column: where they come from, for the error.
        start: the row of the first of them.

    Raises:
        ValueError: for a value that is not text, with its row.
    """
    for number, text in enumerate(texts, start):
        if not isinstance(text, str):
            raise ValueError(
                f"privileged_column {column!r} is {shown(text)} in row {number}; it must be text: convert the column, "
                "or drop such rows"
            )
    encoded: Any = tokenizer([text + SEPARATOR for text in texts], add_special_tokens=False)["input_ids"]
    return [list(ids) for ids in encoded]
