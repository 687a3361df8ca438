"""Fields of a configuration: a dataclass field carries its help text, its bounds, and when it acts.

Types, choices and bounds are checked by pydantic. What one option needs of others is declared with it (`needs`);
combinations that no single option decides are in `checks`.
"""

import dataclasses
import datetime
import functools
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from alpaca_ppo.registry import Registry

_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel, _SHORTENED.maxlist, _SHORTENED.maxdict = 3, 20, 20
_SHORTENED.maxstring = _SHORTENED.maxother = _SHORTENED.maxlong = 400
_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@dataclasses.dataclass(frozen=True)
class Need:
    """What an option needs to act: that `option` has one of `values` or, without any, that it is set; `but` turns it
    around. With `registry`, the values are its
    names with one of `traits`. An `option` that is no field is a fact of
    the run, such as "environments or tools".
    """

    option: str
    values: tuple[Any, ...] = ()
    but: bool = False
    registry: Registry[Any] | None = None
    traits: tuple[str, ...] = ()

    def holds(self, args: Any, facts: Mapping[str, bool]) -> bool:
        """Whether `args` have it; a fact that is not known yet may hold."""
        if self.option not in options_of(args.__class__):
            return facts.get(self.option, True)
        value = getattr(args, self.option)
        values = self._names() if self.registry else self.values
        known = options_of(args.__class__)[self.option].registry
        # Whether a user's own name reads an option cannot be known here, unless its traits say so.
        if known is not None and self.registry is None and value not in known.built_in:
            return True
        return (value in values if values else value not in (None, False, 0, "", [])) != self.but

    def __str__(self) -> str:
        """In words, such as "kl_controller: proportional or horizon"."""
        words = " or ".join(_as_yaml(name) for name in (self._names() if self.registry else self.values))
        if not words:
            return f"no {self.option}" if self.but else self.option
        return f"{self.option}: {'not ' * self.but}{words}"

    def _names(self) -> tuple[str, ...]:
        assert self.registry is not None
        return tuple(n for n in self.registry.names if any(self.registry.trait(n, trait) for trait in self.traits))


def when(option: str, *values: Any) -> Need:
    """The need that `option` is set, or has one of `values`."""
    return Need(option, values)


def unless(option: str, *values: Any) -> Need:
    """The need that `option` is not set, or has none of `values`."""
    return Need(option, values, but=True)


def when_trait(registry: Registry[Any], *traits: str) -> Need:
    """The need that the name of `registry` which the configuration chooses has one of `traits`."""
    return Need(registry.field, registry=registry, traits=traits)


