"""Prompt templates: from dataset columns to prompt text. Chat templates belong to the tokenizer and are not here."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PromptForm:
    """How the rows of a dataset become prompts: the options of these names."""

    prompt_column: str = "prompt"
    """The column with the prompt, as text or messages, to which the chat template is applied."""
    prompt_template: str | None = None
    """A named template or a format string over any columns, used instead of `prompt_column`: see `resolve_template`."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further arguments of the chat template."""

    @classmethod
    def of(cls, options: Any) -> "PromptForm":
        """The form that a configuration, or a namespace of other options, names."""
        return cls(**{name: value for name, value in vars(options).items() if name in cls.__dataclass_fields__})

    def template(self, columns: Sequence[str]) -> "PromptTemplate | None":
        """The template of the prompts, given the dataset's columns; None if they are a column of messages or text.

        Raises:
            ValueError: for neither the column nor one of Alpaca's, and as `resolve_template`.
        """
        if self.prompt_template is not None:
            return resolve_template(self.prompt_template, columns)
        if self.prompt_column in columns:
            return None
        if self.prompt_column == "prompt" and "instruction" in columns:
            return resolve_template("alpaca", columns)
        raise ValueError(
            f"the dataset has no column {self.prompt_column!r}; its columns are {columns}; set prompt_column to the "
            "one with the prompt, or set a prompt_template such as 'Question: {question}'"
        )


@dataclass(frozen=True)
class PromptTemplate:
    """A format string over dataset columns, optionally with a second one for rows whose optional column is empty."""

    text: str
    """The format string."""
    optional: str | None = None
    """The column that may be missing, None or blank; `without_optional` is used then."""
    without_optional: str | None = None
    """The format string without the optional column."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every row must have, in the order of their first use."""
        return tuple(name for name in _field_names(self.text) if name != self.optional)

    def render(self, row: Mapping[str, Any]) -> str:
        """Returns the prompt text of one row.

        Raises:
            ValueError: if a column is None, which would be rendered as the word "None".
        """
        text, optional = self.text, row.get(self.optional or "")
        if self.without_optional is not None and (optional is None or not str(optional).strip()):
            text = self.without_optional
        values = {name: row[name] for name in _field_names(text)}
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


def resolve_template(template: str, columns: Sequence[str]) -> PromptTemplate:
    """Returns the named template, or `template` itself as a format string such as "Question: {question}\\nAnswer:".

    Args:
        template: a key of PROMPT_TEMPLATES, or a format string whose fields are plain column names. Double literal
            braces.
        columns: the dataset's columns.

    Raises:
        ValueError: for an unknown name, an invalid format string, a field that is not a plain name, or a field that is
            not a column.
    """
    resolved = PROMPT_TEMPLATES.get(template)
    if resolved is None:
        if "{" not in template:
            raise ValueError(
                f"prompt_template {template!r} is neither a named template ({', '.join(sorted(PROMPT_TEMPLATES))}) "
                "nor a format string with a column in braces, such as 'Question: {question}'"
            )
        resolved = PromptTemplate(text=template)
    missing = [name for name in resolved.columns if name not in columns]
    if missing:
        raise ValueError(
            f"prompt_template {template!r} uses {missing}, but the dataset's columns are {list(columns)}; "
            "rename the field (or double the braces of a literal one)"
        )
    return resolved


def _field_names(text: str) -> list[str]:
    try:
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ValueError(
            f"prompt_template {text!r} is not a valid format string ({error}); double each literal brace"
        ) from error
    # Attribute access, indexing and conversions would let a template read an object's internals.
    if not parts or any(not str(name).isidentifier() or spec or conversion for _, name, spec, conversion in parts):
        raise ValueError(
            f"prompt_template {text!r} needs a field, and each field must be a plain column name, such as {{question}}"
        )
    return list(dict.fromkeys(str(name) for _, name, _, _ in parts))
