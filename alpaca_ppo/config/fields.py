"""Fields of a configuration: a dataclass field carries its bounds and what it needs to act; the text beneath it is its
help.

Types, choices and bounds are checked by pydantic. Combinations that no single option decides are in `checks`.
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
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from alpaca_ppo.registry import Registry

_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel, _SHORTENED.maxlist, _SHORTENED.maxdict = 3, 20, 20
_SHORTENED.maxstring = _SHORTENED.maxother = _SHORTENED.maxlong = 400
_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Need:
    """What an option needs to act: that `option` has one of `values()` or, without any, that it is set.

    `but` turns it around. An `option` that is no field is a fact of the run, such as "environments or tools". With
    `by_trait`, the values are names of a registry, a user's own among them. One of two is enough in `need | need`.
    """

    option: str
    values: Callable[[], tuple[Any, ...]]
    but: bool = False
    by_trait: bool = False
    alternative: "Need | None" = None

    def __or__(self, alternative: "Need") -> "Need":
        return dataclasses.replace(self, alternative=alternative)

    def holds(self, args: Any, facts: Mapping[str, bool]) -> bool:
        """Whether `args` have it; a fact that is not known yet may hold."""
        if self.alternative is not None and self.alternative.holds(args, facts):
            return True
        option = options_of(args.__class__).get(self.option)
        if option is None:
            return facts.get(self.option, True)
        value = getattr(args, self.option)
        # Whether a user's own name reads an option cannot be known here, unless its traits say so.
        if option.registry is not None and not self.by_trait and value not in option.registry.built_in:
            return True
        if values := self.values():
            return (value in values) != self.but
        # 0 is a value like others where null is what switches an option off.
        is_set = value not in (None, False, "", []) or (option.nullable and value is not None)
        return is_set != self.but

    def __str__(self) -> str:
        """In words, such as "kl_controller: proportional or horizon"."""
        words = " or ".join(", ".join(value) if isinstance(value, list) else str(value) for value in self.values())
        text = f"{self.option}: {'not ' * self.but}{words}" if words else f"{'no ' * self.but}{self.option}"
        return f"{text} or {self.alternative}" if self.alternative else text


def when(option: str, *values: Any) -> Need:
    """The need that `option` is set, or has one of `values`."""
    return Need(option, lambda: values)


def unless(option: str, *values: Any) -> Need:
    """The need that `option` is not set, or has none of `values`."""
    return Need(option, lambda: values, but=True)


def when_trait(registry: Registry[Any], *traits: str) -> Need:
    """The need that the name of `registry` which the configuration chooses has one of `traits`."""

    def names() -> tuple[str, ...]:
        return tuple(name for name in registry.names if any(registry.trait(name, trait) for trait in traits))

    return Need(registry.field, names, by_trait=True)


@dataclasses.dataclass(frozen=True)
class Option:
    """What the parser, the checks and the documentation know of one field.

    Attributes:
        given_help: one or two sentences; empty if they stand beneath the field.
        group: the heading under which `--help` and the documentation list the field.
        bounds: what `pydantic.Field` takes, such as gt, ge, lt and le.
        registry: the names that a `str` field may take, built in or registered by a user.
        needs: what must hold for the field to act.
        hint: the type, with the bounds of its parts.
        default: the default value, or `dataclasses.MISSING`.
        owner: the dataclass whose field it is.
    """

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
        """One or two sentences: given with the field, or the text beneath it."""
        return self.given_help or _texts_beneath(self.owner).get(self.name, "")

    @property
    def nullable(self) -> bool:
        """Whether None is accepted."""
        return type(None) in typing.get_args(self.hint)

    @property
    def is_list(self) -> bool:
        """Whether a list is accepted."""
        return any(typing.get_origin(member) is list for member in (self.hint, *typing.get_args(self.hint)))

    @property
    def range(self) -> str:
        """The bounds in words, such as "at least 0 and below 1"; empty without."""
        return " and ".join(f"{word} {self.bounds[key]:g}" for key, word in _WORDS.items() if key in self.bounds)

    @functools.cached_property
    def _validator(self) -> TypeAdapter[Any]:
        bounded: Any = Annotated[self.hint, Field(**self.bounds)] if self.bounds else self.hint
        return TypeAdapter(bounded, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))

    def accepts(self, value: Any) -> bool:
        """Whether `value` has the type and is within the bounds of the field."""
        try:
            self._validator.validate_python(value)
        except ValidationError:
            return False
        return True

    def check(self, value: Any) -> None:
        """Checks one value of the field.

        Raises:
            ValueError: naming the field, the value and what it may be.
        """
        try:
            self._validator.validate_python(value)
        except ValidationError as error:
            found = [each["msg"].replace("input was not", "should be") for each in error.errors(include_url=False)]
            wanted = " or ".join(dict.fromkeys(text.rpartition("should ")[2] for text in found))
            quotes = ", in quotes" if isinstance(value, int | float | datetime.date) and self.accepts("") else ""
            given = "null" if value is None else shown(value)
            raise ValueError(f"{self.name} is {given}; it should {wanted}{quotes}") from None
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if bad := _UNWRITABLE.search("".join(texts)):
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
    """A dataclass field for `check_fields` and `parse_args`. None is valid wherever the field's type allows it.

    Args:
        default: the default value; a list is copied for each instance.
        help: one or two sentences for `--help` and the documentation; by default the text beneath the field.
        registry: the valid names of a choice that users may extend. A closed set of choices is a `Literal` type.
        group: starts a new group of options with this field; the fields after it belong to the same group.
        needs: what must hold for the field to act; see `check_needs`.
        bounds: of the value, as `pydantic.Field` has them: gt, ge, lt, le, min_length. NaN and infinity are refused
            without allow_inf_nan.
    """
    option = Option(help, group, bounds, registry, (needs,) if isinstance(needs, Need) else tuple(needs))
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"option": option})
    return dataclasses.field(default=default, metadata={"option": option})


@functools.cache
def options_of(cls: Any) -> Mapping[str, Option]:
    """Every field of the dataclass `cls` that its constructor takes, by name and in order.

    A dataclass without groups is one group of its own name. Fields of other libraries may say `help` in their metadata.
    """
    hints, group, options = typing.get_type_hints(cls, include_extras=True), cls.__name__, dict[str, Option]()
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


@functools.cache
def _texts_beneath(cls: type) -> dict[str, str]:
    """The text beneath each field of the dataclass `cls` and its bases; none for a class without a file."""
    texts: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        assert isinstance(definition, ast.ClassDef)
        for field, beneath in itertools.pairwise(definition.body):
            match field, beneath:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts
