"""From dataset rows to tokenized prompts, and to left-padded batches. Leaves out images and the continuation of an
assistant message.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from alpaca_ppo.data.loading import columns_of, unformatted
from alpaca_ppo.data.templates import PROBE, PromptForm
from alpaca_ppo.types import PromptBatch

# The schemas of a prompt's tools, and the function from a row to these.
Schemas = Sequence[Mapping[str, Any]]
ToolsOf = Callable[[Mapping[str, Any]], Schemas]

_CHUNK = 1000
# The entry of a tokenizer's configuration for the `wording` on which its model was trained.
_WORDING = "prompt_wording"
_NOT_TEXT = ("image", "images", "pixel_values", "video", "videos")


@dataclass(eq=False)
class PromptDataset(Sequence[dict[str, Any]]):
    """The prompts that are not overlong, in the dataset's order.

    `ds[i]` is `{"input_ids": list[int], "row": dict}`; i is the `prompt_id` that keys the prompt's random numbers.
    `row` holds every column, and in `prompt` the text or messages before tokenization. Token ids are kept in memory,
    rows in the dataset.

    Attributes:
        wording: `PromptForm.wording` of the first row.
        fingerprint: a hash of the token ids and of all columns.
        numbers: the prompts' rows in the dataset before any was dropped.
        num_cut: prompts longer than `query_len` whose beginning was cut off.
    """

    _dataset: Dataset
    _input_ids: "Sequence[array[int]]"
    form: PromptForm
    wording: str
    fingerprint: str
    numbers: Sequence[int]
    num_dropped: int
    num_cut: int

    def __len__(self) -> int:
        return len(self._input_ids)

    def __str__(self) -> str:
        if self.any_blank:
            return f"{len(self)} prompts that environments make"
        cut = f", {self.num_cut} without their beginning" if self.num_cut else ""
        return f"{len(self)} prompts ({self.num_dropped} dropped as overlong{cut})"

    @property
    def are_messages(self) -> bool:
        """Whether the prompts are messages rather than text."""
        return isinstance(self[0]["row"]["prompt"], list)

    @property
    def any_blank(self) -> bool:
        """Whether a prompt is blank, for its environment to write; of messages, the first prompt decides."""
        first = self[0]["row"]["prompt"]
        return any(not ids for ids in self._input_ids) or (isinstance(first, list) and not first[-1]["content"])

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        row = self.form.own_options(self._dataset[index])
        return {"input_ids": list(self._input_ids[index]), "row": {**row, "prompt": self.form.prompt_of(row)}}

    def record_wording(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Records the wording in `tokenizer`, which is saved with the trained model."""
        tokenizer.init_kwargs[_WORDING] = self.wording

    def other_wording(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Returns a sentence on how the wording differs from that recorded in `tokenizer`; empty if it does not. It is
        enough that the first prompt begins and ends as recorded, because a column may hold what a template has written.
        """
        learned = tokenizer.init_kwargs.get(_WORDING, self.wording)
        if learned == self.wording or self.any_blank:
            return ""
        text = prompt_text(self[0], tokenizer)
        if text.startswith(learned.partition(PROBE)[0]) and text.endswith(learned.rpartition(PROBE)[2]):
            return ""
        start = max(0, len(commonprefix([learned, self.wording])) - 30)
        then, now = _shortened(learned[start:]), _shortened(self.wording[start:])
        return f"the model was trained on prompts written {then}, but these are written {now} ({PROBE}: their own text)"


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    query_len: int,
    limit: str = "query_len",
    form: PromptForm | None = None,
    overlong: str = "drop",
    tools_of: ToolsOf | None = None,
    control_tokens: ControlTokens | None = None,
) -> PromptDataset:
    """Returns the dataset's prompts as token ids, at most `query_len` tokens each.

    Args:
        dataset: a column of prompts holds text, or messages (a list of {"role", "content"}), to which the chat template
            is applied with the generation prompt.
        tokenizer: of the policy. Text gets the special tokens that it prepends; an eos that it appends is removed,
            because it would end the prompt.
        limit: the option that sets `query_len`, for errors.
        form: how rows become prompts; see `PromptForm.resolved`.
        overlong: what happens to a longer prompt. "truncate" cuts off its beginning but for a bos, because a response
            continues its end; the text in `row` is not cut.
        tools_of: given with environments or tools: returns the schemas of the tools that a row's prompt shows. A prompt
            may then be blank, without tokens, for the environment to write.
        control_tokens: given where prompts must not write any.

    Raises:
        ValueError: for a dataset without rows or with images, a missing column, a prompt (with its row) that is empty,
            malformed, overlong under "error", or does not fit the others or the chat template; if none is left.
    """
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        found = "empty" if isinstance(dataset, Dataset) else f"a {type(dataset).__name__}"
        raise ValueError(
            f"the prompt dataset is {found}; pass one split as a datasets.Dataset with rows, of a stream "
            "Dataset.from_list(list(stream.take(10000)), features=stream.features)"
        )
    if images := [name for name in columns_of(dataset) if name in _NOT_TEXT]:
        raise ValueError(f"the dataset has a column {images[0]!r}, but the policy reads only text; remove or rename it")
    dataset = unformatted(dataset)
    form = (form or PromptForm()).resolved(columns_of(dataset), chat=bool(tokenizer.chat_template))
    json_columns = frozenset(name for name, feature in dataset.features.items() if "Json(" in str(feature))
    form = replace(form, json_columns=json_columns)
    digest = hashlib.sha256()
    # The rows that are kept, and their token ids; the lengths are those of all prompts.
    kept: list[int] = []
    input_ids: list[array[int]] = []
    lengths: list[int] = []
    num_cut = 0
    kind: type | None = None
    for start in range(0, len(dataset), _CHUNK):
        columns = dataset[start : start + _CHUNK]
        digest.update(json.dumps(columns, sort_keys=True, default=_json_value).encode())
        rows = [form.own_options(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        prompts: list[Any] = []
        options: list[dict[str, Any]] = []
        for number, row in enumerate(rows, start):
            try:
                prompt = form.prompt_of(row)
                options.append(_options_of(row, prompt, form, tools_of, tokenizer))
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
            _check_prompt(prompt, number, may_be_blank=tools_of is not None)
            kind = kind or type(prompt)
            if type(prompt) is not kind:
                problem = f"the prompt in row {number} is {shown(prompt)}, unlike row 0"
                raise ValueError(f"{problem}; make all text, or messages")
            prompts.append(prompt)
        protected = control_tokens.protect(prompts) if control_tokens else prompts
        tokenized = tokenize_prompts(
            protected, tokenizer, options, may_be_blank=tools_of is not None, control_tokens=control_tokens, start=start
        )
        lengths += map(len, tokenized)
        for number, ids in enumerate(tokenized, start):
            if len(ids) > query_len:
                if overlong == "error":
                    problem = f"the prompt in row {number} has {len(ids)} tokens, more than {limit} ({query_len})"
                    raise ValueError(f"{problem}; raise {limit}, or set overlong_prompts: drop or truncate")
                if overlong == "drop":
                    continue
                num_cut += 1
                bos = ids[:1] if ids[0] == tokenizer.bos_token_id else []
                ids = bos + ids[len(ids) - query_len + len(bos) :]
            kept.append(number)
            input_ids.append(array("i", ids))
            digest.update(input_ids[-1])
    if not kept:
        raise ValueError(
            f"all {len(dataset)} prompts of {form} have more tokens than {limit} ({query_len}): the shortest "
            f"{min(lengths)}, the median {median_low(lengths)}, the longest {max(lengths)}; raise {limit}"
        )
    return PromptDataset(
        dataset.select(kept),
        input_ids,
        form=form,
        wording=form.wording(dataset[kept[0]], tokenizer),
        fingerprint=digest.hexdigest()[:16],
        numbers=kept,
        num_dropped=len(dataset) - len(kept),
        num_cut=num_cut,
    )


def _options_of(row: Any, prompt: Any, form: PromptForm, tools_of: ToolsOf | None, tokenizer: Any) -> dict[str, Any]:
    """Returns the checked arguments of the chat template for the `prompt` of `row`."""
    options = form.options_of(row) if isinstance(prompt, list) else {}
    for name in options if tokenizer.chat_template else ():
        if name != "tools" and not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ValueError(f"chat_template_kwargs has {name!r}, which the template never reads; remove it")
    for name in ("tools", "chat_template_kwargs") if isinstance(prompt, str) else ():
        if row.get(name) and name not in form.columns:
            raise ValueError(f"column {name!r} is set, but the prompt is text; drop it, or write messages")
    if tools_of is not None and (schemas := tools_of(row)):
        if "tools" in options:
            raise ValueError("column 'tools' is set, but the run has tools of its own; remove or rename it")
        options["tools"] = list(schemas)
    elif "tools" in options and not _writes_tools(prompt, tokenizer, options):
        raise ValueError("column 'tools': the chat template writes nothing about tools; remove or rename it")
    return options


def _writes_tools(messages: Any, tokenizer: Any, options: Mapping[str, Any]) -> bool:
    """Whether the template writes the tools in `options`; True if it refuses the messages, which has its own error."""
    both = [{**options, "tools": tools, "tokenize": False} for tools in (options["tools"], None)]
    with suppress(Exception):
        return len({tokenizer.apply_chat_template(messages, **keywords) for keywords in both}) == 2
    return True


def introduction(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the lines that a run prints at its start: the first prompt as the model reads it, a warning of a literal
    backslash and n in the template, and `other_wording`. Empty if environments make the prompts.
    """
    if prompts.any_blank:
        return []
    text = prompt_text(prompts[0], tokenizer)
    kind = "messages" if prompts.are_messages else "text"
    if tokenizer.chat_template and not prompts.are_messages:
        special_tokens = [*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens]
        if not any(token in text for token in special_tokens if token.strip()):
            kind += " without the tokenizer's chat template (user_template makes messages)"
    lines = [f"prompts are {kind}, of {prompts.form}; the first: {_shortened(text)}"]
    if prompts.form.template is not None and "\\n" in prompts.form.template.text:
        lines.append(
            f"{prompts.form} has a backslash and an n; for a line break, write double quotes in YAML, $'...' in a shell"
        )
    if difference := prompts.other_wording(tokenizer):
        lines.append(difference)
    return lines


def prompt_text(item: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text of an item of a `PromptDataset`; messages as rendered by the chat template."""
    prompt = item["row"]["prompt"]
    # Text is not decoded, because a tokenizer may not know all of its words.
    return prompt if isinstance(prompt, str) else str(tokenizer.decode(item["input_ids"]))


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 320 else f"{text[:200]} [...] {text[-100:]}")


def _json_value(value: Any) -> Any:
    """What the dataset's fingerprint has of `value`: its content, or, as of an image, the name of its type alone."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else type(value).__name__


def well_formed_messages(value: Any) -> bool:
    """Whether `value` is a non-empty list of messages, whose `role` and `content` (if no tool calls) are text."""
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        return False
    texts = [(m.get("role"), m.get("content", "" if m.get("tool_calls") else None)) for m in value]
    return all(isinstance(text, str) for pair in texts for text in pair)


def _check_prompt(prompt: Any, number: int, *, may_be_blank: bool) -> None:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not well_formed_messages(messages):
        raise ValueError(f"the prompt in row {number} is {shown(prompt)}; pass text, or messages of role and content")
    if messages[-1]["role"] == "user" and not messages[-1]["content"].strip() and not may_be_blank:
        raise ValueError(f"the prompt in row {number} is empty; drop such rows")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"the messages in row {number} end with the assistant's, which the policy writes; remove it")


def tokenize_prompts(
    prompts: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    options: Sequence[Mapping[str, Any]],
    *,
    may_be_blank: bool = False,
    control_tokens: ControlTokens | None = None,
    start: int = 0,
) -> list[list[int]]:
    """Returns the token ids of at least one prompt.

    Args:
        prompts: all texts, or all messages.
        options: further arguments of the chat template for each prompt, such as `tools`.
        may_be_blank: with environments or tools: an empty text gets no tokens.
        control_tokens: given where prompts have parts that it protects.
        start: the row of the first prompt, for errors.

    Raises:
        ValueError: for messages without a chat template or that it refuses, and for a prompt without tokens.
    """
    if isinstance(prompts[0], str):
        tokenized = _tokenize_texts(prompts, tokenizer, control_tokens)
    elif tokenizer.chat_template is None:
        raise ValueError("the prompts are messages, but the tokenizer has no chat_template; set it, or give text")
    else:
        keywords = {"add_generation_prompt": True, "return_dict": True, "tokenize": control_tokens is None}
        tokenized = []
        for number, (messages, given) in enumerate(zip(prompts, options, strict=True), start):
            output = rendered(messages, tokenizer, {**keywords, **given}, number)
            encoded = control_tokens.encode(output, add_special_tokens=False) if control_tokens else output["input_ids"]
            tokenized.append(list(encoded))
    for number, (prompt, ids) in enumerate(zip(prompts, tokenized, strict=True), start):
        if may_be_blank and not prompt:
            ids.clear()
        elif not ids:
            raise ValueError(f"the prompt in row {number}, {shown(prompt)}, has no tokens; drop such rows")
    return tokenized


def rendered(messages: Any, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], number: int) -> Any:
    """Returns what the chat template makes of the messages in row `number`."""
    # A template raises any kind of error for roles and keys that it does not know.
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        problem = f"the chat template refuses row {number}, {shown(messages)}"
        raise ValueError(f"{problem}: {type(error).__name__}: {error}; change either") from error


