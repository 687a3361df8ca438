"""Tokenized prompts: templates and chat templates are applied, overlong prompts are dropped or cut, and batches padded.

Token ids are kept in memory, 4 bytes each; the rows stay in the dataset and are read on access. Leaves out images and
the continuation of an assistant message; sorting and chunking by length are in `ppo.batch_packing`.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from os.path import commonprefix
from statistics import median_low
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from alpaca_ppo.config.fields import shown
from alpaca_ppo.control_tokens import ControlTokens
from alpaca_ppo.data.templates import PROBE, PromptForm
from alpaca_ppo.types import PromptBatch

_CHUNK = 1000
_WORDING = "prompt_wording"
"""The entry in a tokenizer's configuration that holds the `wording` of the prompts on which its model was trained."""
_NOT_TEXT = ("image", "images", "pixel_values", "video", "videos")
"""Columns that trainers of models with vision read, beside the prompt."""


@dataclass(eq=False)
class PromptDataset(Sequence[dict[str, Any]]):
    """The prompts that are not overlong, in the dataset's order.

    The index of a prompt is stable; it is the `prompt_id` that keys the prompt's random numbers. `ds[i]` is
    `{"input_ids": list[int], "row": dict}`. `row` holds every column of the dataset plus `prompt`: the text or messages
    before tokenization (what a template has made replaces a column of that name).
    """

    _dataset: Dataset
    _input_ids: "Sequence[array[int]]"
    form: PromptForm
    wording: str
    """How prompts are written, up to the policy's answer: that of the first row, with `PROBE` for its own text."""
    fingerprint: str
    """A hash of the token ids and of all columns, independent of where the rows were loaded from."""
    num_dropped: int
    """Prompts that were longer than `query_len`."""
    num_cut: int
    """Prompts that were too long, and whose beginning was cut off."""

    def __len__(self) -> int:
        return len(self._input_ids)

    def __str__(self) -> str:
        """How many prompts there are, and how many were dropped or cut."""
        if self.any_blank:
            return f"{len(self)} prompts that environments make"
        cut = f", {self.num_cut} without their beginning" if self.num_cut else ""
        return f"{len(self)} prompts ({self.num_dropped} dropped as overlong{cut})"

    @property
    def are_messages(self) -> bool:
        """Whether the prompts are messages, which the tokenizer's chat template renders, rather than text."""
        return isinstance(self[0]["row"]["prompt"], list)

    @property
    def any_blank(self) -> bool:
        """Whether a prompt is blank, for its environment to write."""
        first = self[0]["row"]["prompt"]
        return any(not ids for ids in self._input_ids) or (isinstance(first, list) and not first[-1]["content"])

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self._dataset[index]
        return {"input_ids": list(self._input_ids[index]), "row": {**row, "prompt": self.form.prompt_of(row)}}

    def record_wording(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Notes in `tokenizer`, which is saved with the model, how the prompts were written that the model learned."""
        tokenizer.init_kwargs[_WORDING] = self.wording

    def other_wording(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Says how the wording differs from what `tokenizer` notes, from shortly before the place. Empty if it does
        not, or if the first prompt begins and ends as noted: a column may hold what a template has written.
        """
        learned, text = tokenizer.init_kwargs.get(_WORDING, self.wording), prompt_text(self[0], tokenizer)
        begin, end = learned.partition(PROBE)[0], learned.rpartition(PROBE)[2]
        if learned == self.wording or (text.startswith(begin) and text.endswith(end)) or self.any_blank:
            return ""
        start = max(0, len(commonprefix([learned, self.wording])) - 30)
        then, now = (_shortened(text[start:]) for text in (learned, self.wording))
        return f"the model was trained on prompts written {then}, but these are written {now} ({PROBE}: their own text)"


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    query_len: int,
    limit: str = "query_len",
    form: PromptForm | None = None,
    overlong: str = "drop",
    tools_of: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] | None = None,
    control_tokens: ControlTokens | None = None,
) -> PromptDataset:
    """Returns the dataset's prompts as token ids, at most `query_len` tokens each.

    Args:
        dataset: rows with the columns of `form`. A column of prompts holds text, or messages (a list of {"role",
            "content"}), to which the chat template is applied with the generation prompt.
        tokenizer: the policy's tokenizer. Text gets the special tokens that it prepends; an eos that it appends is
            removed, because it would end the prompt.
        query_len: the longest prompt, in tokens.
        limit: the option that sets it, which errors name.
        form: how rows become prompts; see `PromptForm.resolved`.
        overlong: what happens to a longer prompt: "drop" and "truncate" count it, "error" refuses it. A prompt is cut
            at its beginning, because a response continues its end, which in a chat is what the template writes before
            an answer; a bos at its very beginning stays. The text in `row` is not cut.
        tools_of: given where environments answer: returns the schemas of the tools that a row's prompt shows. A prompt
            may then be blank, for the environment to write; it has no tokens.
        control_tokens: given where prompts must not write any.

    Raises:
        ValueError: for a missing column, an empty or malformed prompt (with its row), an overlong prompt under "error",
            or if no prompt is left.
    """
    assert query_len >= 1 and overlong in ("drop", "truncate", "error")
    _check_dataset(dataset)
    form = (form or PromptForm()).resolved(dataset.column_names, chat=bool(tokenizer.chat_template))
    digest = hashlib.sha256()
    kept, lengths, input_ids, num_cut = list[int](), list[int](), list["array[int]"](), 0
    kind: type | None = None
    for start in range(0, len(dataset), _CHUNK):
        columns = dataset[start : start + _CHUNK]
        digest.update(json.dumps(columns, sort_keys=True, default=_json_value).encode())
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        prompts, tools = list[Any](), list[Sequence[Mapping[str, Any]]]()
        for number, row in enumerate(rows, start):
            try:
                prompt = form.prompt_of(row)
                tools += [tools_of(row)] if tools_of else []
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
            _check_prompt(prompt, number, may_be_blank=tools_of is not None)
            kind = kind or type(prompt)
            if type(prompt) is not kind:
                raise ValueError(
                    f"the prompt in row {number} is {shown(prompt)}, but that in row 0 is "
                    f"{'text' if kind is str else 'messages'}; make all of them text, or all of them messages"
                )
            prompts.append(prompt)
        tokenized = tokenize_prompts(
            [control_tokens.protect(prompt) for prompt in prompts] if control_tokens else prompts,
            tokenizer,
            form.chat_template_kwargs,
            tools=tools if tools_of else None,
            control_tokens=control_tokens,
            start=start,
        )
        lengths += map(len, tokenized)
        for number, ids in enumerate(tokenized, start):
            if len(ids) > query_len:
                if overlong == "error":
                    raise ValueError(
                        f"the prompt in row {number} has {len(ids)} tokens, more than {limit} ({query_len}); raise "
                        f"{limit}, or set overlong_prompts: drop or truncate"
                    )
                if overlong == "drop":
                    continue
                num_cut += 1
                # A bos at the beginning stays, in the place of one of the last tokens.
                bos = ids[:1] if ids[0] == tokenizer.bos_token_id else []
                ids = bos + ids[len(ids) - query_len + len(bos) :]
            kept.append(number)
            input_ids.append(array("i", ids))
            digest.update(input_ids[-1])
    if not kept:
        shortest, median, longest = min(lengths), median_low(lengths), max(lengths)
        raise ValueError(
            f"all {len(dataset)} prompts of {form} have more tokens than {limit} ({query_len}): the shortest "
            f"{shortest}, the median {median}, the longest {longest}; raise {limit}"
        )
    return PromptDataset(
        dataset.select(kept),
        input_ids,
        form,
        form.wording(dataset[kept[0]], tokenizer),
        fingerprint=digest.hexdigest()[:16],
        num_dropped=len(dataset) - len(kept),
        num_cut=num_cut,
    )


