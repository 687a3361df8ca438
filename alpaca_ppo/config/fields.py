"""Fields of a configuration: a dataclass field carries its help text, its group and the bounds against which its value
is checked.


The range of a single value is declared with its field; forbidden combinations are in `checks`.
"""

import dataclasses
import datetime
import math
import reprlib
import types
import typing
from typing import Any

from alpaca_ppo.registry import Registry

_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel, _SHORTENED.maxlist, _SHORTENED.maxdict = 3, 20, 20
_SHORTENED.maxstring = _SHORTENED.maxother = _SHORTENED.maxlong = 400


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The range of a number. NaN is never inside, and infinity only with `allow_inf`. Neither is an integer that 64
    bits cannot hold, because no tensor could.
    """

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    allow_inf: bool = False

    def __str__(self) -> str:
        """The range in words, such as "at least 0 and below 1"; empty without bounds."""
        words = ("above", "at least", "below", "at most")
        limits = (self.above, self.at_least, self.below, self.at_most)
        return " and ".join(f"{word} {limit:g}" for word, limit in zip(words, limits, strict=True) if limit is not None)

    def contain(self, value: float) -> bool:
        """Whether `value` is in the range."""
        return (
            (_is_finite(value) or (self.allow_inf and value in (math.inf, -math.inf)))
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )


@dataclasses.dataclass(frozen=True)
class Option:
    """What the parser, the checks and the documentation know of one field.

    Attributes:
        kinds: the types that the field accepts besides None.
        nullable: whether None is accepted.
        default: the default value, or `dataclasses.MISSING`.
        group: the heading under which `--help` and the documentation list the field.
        registry: the names that a `str` field may take, built in or registered by a user.
        flag_alone: the value of its flag where none follows it; None if one must.
    """

    name: str
    kinds: tuple[Any, ...]
    nullable: bool
    default: Any
    help: str
    group: str
    bounds: Bounds
    registry: Registry[Any] | None
    flag_alone: str | None = None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a `Literal`; empty for other types."""
        literals = [kind for kind in self.kinds if typing.get_origin(kind) is typing.Literal]
        return tuple(choice for literal in literals for choice in typing.get_args(literal))

    @property
    def entry_kinds(self) -> tuple[Any, ...] | None:
        """The types of a list's entries; None if the field is not a list."""
        lists = [typing.get_args(kind)[0] for kind in self.kinds if typing.get_origin(kind) is list]
        return _members(lists[0]) if lists else None


def argument(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    allow_inf: bool = False,
    registry: Registry[Any] | None = None,
    group: str | None = None,
    flag_alone: str | None = None,
) -> Any:
    """A dataclass field for `check_fields` and `parse_args`. None is valid wherever the field's type allows it.

    Args:
        default: the default value; a list is copied for each instance.
        help: one or two sentences for `--help` and the documentation.
        above, at_least, below, at_most: bounds of a number, or of each number in a list.
        allow_inf: accept infinity, which is refused otherwise, as NaN always is.
        registry: the valid names of a choice that users may extend. A closed set of choices is a `Literal` type.
        group: starts a new group of options with this field; the fields after it belong to the same group.
        flag_alone: of a text, the value of its flag where none follows it.
    """
    metadata: dict[str, Any] = {"help": help, "bounds": Bounds(above, at_least, below, at_most, allow_inf)}
    metadata["flag_alone"] = flag_alone
    if registry is not None:
        metadata["registry"] = registry
    if group is not None:
        metadata["group"] = group
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(cls: type) -> dict[str, Option]:
    """Every field of the dataclass `cls` that its constructor takes, by name and in order.

    A dataclass without groups is one group of its own name.
    """
    hints, group, options = typing.get_type_hints(cls), cls.__name__, {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        group = field.metadata.get("group", group)
        members = _members(hints[field.name])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        options[field.name] = Option(
            name=field.name,
            kinds=tuple(kind for kind in members if kind is not type(None)),
            nullable=type(None) in members,
            default=default,
            help=field.metadata.get("help", ""),
            group=group,
            bounds=field.metadata.get("bounds", Bounds()),
            registry=field.metadata.get("registry"),
            flag_alone=field.metadata.get("flag_alone"),
        )
    return options


def check_fields(arguments: Any) -> None:
    """Checks each field of the dataclass instance `arguments` against its type, its choices and its bounds.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """
    for name, option in options_of(type(arguments)).items():
        check_value(option, getattr(arguments, name))


def check_value(option: Option, value: Any) -> None:
    """Checks one value of the field `option`.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """
    if value is None:
        check_null(option)
        return
    if option.choices:
        if not isinstance(value, str | int) or value not in option.choices:
            names = ", ".join(str(c).lower() if isinstance(c, bool) else str(c) for c in option.choices)
            raise ValueError(f"{option.name} is {shown(value)}; choose one of {names}")
        return
    _check_type(option.name, value, option.kinds, nullable=option.nullable)
    entries = value if isinstance(value, list) else []
    for entry in entries:
        _check_type(f"an entry of {option.name}", entry, option.entry_kinds or ())
    for single in entries or [value]:
        if isinstance(single, int | float) and not option.bounds.contain(single):
            finite = "" if _is_finite(single) else "within 64 bits" if isinstance(single, int) else "finite"
            wanted = " and ".join(filter(None, [finite, str(option.bounds)]))
            null = " or null" if option.nullable else ""
            raise ValueError(f"{option.name} is {shown(value)}; it must be {wanted}{null}")
        if isinstance(single, str) and (bad := next((c for c in single if c == "\0" or "\ud800" <= c <= "\udfff"), "")):
            raise ValueError(
                f"{option.name} is {shown(value)}, which is not text: it holds the character {bad!r}; remove it"
            )
    if option.registry is not None:
        option.registry.check(value, field=option.name)


def check_null(option: Option, where: str = "") -> None:
    """Checks that `option` may be None, or has that as its default.

    Args:
        option: the field.
        where: where it was given, such as " in the --config file x.yaml".

    Raises:
        ValueError: naming the field, what it may be, and its default.
    """
    if option.nullable or option.default is None:
        return
    names = [str(c).lower() if isinstance(c, bool) else str(c) for c in option.choices]
    wanted = f"one of {', '.join(names)}" if names else " or ".join(_kind_names(option.kinds))
    default = "" if option.default in ("", dataclasses.MISSING) else f", or leave it out for {shown(option.default)}"
    raise ValueError(f"{option.name} is null{where}; it must be {wanted}{default}")


def shown(value: Any) -> str:
    """`repr(value)` for an error message: as it is if it is short, and cut if it is long, nested or cyclic."""
    try:
        return _SHORTENED.repr(value)
    # Python refuses to write an integer of more than 4300 digits.
    except ValueError:
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def _is_finite(value: float) -> bool:
    return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)


def _check_type(what: str, value: Any, kinds: tuple[Any, ...], *, nullable: bool = False) -> None:
    accepted = tuple(typing.get_origin(kind) or kind for kind in kinds)
    wanted = " or ".join([*_kind_names(kinds), *(["null"] if nullable else [])])
    if float in accepted:
        accepted += (int,)
    # bool is a subclass of int, but `rollout_batch_size: true` is a mistake.
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        remedy = ", in quotes" if str in accepted and isinstance(value, int | float | datetime.date) else ""
        raise ValueError(f"{what} is {shown(value)} ({type(value).__name__}); it must be {wanted}{remedy}")


def _kind_names(kinds: tuple[Any, ...]) -> list[str]:
    return [(typing.get_origin(kind) or kind).__name__ for kind in kinds]


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that `hint` allows: those of a union, or the hint itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
