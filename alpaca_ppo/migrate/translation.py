"""`Translation`: the options here that do what another trainer's configuration says, and how they are printed."""

import dataclasses
import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.foreign_names import ForeignName, value_key
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

_CLASSES = (ScriptArguments, LoraArguments, PPOConfig)
OPTIONS = {name: option for cls in _CLASSES for name, option in options_of(cls).items()}
"""Every option that a configuration file may have."""

_WIDTH = 118


@dataclasses.dataclass
class Translation:
    """A configuration that has been translated.

    Attributes:
        source: what was translated, in words.
        options: our options and their values.
        comments: for some of them, what they were computed from.
        to_do: what is left for the user to do or to check.
        to_do_in_yaml: the same, where a script that makes its trainer itself keeps what it has.
        variable: what the configuration is called in Python.
        lost: what has no counterpart here, and why.
        lost_together: the same, by the reason.
        pending: foreign names whose value here other code has to compute, with their advice.
        settled: those of which the other code has said all that there is to say.
        unneeded: what is not needed here, by the reason.
    """

    source: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    comments: dict[str, str] = dataclasses.field(default_factory=dict)
    to_do: list[str] = dataclasses.field(default_factory=list)
    to_do_in_yaml: list[str] = dataclasses.field(default_factory=list)
    variable: str = "config"
    lost: list[str] = dataclasses.field(default_factory=list)
    lost_together: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unneeded: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    pending: list[tuple[ForeignName, str, Any]] = dataclasses.field(default_factory=list)
    settled: set[str] = dataclasses.field(default_factory=set)

    def set(self, name: str, value: Any, comment: str = "") -> None:
        """Sets the option `name`; `comment` says what it was computed from."""
        assert name in OPTIONS, name
        self.options[name] = value
        if comment:
            self.comments[name] = comment

    def record(self, entry: ForeignName, name: str, value: Any) -> None:
        """Applies an entry of the table to the foreign `name` with `value`, where the table alone says what it is here:
        one option with the same value, options for this value, or none.
        """
        if entry.same:
            self.set(entry.ours[0], value)
        elif entry.none:
            if not entry.is_neutral(value):
                self.lost_together.setdefault(entry.none, []).append(f"{name} ({_text(value)})")
        elif entry.unneeded:
            self.unneeded.setdefault(entry.unneeded, []).append(name)
        elif entry.values:
            here = entry.values.get(value_key(value))
            if isinstance(here, Mapping):
                for ours, ours_value in here.items():
                    self.set(ours, ours_value, f"{name}: {_text(value)}")
            else:
                self.lost.append(f"{name} ({_text(value)}): {entry.advice(value)}")
        elif not entry.is_neutral(value) and value not in (None, False):
            self.pending.append((entry, name, value))

    def settle(self, *names: str) -> None:
        """Notes that nothing is left to say about the foreign `names`, whether options were set for them or not."""
        self.settled |= set(names)

    def finish(self) -> None:
        """Makes something to do of each foreign name that is not settled and for which no option was set."""
        for entry, name, value in self.pending:
            if name not in self.settled and not set(entry.ours) & set(self.options):
                self.to_do.append(f"{name} ({_text(value)}): {entry.advice(value)}")
        self.pending = []

    def as_yaml(self) -> str:
        """The options as a YAML file for `--config`; everything else that there is to say are its comments."""
        lines = [f"# Translated from {self.source}.", *self._notes([*self.to_do, *self.to_do_in_yaml])]
        for name in self._names(OPTIONS):
            comment = f"  # {self.comments[name]}" if name in self.comments else ""
            lines.append(f"{name}: {_text(self.options[name])}{comment}")
        return "\n".join(lines) + "\n"

    def as_python(self) -> str:
        """The options as a call of `PPOConfig`, for a script that makes its trainer itself."""
        lines = [f"# Translated from {self.source}.", *self._notes(self.to_do), f"{self.variable} = PPOConfig("]
        for name in self._names(options_of(PPOConfig)):
            comment = f"  # {self.comments[name]}" if name in self.comments else ""
            lines.append(f"    {name}={self.options[name]!r},{comment}")
        return "\n".join([*lines, ")"]) + "\n"

    def _names(self, known: Collection[str]) -> list[str]:
        """The names in `known` to print, in its order: all but those that are null by default anyway."""
        return [name for name in known if name in self.options and self.options[name] is not None]

    def _notes(self, to_do: Sequence[str]) -> list[str]:
        unneeded = [f"{', '.join(names)}: {reason}" for reason, names in self.unneeded.items()]
        lines = []
        lost = [f"{', '.join(names)}: {reason}" for reason, names in self.lost_together.items()]
        sections = (("To do", to_do), ("Has no counterpart", [*lost, *self.lost]), ("Not needed", unneeded))
        for title, notes in sections:
            lines += ["#", f"# {title}:"] if notes else []
            for note in dict.fromkeys(notes):
                lines += textwrap.wrap(
                    note, _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False
                )
        return [*lines, ""]


def _text(value: Any) -> str:
    """`value` in YAML, on one line. JSON is YAML, except for the forms of numbers."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.replace("Infinity", ".inf")
