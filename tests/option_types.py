"""What the type of an option says about it, read from the type alone: what the parser is expected to make of it."""

import typing
from types import NoneType, UnionType
from typing import Any

from alpaca_ppo.config.fields import Option


def choices(option: Option) -> tuple[Any, ...]:
    """The values of a closed set; empty for other types."""
    found = [member for member in _members(option.hint) if member is not NoneType]
    closed = all(typing.get_origin(member) is typing.Literal for member in found)
    return tuple(choice for member in found for choice in typing.get_args(member)) if closed else ()


def kinds(option: Option) -> set[Any]:
    """The types of its values, or of the entries of its lists, besides None; of a closed set, those of its choices."""
    members = _members(option.hint)
    entries = [typing.get_args(member)[0] for member in members if typing.get_origin(member) is list]
    found: set[Any] = set()
    for member in _members(entries[0]) if entries else members:
        if typing.get_origin(member) is typing.Literal:
            found |= set(map(type, typing.get_args(member)))
        elif member is not NoneType:
            found.add(member)
    return found


def _members(hint: Any) -> list[Any]:
    """The types that `hint` allows, without bounds."""
    if typing.get_origin(hint) is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return [member for part in typing.get_args(hint) for member in _members(part)]
    return [hint]
