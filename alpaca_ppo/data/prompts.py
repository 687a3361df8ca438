"""Tokenized prompts: templates and chat templates are applied, and overlong prompts are dropped.

Token ids are kept in memory, 4 bytes each; the rows stay in the dataset and are read on access. Leaves
out images, tools and the continuation of an assistant message.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from alpaca_ppo.config.fields import shown
from alpaca_ppo.data.privileged import check_privileged_column, tokenize_privileged
from alpaca_ppo.data.templates import PromptTemplate, resolve_template

_CHUNK = 1000


class PromptDataset(Sequence[dict[str, Any]]):
    """The prompts that are not overlong, in the dataset's order.

    The index of a prompt is stable; it is the `prompt_id` that keys the prompt's random numbers. `ds[i]` is
    `{"input_ids": list[int], "row": dict}`, and `privileged_ids` (list[int]) if there is a privileged column. `row`
    holds every column of the dataset plus `prompt`: the text or messages before tokenization (with a template, the
    rendered text, which replaces a column of that name).

    Attributes:
        num_dropped: prompts that were longer than `query_len`, or whose privileged text was longer than
            `privileged_len`.
        fingerprint: a hash of the token ids and of all columns, independent of where the rows were loaded from.
    """

    def __init__(
        self,
        dataset: Dataset,
        input_ids: "Sequence[array[int]]",
        prompt_of: Callable[[Mapping[str, Any]], Any],
        *,
        num_dropped: int,
        fingerprint: str,
        privileged_ids: "Sequence[array[int]]" = (),
    ) -> None:
        assert len(dataset) == len(input_ids), (len(dataset), len(input_ids))
        self._dataset = dataset
        self._input_ids = input_ids
        self._prompt_of = prompt_of
        self._privileged_ids = privileged_ids
        self.num_dropped = num_dropped
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._input_ids)

    @property
    def are_messages(self) -> bool:
        """Whether the prompts are messages, which the tokenizer's chat template renders, rather than text."""
        return isinstance(self[0]["row"]["prompt"], list)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self._dataset[index]
        privileged = {"privileged_ids": list(self._privileged_ids[index])} if self._privileged_ids else {}
        return {"input_ids": list(self._input_ids[index]), "row": {**row, "prompt": self._prompt_of(row)}, **privileged}


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    query_len: int,
    prompt_column: str = "prompt",
    prompt_template: str | None = None,
    overlong: str = "drop",
    privileged_column: str | None = None,
    privileged_len: int = 256,
) -> PromptDataset:
    """Returns the dataset's prompts as token ids, at most `query_len` tokens each.

    Args:
        dataset: rows with a prompt column. It holds text, or messages (a list of {"role", "content"}), to which the
            chat template is applied with the generation prompt. Without a prompt column, rows with Alpaca's
            `instruction` (and `input`, which may be empty) are rendered with the `alpaca` template.
        tokenizer: the policy's tokenizer. Text gets the special tokens that it prepends; an eos that it appends is
            removed, because it would end the prompt.
        query_len: the longest prompt, in tokens.
        prompt_column: the column with the prompt.
        prompt_template: a named template or a format string over any columns, used instead of `prompt_column`; see
            `resolve_template`.
        overlong: what happens to a longer prompt: "drop" (it is counted), or "error".
        privileged_column: the column with the text that only the critic reads (`data.privileged`); None = none.
        privileged_len: the longest such text, in tokens; a prompt with a longer one is overlong too.

    Raises:
        ValueError: for a missing column, an empty or malformed prompt (with its row), an overlong prompt under "error",
            privileged text that prompts are made from too, or that is not text, or if no prompt is left.
    """
    _check_arguments(dataset, query_len, overlong)
    template = _template_of(dataset, prompt_column, prompt_template)
    prompt_of = template.render if template else partial(_column_prompt, column=prompt_column)
    limits = {"query_len": query_len}
    if privileged_column is not None:
        used = (prompt_column,) if template is None else (*template.columns, template.optional or "")
        check_privileged_column(privileged_column, dataset.column_names, used)
        limits["privileged_len"] = privileged_len
    digest = hashlib.sha256()
    kind: type | None = None
    kept: list[int] = []
    input_ids: list[array[int]] = []
    privileged_ids: list[array[int]] = []
    for start in range(0, len(dataset), _CHUNK):
        columns = dataset[start : start + _CHUNK]
        digest.update(json.dumps(columns, sort_keys=True, default=_json_value).encode())
        size = min(_CHUNK, len(dataset) - start)
        rows = [{name: values[i] for name, values in columns.items()} for i in range(size)]
        prompts = [_checked_prompt(prompt_of, row, start + i) for i, row in enumerate(rows)]
        kind = kind or type(prompts[0])
        _check_kind(prompts, kind, start)
        own = {"query_len": _tokenize(prompts, tokenizer, start=start)}
        if privileged_column is not None:
            texts = columns[privileged_column]
            own["privileged_len"] = tokenize_privileged(texts, tokenizer, column=privileged_column, start=start)
        for i in range(size):
            ids = {name: of_rows[i] for name, of_rows in own.items()}
            if _fit(ids, limits, start + i, overlong):
                kept.append(start + i)
                input_ids.append(array("i", ids["query_len"]))
                digest.update(input_ids[-1])
                privileged_ids += [array("i", ids["privileged_len"])] if "privileged_len" in ids else []
    if not kept:
        what = " or ".join(f"{name} ({limit})" for name, limit in limits.items())
        raise ValueError(f"all {len(dataset)} prompts have more tokens than {what}; raise {' or '.join(limits)}")
    return PromptDataset(
        dataset.select(kept),
        input_ids,
        prompt_of,
        num_dropped=len(dataset) - len(kept),
        fingerprint=digest.hexdigest()[:16],
        privileged_ids=privileged_ids,
    )


