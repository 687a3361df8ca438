"""The names that TRL's and verl's trainers give their options, and what does the same here: for error messages, and for
`alpaca_ppo.migrate`, which translates whole configurations.

The table is foreign_names.yaml. It is read when a name is looked up for the first time.
"""

import dataclasses
import functools
import inspect
import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from alpaca_ppo.config.names import did_you_mean
from alpaca_ppo.config.run_file import OPTIONS_OF_ARGUMENT

CONFIG_SECTIONS = ("GRPOConfig", "PPOConfig", "TrainingArguments", "ModelConfig", "ppo_trainer.yaml")
"""The sections of the table whose names may be taken for options of a configuration."""

TRAINER_SECTIONS = ("GRPOTrainer", "PPOTrainer")
"""The sections whose names may be taken for arguments of a trainer's constructor."""

_HINT = "`alpaca-ppo migrate FILE` translates a TRL script, or a YAML file or command line of verl, as a whole"


@dataclasses.dataclass(frozen=True)
class ForeignName:
    """A name that an option has elsewhere.

    Attributes:
        name: the name, for verl with dots; one that ends in .* stands for all keys below it.
        section: the class or file that it belongs to.
        of: the project of that class.
        ours: the options here that do the same; empty if there are none.
        same: whether the first of `ours` has the same values and the same meaning, except for those in `values`.
        how: which values these options get, with {value} for the foreign one.
        values: what each foreign value is here: options with values, or why there are none.
        none: why there is no such option, and what to do instead.
        unneeded: why a run does not need it.
        neutral: foreign values with which nothing is lost without the option.
        unit: how the meaning differs, for a name that is an option here too.
    """

    name: str
    section: str
    of: str
    ours: tuple[str, ...] = ()
    same: bool = False
    how: str = ""
    values: Mapping[str, Mapping[str, Any] | str] = dataclasses.field(default_factory=dict)
    none: str = ""
    unneeded: str = ""
    neutral: Sequence[Any] = ()
    unit: str = ""

    def is_neutral(self, value: Any) -> bool:
        """Whether nothing is lost when this name with `value` is left out."""
        alike = [neutral for neutral in self.neutral if neutral == value]
        return any(isinstance(neutral, bool) == isinstance(value, bool) for neutral in alike)

    def advice(self, value: Any) -> str:
        """What to write here instead of this name with `value`, in words."""
        if self.same and not self.how:
            return f"{self.ours[0]}: {_shown(value)}"
        if self.is_neutral(value):
            return f"leave it out: {_shown(value)} is what happens here"
        if self.none:
            return f"no counterpart: {self.none}"
        if self.unneeded:
            return f"not needed: {self.unneeded}"
        here = self.values.get(value_key(value))
        if here is None and (self.same or not self.values):
            return self.how.replace("{value}", _shown(value))
        if isinstance(here, str):
            return f"no counterpart: {here}"
        if here is None:
            known = [key for key, options in self.values.items() if isinstance(options, Mapping)]
            return f"{self.how}, for {', '.join(known)}"
        options = " with ".join(f"{name}: {_shown(option)}" for name, option in here.items())
        return options or "not needed: it is what happens here"


def value_key(value: Any) -> str:
    """`value` as the keys of `ForeignName.values` are spelled."""
    return "null" if value is None else str(value).lower()


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return table


@functools.cache
def foreign_names(section: str) -> Mapping[str, ForeignName]:
    """The names of one section of the table."""
    table = _table()[section]
    found = {name: ForeignName(name, section, table["of"], (ours,), same=True) for name, ours in table["same"].items()}
    for row in table["rows"]:
        names, ours = row["names"], row.get("ours", ())
        more = {key: value for key, value in row.items() if key not in ("names", "ours")}
        more["ours"] = (ours,) if isinstance(ours, str) else tuple(ours)
        for name in [names] if isinstance(names, str) else names:
            found[name] = ForeignName(name, section, table["of"], **more)
    return found


