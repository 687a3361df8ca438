"""`Translation`: the options that stand for another trainer's configuration, and what was not taken from it."""

import dataclasses
import functools
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.config import TRAINING_ARGUMENTS
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.foreign_names import ForeignName, find_foreign_name, value_key

OPTIONS = {name: option for cls in TRAINING_ARGUMENTS for name, option in options_of(cls).items()}
# Placeholders for required options that the source does not have.
_FILL_IN = {"model_name_or_path": "FILL_IN", "dataset_name": "FILL_IN", "reward_funcs": ["rewards.py:reward"]}


@functools.cache
def defaults(section: str) -> Mapping[str, Any]:
    """One section of defaults.yaml: another trainer's defaults, or the comments on them."""
    return dict(yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text("utf-8"))[section])


def is_learned(entry: ForeignName | None) -> bool:
    """Whether a name has an option here that may change what is learned, and that is not filled in."""
    return entry is not None and not {*entry.ours} <= {*defaults("names")["not learned"]}


@dataclasses.dataclass
class Translation:
    """A configuration while it is translated: `take` sets the options that follow from one name, the caller those that
    follow from several, and `finish` completes them.

    Attributes:
        source: what is translated, in words.
        given: the foreign names with their values.
        section: the section of defaults.yaml with the other trainer's defaults.
        values: `given`, and the defaults of other names.
        options: our options with their values.
        comments: what options were computed from.
        not_taken: by the reason, the foreign names for which no option was set, such as "beta (0.04)".
    """

    source: str
    given: Mapping[str, Any]
    section: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    comments: dict[str, str] = dataclasses.field(default_factory=dict)
    not_taken: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    # By the option, the foreign name that has set it; empty if it follows from several.
    _sources: dict[str, str] = dataclasses.field(default_factory=dict)
    _undecided: list[tuple[ForeignName, str]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.given = {name: _evaluated(value) for name, value in self.given.items()}
        for name, default in defaults(self.section).items():
            value = self.given.get(name)
            is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
            if is_number and not isinstance(value, int | float | None) and "$" not in str(value):
                raise ValueError(f"{name} is {value!r} in {self.source}; it must be a number")
        self.values: dict[str, Any] = {**defaults(self.section), **self.given}

    def set(self, name: str, value: Any, comment: str = "", source: str = "") -> None:
        """Sets an option; `comment` says what it was computed from, `source` is the one name that decides it."""
        assert name in OPTIONS, name
        self.options[name], self.comments[name], self._sources[name] = value, comment, source

    def leave(self, name: str, reason: str) -> None:
        """Lists the foreign `name` as not taken."""
        value = f" ({_text(self.given[name])})" if name in self.given else ""
        self.not_taken.setdefault(reason, []).append(f"{name}{value}")

    def take(self, sections: Sequence[str]) -> None:
        """Sets the options that follow from a single foreign name by the table of `config.foreign_names`.

        Lists as not taken the names that have no option here, and those of which only a run decides the value. Whether
        the other given names have been taken is decided by `finish`, because it depends on the options that further
        names set.

        Raises:
            ValueError: if only a run decides the value of a name in defaults.yaml, or of one that may change what is
                learned; if the value of a name in defaults.yaml has no counterpart.
        """
        for name, value in list(self.values.items()):
            self.values[name] = value = self._referenced(name, value)
            entry, is_default = find_foreign_name(name, sections), name in defaults(self.section)
            is_own = entry is None and name in OPTIONS
            may_matter = is_default or is_learned(entry) or (is_own and name not in defaults("names")["not learned"])
            # Only verl's names have dots, and only its values may come from a shell script; text may have a $ in it.
            is_unread = re.search(r"[$`]" if "." in name else r"^\S*\$[A-Za-z_{(]\S*$", str(value))
            if is_unread and may_matter:
                raise ValueError(f"{name} is {value!r}: only a run decides it; give another after the file")
            elif is_unread and (is_own or (entry is not None and entry.ours)):
                self.leave(name, "only a run decides it; give its value after the file")
                del self.values[name]
            elif is_own:
                self.set(name, value, "" if name in self.given else defaults("comments").get(name, ""))
            elif entry is None:
                self.leave(name, "there is no option of this name")
            elif isinstance(options_of_value := entry.values.get(value_key(value)), Mapping):
                for option, our_value in options_of_value.items():
                    self.set(option, our_value, f"{name}: {value}", name)
            elif is_default and entry.values and not entry.same:
                raise ValueError(f"{name} is {value!r}: {entry.advice(value)}; give another after the file")
            elif entry.same or not entry.is_neutral(value):
                if entry.same:
                    self.set(entry.ours[0], value, source=name)
                if name in self.given:
                    self._undecided.append((entry, name))

    def _referenced(self, name: str, value: Any, depth: int = 0) -> Any:
        """`value`, in which OmegaConf's ${other.name} and ${.sibling} are replaced by the values of these names."""

        def value_of(found: re.Match[str]) -> Any:
            # Each dot in front takes one part off the path of `name`.
            path = ".".join([*(name.split(".")[: -len(found[1])] if found[1] else ()), found[2]])
            return self._referenced(path, self.values[path], depth + 1) if path in self.values else found[0]

        if not isinstance(value, str) or depth > 9:
            return value
        reference = r"\$\{(?:oc\.select: ?)?(\.*)([\w.]+)(?:,[^{}]*)?\}"
        whole = re.fullmatch(reference, value)
        return value_of(whole) if whole else re.sub(reference, lambda found: str(value_of(found)), value)

    def count(self, name: str) -> int:
        """The value of the foreign `name`, checked to be a whole number of at least 1."""
        value = self.values[name]
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; batch sizes follow from it: give a whole number of at least 1")
        return value

    def finish(self) -> None:
        """Completes the options: drops those without effect, lists the names that set no option as not taken, and fills
        in required options, which may be among the dropped ones.
        """
        for name, value in self.options.items():
            if isinstance(value, str | int) and OPTIONS[name].is_list:
                self.options[name] = [value]
        for cls in TRAINING_ARGUMENTS:
            # An instance without `__init__`, which would refuse the very options that are to be dropped.
            run = object.__new__(cls)
            vars(run).update({name: self.options.get(name, option.default) for name, option in options_of(cls).items()})
            for name, option in options_of(cls).items():
                if not all(need.holds(run, {}) for need in option.needs):
                    self.options.pop(name, None)
        if not self.options.get("kl_coef"):
            self.options.pop("kl_controller", None)
        for entry, name in self._undecided:
            value, ours = self.given[name], entry.ours
            is_taken = [self._sources.get(option) in ("", name) for option in ours]
            # Its option was dropped, or another name has set it to another value.
            if entry.same and not (ours[0] in self.options and (is_taken[0] or self.options[ours[0]] == value)):
                self.leave(name, "without effect, because of other settings")
            # It has set no option, not even one that was dropped. Null and false need none: they switch off what is
            # off here too.
            elif not any(is_taken) and (value not in (None, False) or not ours):
                self.leave(name, entry.advice(value))
        for name, value in _FILL_IN.items():
            if name not in self.options and (name != "reward_funcs" or "reward_model_name_or_path" not in self.options):
                self.set(name, value, "not known from the source")

    def as_yaml(self) -> str:
        """The options as a file for `--config`, with what was not taken in a comment."""
        lines = [f"# Translated from {self.source}.", *(["#", "# Not taken:"] if self.not_taken else ())]
        for reason, names in self.not_taken.items():
            note = f"{', '.join(names)}: {reason}"
            lines += textwrap.wrap(note, 118, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False)
        lines.append("")
        for name in OPTIONS:
            value, option = self.options.get(name), OPTIONS[name]
            # Null only where it is valid and not the default.
            if value is not None or (name in self.options and option.nullable and option.default is not None):
                comment = f"  # {self.comments[name]}" if self.comments.get(name) else ""
                lines.append(f"{name}: {_text(value)}{comment}")
        return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    """`value` as YAML on one line: JSON, which writes only infinity differently."""
    infinite = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(value) if isinstance(value, float) else None
    return infinite or json.dumps(value, ensure_ascii=False, default=str)


def _evaluated(value: Any) -> Any:
    """`value` as the other program reads it. In text, also of lists, 1e-6 is a number, unlike in YAML, and a ~ at the
    beginning and $HOME stand for the home folder.
    """
    if not isinstance(value, str):
        return [*map(_evaluated, value)] if isinstance(value, list) else value
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value):
        return int(number) if (number := float(value)).is_integer() else number
    return re.sub(r"^~(?=/)|\$HOME\b|\$\{(oc\.env:)?HOME\}", str(Path.home()), value)