def _tokenize_texts(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, control_tokens: ControlTokens | None
) -> list[list[int]]:
    """Returns each text's token ids with the special tokens that the tokenizer adds, but for an eos at the end."""

    def encode(*, add_special_tokens: bool) -> list[list[int]]:
        if control_tokens is None:
            return tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        return [control_tokens.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    tokenized = []
    for ids, plain in zip(encode(add_special_tokens=True), encode(add_special_tokens=False), strict=True):
        # An eos that ends the text itself also ends the plain ids, and stays.
        eos_appended = ids[-1:] == [tokenizer.eos_token_id] and ids[len(ids) - len(plain) :] != plain
        tokenized.append(list(ids[:-1] if eos_appended else ids))
    return tokenized


def collate_prompts(
    items: Sequence[dict[str, Any]], indices: Sequence[int], *, pad_token_id: int, query_len: int
) -> PromptBatch:
    """Returns a batch of B items of a `PromptDataset`, padded on the left to `query_len` tokens, with their indices in
    it as `prompt_ids`.

    The width is `query_len` and not that of the longest prompt, because the rollouts of all ranks are concatenated and
    must have equal widths. Wider rows cost nothing: the sampler and `pack_rows` drop columns that are padding only.
    """
    queries, masks = left_padded([item["input_ids"] for item in items], query_len, pad_token_id)
    prompt_ids, rows = torch.tensor(indices, dtype=torch.int64), [item["row"] for item in items]
    return PromptBatch(queries=queries, query_attn_masks=masks, prompt_ids=prompt_ids, rows=rows)


def left_padded(rows: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Returns left-padded ids (B, width) int64, and their masks (B, width) int64, 1 = a token."""
    starts = torch.tensor([width - len(row) for row in rows], dtype=torch.int64)
    is_token = torch.arange(width) >= starts.unsqueeze(1)
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    ids[is_token] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return ids, is_token.long()
