"""From dataset columns to the text or messages of a prompt. Chat templates belong to the tokenizer."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from alpaca_ppo.config.checks import template_options, without_nulls

PROBE = "…"


@dataclass(frozen=True)
class PromptTemplate:
    """A format string over dataset columns.

    Attributes:
        text: its fields are plain column names; literal braces are doubled.
        optional: the column that may be missing, None or blank.
        without_optional: the format string of rows for which it is; None = `text`, with nothing in its place.
    """

    text: str
    optional: str | None = None
    without_optional: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The required columns, in the order of their first use.

        Raises:
            ValueError: for an invalid format string, and a field that is not a plain name.
        """
        return tuple(name for name in _field_names(self.text) if name != self.optional)

    def render(self, row: Mapping[str, Any]) -> str:
        """Returns the prompt text of one row.

        Raises:
            ValueError: if a column is None, which would be rendered as the word "None".
        """
        optional = None if self.optional is None else row.get(self.optional)
        is_blank = optional is None or not str(optional).strip()
        text = self.without_optional if is_blank and self.without_optional is not None else self.text
        values = {name: "" if is_blank and name == self.optional else row[name] for name in _field_names(text)}
        for name, value in values.items():
            if value is None:
                raise ValueError(f"column {name!r} is None; drop such rows, or fill the column")
        return text.format(**values)


# Stanford Alpaca's exact wording (github.com/tatsu-lab/stanford_alpaca), which AlpacaFarm's models were trained with.
PROMPT_TEMPLATES: dict[str, PromptTemplate] = {
    "alpaca": PromptTemplate(
        text=(
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
        ),
        optional="input",
        without_optional=(
            "Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Response:"
        ),
    )
}


