"""How an option is declared and checked: a dataclass field carries its bounds and what it needs to have an effect; the
string below it is its help text.

pydantic checks types, choices and bounds. Combinations of options are checked in `checks`.
"""

import ast
import dataclasses
import datetime
import functools
import inspect
import itertools
import re
import reprlib
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, check_argument_names
from alpaca_ppo.registry import Registry

_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxlevel, _SHORT_REPR.maxlist, _SHORT_REPR.maxdict = 3, 20, 20
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 400
_BOUNDS_IN_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
# Instead of messages of pydantic that do not begin with "Input should", by type.
_EXPECTED = {
    "invalid-json-value": "be a valid JSON value",
    "string_too_short": "be a string of length {min_length} or more",
    "too_long": "have length {max_length} or less",
    "too_short": "have length {min_length} or more",
}


@dataclasses.dataclass(frozen=True)
class Need:
    """A condition for an option to have an effect; `need | need` holds if one of the two holds.

    Attributes:
        option: another option, or a fact of the run such as "environments or tools".
        values: returns the values of which `option` must have one; if it returns none, `option` must be set.
        negated: `option` must have none of the values, or must not be set.
        by_trait: the values are the names with some trait, including those that users register.
    """

    option: str
    values: Callable[[], tuple[Any, ...]]
    negated: bool = False
    by_trait: bool = False
    alternative: "Need | None" = None

    def __or__(self, alternative: "Need") -> "Need":
        return dataclasses.replace(self, alternative=alternative)

    def holds(self, args: Any, facts: Mapping[str, bool]) -> bool:
        """Whether the need is met; a fact missing from `facts` is not known yet, and counts as true."""
        if self.alternative is not None and self.alternative.holds(args, facts):
            return True
        option = options_of(args.__class__).get(self.option)
        if option is None:
            return facts.get(self.option, True)
        value = getattr(args, self.option)
        # A name that a user registered may read any option, unless traits say which names do.
        if option.registry is not None and not self.by_trait and value not in option.registry.built_in:
            return True
        if values := self.values():
            return (value in values) != self.negated
        # If the option takes null, only null switches it off, and 0 is a value like any other.
        is_set = value is not None if option.nullable else value not in (None, False, "", [])
        return is_set != self.negated

    def __str__(self) -> str:
        """Such as "kl_controller: proportional or horizon", for messages and help."""
        words = " or ".join(", ".join(value) if isinstance(value, list) else str(value) for value in self.values())
        if words:
            text = f"{self.option}: {'not ' if self.negated else ''}{words}"
        else:
            text = f"no {self.option}" if self.negated else self.option
        return f"{text} or {self.alternative}" if self.alternative else text


def when(option: str, *values: Any) -> Need:
    """`option` must have one of `values` or, if there are none, be set."""
    return Need(option, lambda: values)


def unless(option: str, *values: Any) -> Need:
    """The opposite of `when`."""
    return Need(option, lambda: values, negated=True)


def when_trait(registry: Registry[Any], *traits: str) -> Need:
    """The option of `registry` must have a name with one of `traits`."""

    def names() -> tuple[str, ...]:
        return tuple(name for name in registry.names if any(registry.trait(name, trait) for trait in traits))

    return Need(registry.field, names, by_trait=True)


@dataclasses.dataclass(frozen=True)
class Option:
    """One field of the dataclass `owner`: what `argument` declares, with its name, type and default (or MISSING)."""

    given_help: str = ""
    group: str = ""
    bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    registry: Registry[Any] | None = None
    needs: tuple[Need, ...] = ()
    name: str = ""
    hint: Any = None
    default: Any = None
    owner: Any = None

    @functools.cached_property
    def help(self) -> str:
        return self.given_help or _strings_below_fields(self.owner).get(self.name, "")

    @property
    def nullable(self) -> bool:
        return type(None) in typing.get_args(self.hint)

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(member) is list for member in (self.hint, *typing.get_args(self.hint)))

    @property
    def range(self) -> str:
        """The bounds in words, such as "at least 0 and below 1"."""
        words = _BOUNDS_IN_WORDS.items()
        return " and ".join(f"{word} {self.bounds[key]:g}" for key, word in words if key in self.bounds)

    @functools.cached_property
    def _validator(self) -> TypeAdapter[Any]:
        bounded: Any = Annotated[self.hint, Field(**self.bounds)] if self.bounds else self.hint
        return TypeAdapter(bounded, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))

    def accepts(self, value: Any) -> bool:
        """Whether `value` has the option's type."""
        try:
            self._validator.validate_python(value)
        except ValidationError:
            return False
        return True

    def check(self, value: Any) -> None:
        """Raises a `ValueError` if the field cannot have `value`, with the field, the value and what it may be."""
        try:
            self._validator.validate_python(value)
        except ValidationError as error:
            # A union has an error for each of its members.
            wanted: dict[str, None] = {}
            for details in error.errors(include_url=False):
                expected = _EXPECTED.get(details["type"], "").format(**details.get("ctx", {}))
                wanted[expected or details["msg"].removeprefix("Input should ")] = None
            # YAML reads 3 and 2020-01-02 as a number and a date.
            quotes = ", in quotes" if isinstance(value, int | float | datetime.date) and self.accepts("") else ""
            given = "null" if value is None else shown(value)
            raise ValueError(f"{self.name} is {given}; it should {' or '.join(wanted)}{quotes}") from None
        entries = value if isinstance(value, list) else [value]
        if bad := _UNWRITABLE.search("".join(entry for entry in entries if isinstance(entry, str))):
            raise ValueError(f"{self.name} is {shown(value)}; it should be text without the character {bad[0]!r}")
        if self.registry is not None:
            self.registry.check(value, field=self.name)