def find_foreign_name(name: str, sections: Collection[str]) -> ForeignName | None:
    """The entry of `name` in the first of `sections` that has it, or None.

    A key of verl is found by its whole path, by a part of the path that is listed with all that is below it, and by the
    last part of its path alone.
    """
    for section in sections:
        if (entry := foreign_names(section).get(name)) is not None:
            return entry
    names = foreign_names("ppo_trainer.yaml") if "ppo_trainer.yaml" in sections else {}
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (entry := names.get(".".join(parts[:length]) + ".*")) is not None:
            return entry
    return next((entry for key, entry in names.items() if key.endswith(f".{name}")), None)


def explain_names(given: Mapping[str, Any], valid: Collection[str], sections: Collection[str]) -> str:
    """One line for each name in `given` that is not in `valid`: what it is here, or which name may have been meant.

    Names that are in `valid` but have another meaning elsewhere follow, if one of the others comes from there, and the
    estimator that is meant by all options of GRPO.

    Args:
        given: names and their values.
        valid: the names that there are.
        sections: sections of the table in which names are looked up.
    """
    lines, foreign, of_grpo = [], set(), False
    for name, value in given.items():
        if name in valid:
            continue
        entry = find_foreign_name(name, sections)
        if entry is not None:
            foreign.add(entry.of)
            of_grpo = of_grpo or entry.section == "GRPOConfig"
            missing = set(entry.ours) - set(valid)
            script = [f"PPOTrainer({name}=...)" for name, ours in OPTIONS_OF_ARGUMENT.items() if missing & set(ours)]
            in_python = f" (in a script: {', '.join(script)})" if script else ""
            listed = "" if entry.name == name or entry.name.endswith(".*") else f"'s {entry.name}"
            lines.append(f"  {name} ({entry.of}{listed}): {entry.advice(value)}{in_python}")
        else:
            lines.append(f"  {name}:{did_you_mean(name, valid, likeness=0.6) or ' there is no such name'}")
    for name in given if foreign else ():
        entry = find_foreign_name(name, sections) if name in valid else None
        if entry is not None and entry.unit and (entry.of in foreign or entry.of == "transformers"):
            lines.append(f"  {name} is an option here too, but {entry.unit}")
    if "adv_estimator" in valid and not {"adv_estimator", "scale_rewards"} & set(given) and of_grpo:
        lines.append("  adv_estimator: grpo is TRL's GRPOTrainer; without it this is PPO with a critic (gae)")
    return "\n".join([*lines, *([_HINT] if foreign else [])])


def flattened(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by their path with dots; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves |= flattened(value, f"{path}.")
        else:
            leaves[path] = value
    return leaves


def _shown(value: Any) -> str:
    """`value` as YAML would have it, on one line."""
    return textwrap.shorten(value if isinstance(value, str) else json.dumps(value, default=repr), 200)


class _SignatureOfInit:
    """The signature of a class: that of its `__init__`, which `inspect` would take from `__new__` otherwise."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class ExplainsUnknownNames:
    """Base of a class whose constructor explains the keyword arguments that it does not have.

    The check comes before `__init__`, which a dataclass generates anew for each subclass. A subclass whose `__init__`
    takes arbitrary keywords is not checked.

    Raises:
        ValueError: for unknown keyword arguments: one line for each, with its equivalent, the reason why there is none,
            or the name that may have been meant; and the required arguments that are missing beside them.
    """

    __signature__ = _SignatureOfInit()
    foreign_sections: ClassVar[tuple[str, ...]] = CONFIG_SECTIONS
    """The sections of foreign_names.yaml in which unknown names are looked up."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        parameters = list(inspect.signature(cls).parameters.values())
        valid = [parameter.name for parameter in parameters]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if unknown := [name for name in kwargs if name not in valid and not takes_any]:
            missing = [p.name for p in parameters[len(args) :] if p.default is p.empty and p.name not in kwargs]
            raise ValueError(
                f"{cls.__name__} does not take {', '.join(unknown)} (help({cls.__name__}) has its names):\n"
                + explain_names(kwargs, valid, cls.foreign_sections)
                + (f"\nThe arguments {', '.join(missing)} are missing." if missing else "")
            )
        return super().__new__(cls)
