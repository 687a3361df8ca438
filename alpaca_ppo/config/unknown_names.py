"""`ExplainsUnknownNames`: a class whose constructor refuses unknown keyword arguments all at once, with what each is
here.

Python itself names one unknown argument at a time, so that a script that comes from another trainer needs a run for
each of its arguments.
"""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, explain_names


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
        refuse_unknown_names(cls, args, kwargs)
        return super().__new__(cls)


def refuse_unknown_names(cls: type[ExplainsUnknownNames], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises a ValueError if `kwargs` holds names that the constructor of `cls` does not take."""
    parameters = list(inspect.signature(cls).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    valid = [parameter.name for parameter in parameters]
    unknown = [name for name in kwargs if name not in valid]
    if not unknown:
        return
    missing = [p.name for p in parameters[len(args) :] if p.default is p.empty and p.name not in kwargs]
    raise ValueError(
        f"{cls.__name__} does not take {', '.join(unknown)}:\n"
        + explain_names(kwargs, valid, cls.foreign_sections)
        + (f"\nThe arguments {', '.join(missing)} are missing." if missing else "")
    )