def introduction(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The lines that a run prints about its prompts at its start: what makes them, the first one as the model reads it,
    and how they differ from those that the model was trained on. None for prompts that environments make.
    """
    if prompts.any_blank:
        return []
    text, kind = prompt_text(prompts[0], tokenizer), "messages" if prompts.are_messages else "text"
    marks = filter(str.strip, [*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens])
    if tokenizer.chat_template and not prompts.are_messages and not any(mark in text for mark in marks):
        kind += " without the tokenizer's chat template (user_template makes messages)"
    first = f"prompts are {kind}, of {prompts.form}; the first: {_shortened(text)}"
    template, letters = prompts.form.template, ""
    if template is not None and "\\n" in template.text:
        letters = (
            f"{prompts.form} has a backslash and an n, which is no line break; for one, write the text in double "
            "quotes in YAML, and as $'...' on the command line"
        )
    return [line for line in (first, letters, prompts.other_wording(tokenizer)) if line]


def prompt_text(item: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an item of a `PromptDataset`; of messages, what the chat template made of them."""
    prompt = item["row"]["prompt"]
    # A tokenizer may not know all words of a text.
    return prompt if isinstance(prompt, str) else str(tokenizer.decode(item["input_ids"]))


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 320 else f"{text[:200]} [...] {text[-100:]}")


def _json_value(value: Any) -> Any:
    """Returns a JSON value for what `json` cannot encode; values without stable content (images) give their type."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else type(value).__name__


def _check_dataset(dataset: Dataset) -> None:
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        found = "empty" if isinstance(dataset, Dataset) else f"a {type(dataset).__name__}"
        raise ValueError(
            f"the prompt dataset is {found}; pass one split as a datasets.Dataset with rows, of a stream "
            "Dataset.from_list(list(stream.take(10000)), features=stream.features)"
        )
    if images := [name for name in dataset.column_names if name in _NOT_TEXT]:
        raise ValueError(
            f"the dataset has the column {images[0]!r}, but the policy reads text only; remove it "
            f"(dataset.remove_columns({images})), or rename it if a reward function needs it"
        )


def well_formed_messages(value: Any) -> bool:
    """Whether `value` is a list of messages, one at least, with `role` and `content`, both text."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