@dataclasses.dataclass(frozen=True)
class Option:
    """What the parser, the checks and the documentation know of one field.

    Attributes:
        kinds: the types that the field accepts besides None.
        nullable: whether None is accepted.
        default: the default value, or `dataclasses.MISSING`.
        group: the heading under which `--help` and the documentation list the field.
        bounds: of a number, or of each number in a list, by pydantic's words (gt, ge, lt, le).
        registry: the names that a `str` field may take, built in or registered by a user.
        needs: what must hold for the field to act.
    """

    name: str
    hint: Any
    kinds: tuple[Any, ...]
    nullable: bool
    default: Any
    help: str
    group: str
    bounds: Mapping[str, float]
    allow_inf: bool
    registry: Registry[Any] | None
    needs: tuple[Need, ...]

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

    @property
    def range(self) -> str:
        """The bounds in words, such as "at least 0 and below 1"; empty without."""
        return " and ".join(f"{word} {self.bounds[key]:g}" for key, word in _WORDS.items() if key in self.bounds)

    @functools.cached_property
    def _validator(self) -> TypeAdapter[Any]:
        return TypeAdapter(self._bounded(self.hint))

    def _bounded(self, hint: Any) -> Any:
        if hint is float:
            limits: dict[str, Any] = {**self.bounds, "allow_inf_nan": self.allow_inf}
            return Annotated[float, Field(**limits)]
        if hint is int:
            # No tensor could hold more than 64 bits.
            limits = {"ge": -(2**63), "le": 2**63 - 1} | dict(self.bounds)
            return Annotated[int, Field(**limits)]
        if hint is str:
            return Annotated[str, AfterValidator(_check_text)]
        if typing.get_origin(hint) is list:
            return list[self._bounded(typing.get_args(hint)[0])]  # type: ignore[misc]
        if (members := _members(hint)) != (hint,):
            return typing.Union[tuple(map(self._bounded, members))]  # noqa: UP007
        return hint

    def check(self, value: Any) -> None:
        """Checks one value of the field.

        Raises:
            ValueError: naming the field, the value and what it may be.
        """
        try:
            self._validator.validate_python(value, strict=True)
        except ValidationError as error:
            found = [
                each["msg"] for each in error.errors(include_url=False, include_context=False, include_input=False)
            ]
            wanted = " or ".join(dict.fromkeys(text.rpartition("Input should ")[2] for text in found))
            quotes = ", in quotes" if str in self.kinds and isinstance(value, int | float | datetime.date) else ""
            given = "null" if value is None else shown(value)
            raise ValueError(f"{self.name} is {given}; it should {wanted}{quotes}") from None
        # Infinity is a limit; NaN is none.
        if value != value:
            raise ValueError(f"{self.name} is {value}; it should be a number")
        if self.registry is not None:
            self.registry.check(value, field=self.name)


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
    needs: Need | Sequence[Need] = (),
) -> Any:
    """A dataclass field for `check_fields` and `parse_args`. None is valid wherever the field's type allows it.

    Args:
        default: the default value; a list is copied for each instance.
        help: one or two sentences for `--help` and the documentation.
        above, at_least, below, at_most: bounds of a number, or of each number in a list.
        allow_inf: accept infinity, which is refused otherwise, as NaN always is.
        registry: the valid names of a choice that users may extend. A closed set of choices is a `Literal` type.
        group: starts a new group of options with this field; the fields after it belong to the same group.
        needs: what must hold for the field to act; see `check_needs`.
    """
    bounds = {"gt": above, "ge": at_least, "lt": below, "le": at_most}
    metadata = {
        "help": help,
        "bounds": {key: bound for key, bound in bounds.items() if bound is not None},
        "allow_inf": allow_inf,
        "registry": registry,
        "needs": (needs,) if isinstance(needs, Need) else tuple(needs),
        **({} if group is None else {"group": group}),
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options_of(cls: Any) -> Mapping[str, Option]:
    """Every field of the dataclass `cls` that its constructor takes, by name and in order.

    A dataclass without groups is one group of its own name.
    """
    hints, group, options = typing.get_type_hints(cls), cls.__name__, {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        group = field.metadata.get("group", group)
        members = _members(hints[field.name])
        options[field.name] = Option(
            name=field.name,
            hint=hints[field.name],
            kinds=tuple(kind for kind in members if kind is not type(None)),
            nullable=type(None) in members,
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            help=field.metadata.get("help", ""),
            group=group,
            bounds=field.metadata.get("bounds", {}),
            allow_inf=field.metadata.get("allow_inf", False),
            registry=field.metadata.get("registry"),
            needs=field.metadata.get("needs", ()),
        )
    return options


def check_fields(arguments: Any) -> None:
    """Checks each field of the dataclass instance `arguments` against its type, its choices and its bounds.

    Raises:
        ValueError: naming the field, the value and what it may be.
    """
    for name, option in options_of(arguments.__class__).items():
        option.check(getattr(arguments, name))


def check_needs(arguments: Any, **facts: bool) -> None:
    """Checks that each field of `arguments` which differs from its default can act.

    Args:
        arguments: a dataclass instance.
        facts: what is known of the run beside its options, by the names in `needs` with _ for blanks.

    Raises:
        ValueError: naming the fields, their values and what they need.
    """
    known = {name.replace("_", " "): fact for name, fact in facts.items()}
    idle: dict[str, list[str]] = {}
    for name, option in options_of(arguments.__class__).items():
        value = getattr(arguments, name)
        # What is off does nothing in any case.
        if option.needs and value != option.default and value is not None and value is not False:
            unmet = [str(need) for need in option.needs if not need.holds(arguments, known)]
            if unmet:
                idle.setdefault(unmet[0], []).append(f"{name} is {shown(value)}")
    if idle:
        said = [f"{' and '.join(options)}, without effect: needs {need}" for need, options in idle.items()]
        raise ValueError(f"{'; '.join(said)}. Set what is needed, or leave the option out")


def shown(value: Any) -> str:
    """`repr(value)` for an error message: as it is if it is short, and cut if it is long, nested or cyclic."""
    try:
        return _SHORTENED.repr(value)
    # Python refuses to write an integer of more than 4300 digits.
    except ValueError:
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def _check_text(text: str) -> str:
    if bad := next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), ""):
        raise ValueError(f"Input should be text without the character {bad!r}")
    return text


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that `hint` allows: those of a union, or the hint itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