def _fit(ids_of: Mapping[str, list[int]], limits: Mapping[str, int], number: int, overlong: str) -> bool:
    """Whether row `number` is within the `limits`: the token ids by the option that bounds their count.

    Raises:
        ValueError: if it is not, and `overlong` is "error".
    """
    for name, ids in ids_of.items():
        if len(ids) <= limits[name]:
            continue
        if overlong == "error":
            what = "prompt" if name == "query_len" else "privileged text"
            raise ValueError(
                f"the {what} in row {number} has {len(ids)} tokens, more than {name} ({limits[name]}); raise {name}, "
                "or set overlong_prompts: drop"
            )
        return False
    return True


def _json_value(value: Any) -> Any:
    """Returns a JSON value for what `json` cannot encode; values without stable content (images) give their type."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else type(value).__name__


def _check_arguments(dataset: Dataset, query_len: int, overlong: str) -> None:
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"the prompt dataset is a {type(dataset).__name__}; pass one split as a datasets.Dataset "
            "(Dataset.from_list(rows) converts a list, dataset_dict['train'] selects a split)"
        )
    if len(dataset) == 0:
        raise ValueError("the prompt dataset has no rows; it must have at least one")
    if query_len < 1:
        raise ValueError(f"query_len is {query_len}; it must be at least 1")
    if overlong not in ("drop", "error"):
        raise ValueError(f"overlong_prompts is {overlong!r}; it must be 'drop' or 'error'")


def _template_of(dataset: Dataset, prompt_column: str, prompt_template: str | None) -> PromptTemplate | None:
    columns = dataset.column_names
    if prompt_template is not None:
        return resolve_template(prompt_template, columns)
    if prompt_column in columns:
        return None
    if prompt_column == "prompt" and "instruction" in columns:
        return resolve_template("alpaca", columns)
    raise ValueError(
        f"the dataset has no column {prompt_column!r}; its columns are {columns}; set prompt_column to the one with "
        "the prompt, or set a prompt_template such as 'Question: {question}'"
    )


def _column_prompt(row: Mapping[str, Any], *, column: str) -> Any:
    """Returns the column's text or messages.

    Arrow sets a key to None in messages that lack it, if any message has it. Such keys are removed, because chat
    templates test for their presence.
    """
    prompt = row[column]
    if not isinstance(prompt, list):
        return prompt
    return [
        {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else message
        for message in prompt
    ]


def _checked_prompt(prompt_of: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any], number: int) -> Any:
    try:
        prompt = prompt_of(row)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from error
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"the prompt in row {number} is empty; drop such rows")
    elif isinstance(prompt, list) and prompt:
        _check_messages(prompt, number)
    else:
        raise ValueError(
            f"the prompt in row {number} is {shown(prompt)}; "
            "it must be text, or a list of messages with 'role' and 'content'"
        )
    return prompt


def _check_kind(prompts: list[Any], kind: type, start: int) -> None:
    """Checks that all prompts, of which the first is in row `start`, are text, or all messages, as in row 0."""
    for number, prompt in enumerate(prompts, start):
        if type(prompt) is not kind:
            raise ValueError(
                f"the prompt in row {number} is {shown(prompt)}, but that in row 0 is "
                f"{'text' if kind is str else 'messages'}; make all of them text, or all of them messages"
            )


def _check_messages(messages: list[Any], number: int) -> None:
    for message in messages:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"row {number} has the message {shown(message)}; it needs 'role' and 'content', both text")
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"the messages in row {number} end with an assistant message, which the policy is to generate; remove it"
        )


def _tokenize(prompts: list[Any], tokenizer: PreTrainedTokenizerBase, *, start: int) -> list[list[int]]:
    """Returns the token ids of texts or of conversations, one or more each; `start` is the row of the first one."""
    of_prompts = (
        _tokenize_texts(prompts, tokenizer)
        if isinstance(prompts[0], str)
        else _tokenize_messages(prompts, tokenizer, start=start)
    )
    for number, ids in enumerate(of_prompts, start):
        if not ids:
            raise ValueError(
                f"the prompt in row {number} has no tokens under this tokenizer: {shown(prompts[number - start])}; "
                "drop such rows"
            )
    return of_prompts


def _tokenize_messages(prompts: list[Any], tokenizer: PreTrainedTokenizerBase, *, start: int) -> list[list[int]]:
    if tokenizer.chat_template is None:
        raise ValueError(
            "the prompts are messages but the tokenizer has no chat template; use the tokenizer of an instruction "
            "model, set tokenizer.chat_template, or use text prompts"
        )
    try:
        return _apply_chat_template(prompts, tokenizer)
    # A template refuses roles and keys that it does not know with an error of its own choice.
    except Exception as error:
        number = next((i for i, messages in enumerate(prompts) if not _fits_template(messages, tokenizer)), 0)
        raise ValueError(
            f"the chat template refuses the messages in row {start + number}, {shown(prompts[number])}: "
            f"{type(error).__name__}: {error}; change the row, or the tokenizer"
        ) from error


def _apply_chat_template(prompts: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    encoded: Any = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
    return [list(ids) for ids in encoded["input_ids"]]


def _fits_template(messages: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        _apply_chat_template([messages], tokenizer)
    except Exception:
        return False
    return True


def _tokenize_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    tokenized = tokenizer(texts, add_special_tokens=True)["input_ids"]
    plain = tokenizer(texts, add_special_tokens=False)["input_ids"]
    eos = tokenizer.eos_token_id
    # An eos inside the text is kept. If the ids do not end with the plain ids, the tokenizer has appended the eos.
    return [
        list(ids[:-1]) if ids and ids[-1] == eos and ids[len(ids) - len(text_ids) :] != text_ids else list(ids)
        for ids, text_ids in zip(tokenized, plain, strict=True)
    ]