def _check_prompt(prompt: Any, number: int, *, may_be_blank: bool) -> None:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not well_formed_messages(messages):
        raise ValueError(
            f"the prompt in row {number} is {shown(prompt)}; it must be text, or a list of messages with 'role' and "
            "'content', both text"
        )
    if messages[-1]["role"] == "user" and not messages[-1]["content"].strip() and not may_be_blank:
        raise ValueError(f"the prompt in row {number} is empty; drop such rows")
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"the messages in row {number} end with an assistant message, which the policy is to generate; remove it"
        )


def tokenize_prompts(
    prompts: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    control_tokens: ControlTokens | None = None,
    start: int = 0,
) -> list[list[int]]:
    """Returns the token ids of texts or of conversations, one or more each.

    Args:
        prompts: all texts, or all messages.
        tokenizer: of the policy.
        chat_template_kwargs: further arguments of the chat template.
        tools: given where environments answer: the schemas that the chat template shows with each prompt. An empty text
            is then left to its environment, and has no tokens.
        control_tokens: given where prompts have parts that it protects.
        start: the row of the first prompt.

    Raises:
        ValueError: for messages without a chat template or that it refuses, and for a prompt without tokens.
    """
    if isinstance(prompts[0], str):
        whole, plain = (
            tokenizer(prompts, add_special_tokens=added)["input_ids"]
            if control_tokens is None
            else [control_tokens.encode(prompt, add_special_tokens=added) for prompt in prompts]
            for added in (True, False)
        )
        # An eos inside the text is kept. If the ids do not end with the plain ids, the tokenizer has appended the eos.
        of_prompts = [
            list(ids[:-1])
            if ids[-1:] == [tokenizer.eos_token_id] and ids[len(ids) - len(text) :] != text
            else list(ids)
            for ids, text in zip(whole, plain, strict=True)
        ]
    elif tokenizer.chat_template is None:
        raise ValueError(
            "the prompts are messages but the tokenizer has no chat template; use the tokenizer of an instruction "
            "model, set tokenizer.chat_template, or use text prompts"
        )
    else:
        how = {"add_generation_prompt": True, "return_dict": True, **(chat_template_kwargs or {})}
        how["tokenize"] = control_tokens is None
        of_prompts = []
        for number, messages in enumerate(prompts):
            with_tools = {"tools": list(tools[number])} if tools and tools[number] else {}
            # A template refuses roles and keys that it does not know with an error of its own choice.
            try:
                encoded: Any = tokenizer.apply_chat_template(messages, **{**how, **with_tools})
            except Exception as error:
                raise ValueError(
                    f"the chat template refuses the messages in row {start + number}, {shown(messages)}: "
                    f"{type(error).__name__}: {error}; change the row, or the tokenizer"
                ) from error
            of_prompts.append(
                list(encoded["input_ids"])
                if control_tokens is None
                else control_tokens.encode(encoded, add_special_tokens=False)
            )
    for number, (prompt, ids) in enumerate(zip(prompts, of_prompts, strict=True), start):
        if tools is not None and not prompt:
            ids.clear()
        elif not ids:
            raise ValueError(
                f"the prompt in row {number} has no tokens under this tokenizer: {shown(prompt)}; drop such rows"
            )
    return of_prompts


def collate_prompts(
    items: Sequence[dict[str, Any]], indices: Sequence[int], *, pad_token_id: int, query_len: int
) -> PromptBatch:
    """Returns one batch of B prompts, each padded on the left to `query_len` tokens.

    The width is `query_len` and not the longest prompt of the batch, because the rollouts of all ranks are concatenated
    and must have equal widths. Wider rows cost nothing: the sampler and `pack_rows` drop columns that are padding only.

    Args:
        items: B items of a `PromptDataset`, each with `input_ids` and `row`.
        indices: their B indices in that dataset, which become `prompt_ids`.
        pad_token_id: fills `queries`. It may equal the eos id or occur inside a prompt, because the mask comes from the
            prompts' lengths and not from ids.
        query_len: Q, in tokens.

    Returns:
        queries (B, Q) int64, query_attn_masks (B, Q) int64 (1 = a token of the prompt), prompt_ids (B,) int64, rows (B
        dictionaries).
    """
    assert len(items) == len(indices) and all(len(item["input_ids"]) <= query_len for item in items)
    queries, masks = left_padded([item["input_ids"] for item in items], query_len, pad_token_id)
    return PromptBatch(
        queries=queries,
        query_attn_masks=masks,
        prompt_ids=torch.tensor(indices, dtype=torch.int64),
        rows=[item["row"] for item in items],
    )


def left_padded(rows: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """The ids of `rows`, (B, width) int64, padded on the left, and their masks, (B, width) int64, 1 = a token."""
    starts = torch.tensor([width - len(row) for row in rows], dtype=torch.int64)
    is_token = torch.arange(width) >= starts.unsqueeze(1)
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    ids[is_token] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return ids, is_token.long()