@dataclass(frozen=True)
class PromptForm:
    """How dataset rows become prompts, by the options of these names (`config.run_options`). `json_columns` have the
    type Json.
    """

    prompt_column: str = "prompt"
    prompt_template: str | None = None
    user_template: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    json_columns: frozenset[str] = frozenset()

    @classmethod
    def of(cls, args: Any) -> "PromptForm":
        """Returns the form in the configuration `args`."""
        return cls(
            args.prompt_column, args.prompt_template, args.user_template, args.system_prompt, args.chat_template_kwargs
        )

    def resolved(self, columns: Sequence[str], *, chat: bool) -> "PromptForm":
        """Returns the form for a dataset with these columns. Without a prompt column, Alpaca's `instruction` and
        `input` become a user's message with a chat template (`chat`), else text of the `alpaca` template.

        Raises:
            ValueError: without a prompt column or Alpaca's, and for a template that is invalid or has other columns.
        """
        form = self
        if self.prompt_template is None and self.user_template is None and self.prompt_column not in columns:
            if self.prompt_column != "prompt" or "instruction" not in columns:
                problem = f"the dataset has no column {self.prompt_column!r}; its columns are {list(columns)}"
                remedy = "set prompt_column to the one with the prompt, or user_template to such as '{question}'"
                raise ValueError(f"{problem}; {remedy}")
            if chat or self.system_prompt is not None:
                form = replace(self, user_template="{instruction}\n{input}")
            else:
                form = replace(self, prompt_template="alpaca")
        if missing := [name for name in form.columns if name not in columns]:
            raise ValueError(f"{form} uses {missing}, but the columns are {list(columns)}; rename it, or double braces")
        return form

    @property
    def columns(self) -> tuple[str, ...]:
        """The required columns.

        Raises:
            ValueError: for an invalid template.
        """
        try:
            return (self.prompt_column,) if self.template is None else self.template.columns
        except ValueError as error:
            raise ValueError(f"{self} {error}") from error

    def __str__(self) -> str:
        """The option that determines the prompts, and its value."""
        names = ("prompt_template", "user_template", "prompt_column")
        return next(f"{name} {getattr(self, name)!r}" for name in names if getattr(self, name) is not None)

    @cached_property
    def template(self) -> PromptTemplate | None:
        """The template that renders the columns; None if a column holds the prompt. In a `user_template` of several
        columns, `input` is optional.

        Raises:
            ValueError: for an invalid template.
        """
        if self.prompt_template is not None:
            return PROMPT_TEMPLATES.get(self.prompt_template) or PromptTemplate(self.prompt_template)
        if self.user_template is None:
            return None
        several = len(_field_names(self.user_template)) > 1
        return PromptTemplate(self.user_template, optional="input" if several else None)

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """Returns the text or messages of one row.

        Raises:
            ValueError: see `PromptTemplate.render`.
        """
        prompt: Any = row[self.prompt_column] if self.template is None else self.template.render(row)
        if self.prompt_template is not None:
            return prompt
        if isinstance(prompt, str) and (self.user_template is not None or self.system_prompt is not None):
            prompt = [{"role": "user", "content": prompt.strip()}]
        if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
            return prompt
        prompt = self.own_keys(prompt, self.prompt_column)
        if self.system_prompt is not None and all(message.get("role") != "system" for message in prompt):
            return [{"role": "system", "content": self.system_prompt}, *prompt]
        return prompt

    def own_keys(self, messages: Any, column: str) -> Any:
        """Returns messages of `column` without the nulls that Arrow writes for keys of other rows: chat templates test
        for the presence of a key. In a column of the type Json, only a message's own nulls are left out.
        """
        return without_nulls(messages, deep=column not in self.json_columns)

    def own_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `row` without the keys of other rows in the columns that `template_options` reads, unless these have
        the type Json.
        """
        shared = {"tools", "chat_template_kwargs"} - self.json_columns
        return {name: without_nulls(value) if name in shared else value for name, value in row.items()}

    def options_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the chat template for one row, whose own take precedence. Columns that are fields of
        the prompt are text.

        Raises:
            ValueError: see `template_options`.
        """
        fields = () if self.template is None else _field_names(self.template.text)
        own = template_options({name: value for name, value in row.items() if name not in fields})
        return {**(self.chat_template_kwargs or {}), **own}

    def wording(self, row: Mapping[str, Any], tokenizer: Any) -> str:
        """Returns the prompt of `row` up to the policy's answer, with `PROBE` in place of its own text: of the first
        column of the template, where others are empty, or, without a template, of the first user's message.
        `other_wording` compares it with that of an earlier run.
        """
        if self.template is not None:
            others_empty = dict.fromkeys(_field_names(self.template.text), "")
            prompt = self.prompt_of({**others_empty, self.template.columns[0]: PROBE})
        else:
            prompt = _up_to_the_first_question(self.prompt_of(row))
        if isinstance(prompt, str):
            return prompt
        # Makes a template write the date's format instead of the date.
        undated = tokenizer.get_chat_template().replace("strftime_now(", "(")
        options = {"add_generation_prompt": True, **(self.chat_template_kwargs or {}), "chat_template": undated}
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, **options))


def _up_to_the_first_question(prompt: Any) -> Any:
    """`PROBE` for a text; of messages, the first ones to the first user's, which becomes `PROBE`."""
    if isinstance(prompt, str):
        return PROBE
    for i, message in enumerate(prompt):
        if message["role"] == "user":
            return [*prompt[:i], {**message, "content": PROBE}]
    return prompt


def _field_names(text: str) -> list[str]:
    """Returns the fields of a format string, each once; raises a `ValueError` if it is invalid."""
    try:
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"is not a valid format string ({error}); double each literal brace") from error
    # Attribute access, indexing and conversions would let a template read an object's internals.
    if not parts or any(not str(name).isidentifier() or spec or conversion for _, name, spec, conversion in parts):
        raise ValueError(f"must name columns in braces, as {{question}}, or be one of {', '.join(PROMPT_TEMPLATES)}")
    return list(dict.fromkeys(str(name) for _, name, _, _ in parts))