def argument(
    default: Any,
    help: str = "",
    *,
    registry: Registry[Any] | None = None,
    group: str = "",
    needs: Need | Sequence[Need] = (),
    **bounds: float,
) -> Any:
    """A dataclass field for `check_fields` and `parse_args`.

    Args:
        default: a list is copied for each instance.
        help: one or two sentences; by default the string below the field.
        registry: the valid names, if users may extend them; else the type is a `Literal`.
        group: the heading in `--help` and the documentation, for this field and those after it.
        needs: the conditions for the field to have an effect.
        bounds: arguments of `pydantic.Field`: gt, ge, lt, le, min_length, max_length, allow_inf_nan (default False).
    """
    conditions = (needs,) if isinstance(needs, Need) else tuple(needs)
    option = Option(given_help=help, group=group, bounds=bounds, registry=registry, needs=conditions)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"option": option})
    return dataclasses.field(default=default, metadata={"option": option})


@functools.cache
def options_of(cls: Any) -> Mapping[str, Option]:
    """Every field of the dataclass `cls` that its constructor takes, by name and in order.

    Fields before the first group belong to a group named as the class. Other libraries' dataclasses may have a field's
    help in its metadata.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    group = cls.__name__
    options: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        if field.init:
            declared = field.metadata.get("option") or Option(field.metadata.get("help", ""))
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            group = declared.group or group
            options[field.name] = dataclasses.replace(
                declared, name=field.name, hint=hints[field.name], default=default, group=group, owner=cls
            )
    return options


def check_fields(arguments: Any) -> None:
    """Checks each field of the dataclass instance `arguments` by `Option.check`."""
    for name, option in options_of(arguments.__class__).items():
        option.check(getattr(arguments, name))


def check_needs(arguments: Any, **facts: bool) -> None:
    """Raises a `ValueError` for fields of the dataclass instance `arguments` that are set but have no effect.

    `facts` of the run are named as in `needs`, with _ in place of blanks.
    """
    known_facts = {name.replace("_", " "): fact for name, fact in facts.items()}
    by_need: dict[str, list[str]] = {}
    for name, option in options_of(arguments.__class__).items():
        value = getattr(arguments, name)
        # None and False switch an option off, which needs nothing.
        if value is None or value is False or value == option.default:
            continue
        unmet = [str(need) for need in option.needs if not need.holds(arguments, known_facts)]
        if unmet:
            by_need.setdefault(unmet[0], []).append(f"{name} is {shown(value)}")
    if by_need:
        problems = [f"{' and '.join(options)}, without effect: needs {need}" for need, options in by_need.items()]
        raise ValueError(f"{'; '.join(problems)}. Set what is needed, or leave the option out")


class CheckedArguments:
    """Base of a dataclass of options, which checks their names and values, their needs, and that what is required is
    set.
    """

    required: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of options; one of each group must be set, and the error names its first."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_argument_names(cls, args, kwargs, CONFIG_SECTIONS)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        check_needs(self)
        for names in self.required:
            if not any(getattr(self, name) for name in names):
                raise ValueError(f"{names[0]} is not set; give --{names[0]} or put it in the --config file")


def shown(value: Any) -> str:
    """`repr(value)` for an error message, shortened if it is long, deeply nested or cyclic."""
    try:
        return _SHORT_REPR.repr(value)
    # Python refuses to write an integer of more than 4300 digits.
    except ValueError:
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


@functools.cache
def _strings_below_fields(cls: type) -> dict[str, str]:
    """The string below each field of the dataclass `cls` and its bases; none for a class without a source file."""
    strings: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        assert isinstance(definition, ast.ClassDef)
        for statements in itertools.pairwise(definition.body):
            match statements:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    strings[name] = " ".join(text.split())
    return strings
