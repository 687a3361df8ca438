"""The names that TRL and verl give their options, and what does the same here: for error messages, and for
`alpaca_ppo.migrate`; and the arguments of transformers that an option may not pass on. The table is foreign_names.yaml,
which describes its own format.
"""

import dataclasses
import functools
import inspect
import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.config.names import did_you_mean
from alpaca_ppo.config.run_file import OPTIONS_OF_ARGUMENT

CONFIG_SECTIONS = ("GRPOConfig", "PPOConfig", "TrainingArguments", "ModelConfig", "ppo_trainer.yaml")

TRAINER_SECTIONS = ("GRPOTrainer", "PPOTrainer")

_HINT = "`alpaca-ppo migrate FILE` translates a TRL script, or a YAML file or command line of verl, as a whole"


@dataclasses.dataclass(frozen=True)
class ForeignName:
    """An entry of the table: a name that another project gives an option.

    Attributes:
        section: the class or file that it belongs to, of the project `of`, such as GRPOConfig of TRL.
        ours: the options here that do the same; empty if there are none.
        same: whether the first of `ours` has the same values and the same meaning, except for those in `values`.
        how: what to write instead, such as "rollout_batch_size: {value} / num_generations".
        values: for single values, the options with their values, such as {"sequence": {"policy_loss": "gspo"}}, or why
            there is no counterpart.
        none: why no option does the same, and what to do instead; empty if there is one.
        unneeded: why no option is needed; empty if one is.
        neutral: their values that ask for what happens here anyway.
        unit: of a name that is also an option here, how its meaning differs.
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
        """Whether `value` is one of `neutral`, where 1 is not True and 0 is not False."""
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.neutral)

    def advice(self, value: Any) -> str:
        """What to write here instead of this name with `value`, or why there is nothing to write."""
        if self.same and not self.how:
            return f"{self.ours[0]}: {_shown(value)}"
        if self.is_neutral(value):
            return f"leave it out: {_shown(value)} is what happens here"
        if self.none:
            return f"no counterpart: {self.none}"
        if self.unneeded:
            return f"not needed: {self.unneeded}"
        listed = self.values.get(value_key(value))
        if isinstance(listed, str):
            return f"no counterpart: {listed}"
        if listed is not None:
            options = " with ".join(f"{name}: {_shown(option)}" for name, option in listed.items())
            return options or "not needed: it is what happens here"
        if self.values and not self.same:
            known = [key for key, entry in self.values.items() if isinstance(entry, Mapping)]
            return f"{self.how}, for {', '.join(known)}"
        return self.how.replace("{value}", _shown(value))


def value_key(value: Any) -> str:
    return "null" if value is None else str(value).lower()


@functools.cache
def _table() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


@functools.cache
def foreign_names(section: str) -> Mapping[str, ForeignName]:
    """The entries of a section of the table, by name."""
    table = _table()[section]
    project = table["of"]
    entries = {name: ForeignName(name, section, project, (ours,), same=True) for name, ours in table["same"].items()}
    for row in table["rows"]:
        fields = dict(row)
        names, ours = fields.pop("names"), fields.pop("ours", ())
        fields["ours"] = (ours,) if isinstance(ours, str) else tuple(ours)
        for name in [names] if isinstance(names, str) else names:
            entries[name] = ForeignName(name, section, project, **fields)
    return entries


def find_foreign_name(name: str, sections: Collection[str]) -> ForeignName | None:
    """The entry of `name` in the first of `sections` that has it, or None.

    A key of verl may also be listed as part of a whole section (`a.b.*`), or be given by the last part of its path.
    """
    for section in sections:
        if (entry := foreign_names(section).get(name)) is not None:
            return entry
    if "ppo_trainer.yaml" not in sections:
        return None
    verl_names = foreign_names("ppo_trainer.yaml")
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (entry := verl_names.get(".".join(parts[:length]) + ".*")) is not None:
            return entry
    return next((entry for path, entry in verl_names.items() if path.endswith(f".{name}")), None)


def explain_names(given: Mapping[str, Any], valid: Collection[str], sections: Collection[str]) -> str:
    """One line for each name in `given` that is not in `valid`: what does the same here, or which name may be meant.

    If some of these names are another project's, further lines warn about names in `valid` that have another meaning
    there, and about the estimator that options of GRPO imply.
    """
    lines: list[str] = []
    unknown: list[ForeignName] = []
    for name, value in given.items():
        if name in valid:
            continue
        entry = find_foreign_name(name, sections)
        if entry is None:
            parts = (f" did you mean {known}?" for known in valid if name in known.split("_"))
            hint = did_you_mean(name, valid, likeness=0.6) or next(parts, " there is no such name")
            lines.append(f"  {name}:{hint}")
            continue
        unknown.append(entry)
        full_name = "" if entry.name == name or entry.name.endswith(".*") else f"'s {entry.name}"
        lines.append(f"  {name} ({entry.of}{full_name}): {entry.advice(value)}{_in_script(entry, valid)}")
    if not unknown:
        return "\n".join(lines)
    projects = {"transformers", *(entry.of for entry in unknown)}
    for name in given:
        entry = find_foreign_name(name, sections) if name in valid else None
        if entry is not None and entry.unit and entry.of in projects:
            lines.append(f"  {name} is an option here too, but {entry.unit}")
    # scale_rewards chooses one of GRPO's estimators.
    names_estimator = "adv_estimator" in given or "scale_rewards" in given
    if "adv_estimator" in valid and not names_estimator and any(entry.section == "GRPOConfig" for entry in unknown):
        lines.append("  adv_estimator: grpo is TRL's GRPOTrainer; without it this is PPO with a critic (gae)")
    return "\n".join([*lines, _HINT])


def _in_script(entry: ForeignName, valid: Collection[str]) -> str:
    """The arguments of `PPOTrainer` that stand for options which are not in `valid`, in parentheses."""
    missing = set(entry.ours) - set(valid)
    names = [name for name, options in OPTIONS_OF_ARGUMENT.items() if missing & set(options)]
    return f" (in a script: {', '.join(f'PPOTrainer({name}=...)' for name in names)})" if names else ""


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
    return textwrap.shorten(value if isinstance(value, str) else json.dumps(value, default=repr), 200)


def check_argument_names(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], sections: Collection[str]) -> None:
    """Checks that the constructor of `cls` takes the keyword arguments in `kwargs`; one with `**kwargs` takes all.

    Call it from `__new__`, because a dataclass generates `__init__` for each subclass.

    Raises:
        ValueError: explains all unknown arguments (`explain_names`), and names required ones that are missing.
    """
    # Those of `__init__`, which the subclass defines, not of the inherited `__new__`.
    parameters = list(inspect.signature(cls).parameters.values())
    names = [parameter.name for parameter in parameters]
    unknown = [name for name in kwargs if name not in names]
    if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    missing = [p.name for p in parameters[len(args) :] if p.default is p.empty and p.name not in kwargs]
    problem = f"{cls.__name__} does not take {', '.join(unknown)} (help({cls.__name__}) has its names)"
    lacking = f"\nThe arguments {', '.join(missing)} are missing." if missing else ""
    raise ValueError(f"{problem}:\n{explain_names(kwargs, names, sections)}{lacking}")


def check_keywords(field: str, given: Mapping[str, Any] | None) -> None:
    """Raises a `ValueError` if `given`, the value of the option `field`, has an argument that it may not pass on."""
    if not given:
        return
    for remedy, names in _table()["refused"][field].items():
        if refused := set(names) & set(given):
            # The value is not shown, because it may be a token.
            raise ValueError(f"{field} has {min(refused)!r}; {remedy}")
