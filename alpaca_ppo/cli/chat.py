"""A policy and its reference as speakers who answer the same prompt: `Speaker`, `load_speakers`, `Conversation`.

Prompts are prepared as in training, by `data.prepare_prompts`, and answers are sampled by `generation.generate`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel

from alpaca_ppo.adapters import is_adapter
from alpaca_ppo.data import PromptDataset, prepare_prompts
from alpaca_ppo.data.templates import resolve_template
from alpaca_ppo.generation import generate, resolve_stop_tokens, resolve_turn_end
from alpaca_ppo.models import load_causal_lm

LONGEST_PROMPT = 1_000_000
"""Tokens; the model's own limit shows when it is exceeded."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: the most tokens, the temperature (0 = the most likely token), and the seed."""

    max_new_tokens: int
    temperature: float
    seed: int


class Answer(NamedTuple):
    """What a model has answered; as text, it says so if that is nothing."""

    text: str
    num_tokens: int
    """With the stop token."""

    def __str__(self) -> str:
        if self.text:
            return self.text
        return f"(empty: {'it stopped at once' if self.num_tokens < 2 else f'{self.num_tokens} tokens without text'})"


@dataclass(frozen=True)
class Speaker:
    """A model with a name. `active` switches it on while it answers: a reference is the policy with its adapter off."""

    name: str
    model: Any
    active: Callable[[], AbstractContextManager[Any]] = nullcontext

    def answer(self, prompt: Sequence[int], tokenizer: Any, how: Sampling, *, chat: bool, number: int) -> "Answer":
        """One answer to the token ids `prompt`; `number` distinguishes the prompts of a session."""
        turn_end = resolve_turn_end(tokenizer) if chat else None
        stop = resolve_stop_tokens(tokenizer, self.model.generation_config, () if turn_end is None else (turn_end,))
        queries = torch.tensor([list(prompt)])
        with self.active():
            sampled = generate(
                self.model,
                queries,
                torch.ones_like(queries),
                max_new_tokens=how.max_new_tokens,
                pad_token_id=stop[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
                stop_token_ids=stop,
                seed=how.seed,
                step=number,
                prompt_ids=torch.tensor([number]),
                temperature=how.temperature or 1.0,
                do_sample=how.temperature > 0,
                cuda_graphs=False,
            )
        ids = sampled.responses[0][sampled.response_mask[0]]
        return Answer(str(tokenizer.decode(ids, skip_special_tokens=True)).strip(), len(ids))


def load_speakers(policy: str, reference: str | None, *, trust_remote_code: bool) -> list[Speaker]:
    """The policy and, unless `reference` is "none", the reference; None = the base of an adapter, else no reference.

    Raises:
        ValueError: for a model that cannot be loaded, and an adapter that names no base.
    """
    if is_adapter(policy):
        base = PeftConfig.from_pretrained(policy).base_model_name_or_path
        if not base:
            raise ValueError(
                f"{policy} is an adapter that names no base model, as that of a base built in memory; save the base, "
                "and set base_model_name_or_path in adapter_config.json to its folder"
            )
        adapted = PeftModel.from_pretrained(_load(str(base), trust_remote_code), policy)
        speakers = [Speaker("policy", adapted.get_base_model())]
        if reference is None:
            return [*speakers, Speaker("reference", adapted.get_base_model(), adapted.disable_adapter)]
    else:
        speakers = [Speaker("policy", _load(policy, trust_remote_code))]
    if reference not in (None, "none"):
        speakers.append(Speaker("reference", _load(str(reference), trust_remote_code)))
    return speakers


def _load(name: str, trust_remote_code: bool) -> Any:
    gpu = torch.cuda.is_available()
    model = load_causal_lm(name, trust_remote_code=trust_remote_code, dtype=torch.bfloat16 if gpu else torch.float32)
    device: Any = torch.device("cuda" if gpu else "cpu")
    return model.to(device).eval()


class Conversation:
    """Turns typed prompts into token ids: messages with the earlier turns, or text through a template.

    Args:
        tokenizer: the policy's.
        template: a prompt template, whose columns are filled as by `template_columns`; None = the text itself.
        chat: whether prompts are messages.
        chat_template_kwargs: further arguments of the chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        *,
        chat: bool,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.template, self.chat = tokenizer, template, chat
        self.chat_template_kwargs = chat_template_kwargs
        self.messages: list[dict[str, str]] = []

    def prompt(self, text: str) -> list[int]:
        """The token ids of `text`, after the earlier turns.

        Raises:
            ValueError: see `template_columns`.
        """
        row: dict[str, Any] = {"prompt": text}
        if self.template is not None:
            row = template_columns(text, self.template)
        elif self.chat:
            self.messages.append({"role": "user", "content": text})
            row = {"prompt": list(self.messages)}
        how = self.chat_template_kwargs
        prompts = make_prompts(Dataset.from_list([row]), self.tokenizer, self.template, chat_template_kwargs=how)
        return list(prompts[0]["input_ids"])

    def note(self, answer: str) -> None:
        """Adds the policy's answer to the conversation."""
        if self.chat:
            self.messages.append({"role": "assistant", "content": answer})


def what_to_type(template: str) -> str:
    """What a prompt for a template is, in words."""
    resolved = resolve_template(template, _AnyColumn())
    columns = [*resolved.columns, *([] if resolved.optional is None else [resolved.optional])]
    example = json.dumps(dict.fromkeys(columns, "..."))
    if len(resolved.columns) > 1:
        return f"The prompt template has several columns: type them as a JSON object, such as {example}"
    more = "" if resolved.optional is None else f"; {example} gives {resolved.optional} too"
    return f"What you type is the {columns[0]} of the prompt template{more}"


def template_columns(text: str, template: str) -> dict[str, str]:
    """The columns of a prompt template that a typed text fills.

    A plain text is the only column that the template requires; an optional one, such as `input` of `alpaca`, is empty.
    Several columns are written as a JSON object of texts.

    Raises:
        ValueError: for a plain text where several columns are required, and for an object without one of them.
    """
    resolved = resolve_template(template, _AnyColumn())
    required, optional = resolved.columns, [] if resolved.optional is None else [resolved.optional]
    given = _json_object(text)
    if given is None or not set(given) <= {*required, *optional}:
        given = {required[0]: text} if len(required) == 1 else {}
    if missing := [name for name in required if name not in given]:
        example = json.dumps(dict.fromkeys(required, "..."))
        raise ValueError(
            f"prompt_template {template!r} has the columns {', '.join(required)}, and the prompt {text!r} lacks "
            f"{', '.join(missing)}; write it as a JSON object, such as {example}"
        )
    return {**dict.fromkeys(optional, ""), **given}


def _json_object(text: str) -> dict[str, str] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()) else None


class _AnyColumn(Sequence[str]):
    """Columns of which every name is one."""

    def __contains__(self, name: object) -> bool:
        return True

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


def make_prompts(
    dataset: Dataset,
    tokenizer: Any,
    template: str | None,
    *,
    column: str = "prompt",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptDataset:
    """The prompts of `dataset`, prepared as in training, but never with a template that nobody has named.

    Raises:
        ValueError: without a template and the column; and as `prepare_prompts`.
    """
    if template is None and column not in dataset.column_names:
        raise ValueError(
            f"the prompts have no column {column!r}, only {dataset.column_names}, and the run names no "
            "prompt_template; give --prompt_column, or the template that the policy was trained with: "
            "--prompt_template alpaca, for one that was trained on rows of instruction and input, or a format string"
        )
    return prepare_prompts(
        dataset,
        tokenizer,
        query_len=LONGEST_PROMPT,
        prompt_column=column,
        prompt_template=template,
        chat_template_kwargs=chat_template_kwargs,
    )
