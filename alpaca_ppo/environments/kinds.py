"""Tools and environments of users, checked before a run begins.

An environment has a method `reset(**row) -> str | None`. Optional are `get_reward() -> float`, the reward of the
episode that has ended, and `reply(completion) -> str | None | (str | None, float)`, a conversation partner's answer to
a turn of the policy. Its other public methods are tools. All may be async. The names are those of TRL's GRPOTrainer,
which has no `reply`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partialmethod, wraps
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import get_json_schema, parse_google_format_docstring

from alpaca_ppo.async_calls import error_text, name_of, parameters_of, supplies

# Makes an environment; usually its class.
EnvironmentFactory = Callable[[], Any]

_RESERVED = ("reset", "get_reward")
_SEED = "seed"


class Tool(NamedTuple):
    """A function that the policy can call.

    Attributes:
        schema: for chat templates: {"type": "function", "function": {"name", "description", "parameters"}}.
        function: sync or async; None for a method of the episode's environment.
    """

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any] | None = None


class EnvironmentKind:
    """The environments that one factory makes. Instances are reused in later episodes.

    Args:
        name: the factory's key; if empty, the name of the class that it makes.
        tools: that the policy can call besides the environment's methods.
        routed: whether the column `environment` names the environment of each row; `reset` does not get that column.

    Attributes:
        class_name: of the environments; also the name of their reward source.
        has_reply: whether it answers as a conversation partner.
        has_reward: whether it gives a reward for the whole episode.
        rewards: whether it gives rewards, for turns or for the whole episode.
        tools: that the policy can call, with `schemas`.
        answers: whether an episode can have more than one turn.
        resets_together: whether `reset` is async or takes a seed. Others may draw from global random generators, so
            they are reset one after another, in the rows' order.

    Raises:
        ValueError: if the factory raises, or its environment has no `reset` or wrong tools.
    """

    def __init__(
        self, name: str, factory: EnvironmentFactory, tools: Sequence[Tool] = (), *, routed: bool = False
    ) -> None:
        self.factory, self.routed = factory, routed
        try:
            instance = factory()
        except Exception as error:
            raise ValueError(
                f"environment_factory {name or name_of(factory)!r} raised {error_text(error)}; let it need no arguments"
            ) from error
        self.environment_class = type(instance)
        self.class_name = self.environment_class.__name__
        self.name = name or self.class_name
        if not callable(getattr(instance, "reset", None)):
            raise ValueError(f"environment {self.name!r} ({self.class_name}) has no method reset(**row); give it one")
        methods = _public_methods(instance)
        self.has_reward = callable(getattr(instance, "get_reward", None))
        # Another method of this name is a tool, as in TRL.
        self.has_reply = "reply" in methods and parameters_of(methods["reply"]).names[:1] == ["completion"]
        self.rewards = self.has_reward or self.has_reply
        if self.has_reply:
            del methods["reply"]
        self.tools = list(tools)
        for key, method in methods.items():
            self.tools.append(Tool(key, tool_schema(method, f"the method {key} of environment {self.name!r}")))
        self.schemas = [tool.schema for tool in self.tools]
        self.answers = self.has_reply or bool(self.tools)
        names = [tool.name for tool in self.tools]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"environment {self.name!r} has several tools named {duplicates[0]!r}; rename all but one")
        self._reset_parameters = parameters_of(instance.reset)
        self.resets_together = _SEED in self._reset_parameters.names or inspect.iscoroutinefunction(instance.reset)
        self._free, self._made = [instance], [instance]

    def acquire(self) -> Any:
        """Returns an instance that no other episode uses, or None where one must be made (`add`)."""
        return self._free.pop() if self._free else None

    def add(self, instance: Any) -> str | None:
        """Adds an instance that the factory has made; returns what is wrong with it, or None."""
        if any(instance is other for other in self._made):
            return "environment_factory returned the same object twice; let it make a new one each time"
        self._made.append(instance)
        if type(instance) is self.environment_class:
            return None
        return f"environment_factory returned a {type(instance).__name__} after a {self.class_name}; name one for each"

    def release(self, instance: Any, *, reusable: bool) -> None:
        """Ends an episode's use of `instance`, which is kept for later ones if `reusable`."""
        if reusable:
            self._free.append(instance)
        else:
            self._made = [other for other in self._made if other is not instance]

    def reset_arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The arguments of `reset`: the row's columns and `seed`, as far as its signature takes them; a column
        `seed` takes precedence. Raises ValueError for a missing column.
        """
        offered = {_SEED: seed, **row}
        if missing := [name for name in self._reset_parameters.required if name not in offered]:
            raise ValueError(f"reset of {self.name!r} requires {missing}, but the columns are {list(row)}; add them")
        named = {name: offered[name] for name in self._reset_parameters.names if name in offered}
        return named | (dict(row) if self._reset_parameters.any_others else {})


def _public_methods(instance: Any) -> dict[str, Any]:
    # Properties are skipped: before `reset` they may not have a value.
    static = dict(inspect.getmembers_static(instance, lambda value: not isinstance(value, property | cached_property)))
    public = {name: getattr(instance, name, None) for name in static if name[0] != "_" and name not in _RESERVED}
    unbound = [name for name, member in static.items() if isinstance(member, staticmethod | partialmethod)]
    return {name: value for name, value in public.items() if inspect.ismethod(value) or name in unbound}


class NoEnvironment:
    """The environment of episodes with tools only."""

    def reset(self, **row: Any) -> None:
        """Nothing to reset."""


def make_kinds(
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None,
) -> dict[str | None, EnvironmentKind]:
    """The kinds of environments by the value of a row's `environment` column; under None, the one of all rows.

    Raises:
        ValueError: for a tool without type hints or a docstring, duplicate names, an empty dictionary or name, and
            as `EnvironmentKind`.
    """
    shared = [Tool(name_of(tool), tool_schema(tool, f"the tool {name_of(tool)}"), tool) for tool in tools or ()]
    if isinstance(environment_factory, Mapping):
        if not environment_factory:
            raise ValueError("environment_factory is an empty dictionary; name at least one environment")
        if not all(environment_factory):
            raise ValueError("environment_factory has an environment without a name; name it as in the column")
        return {name: EnvironmentKind(name, make, shared, routed=True) for name, make in environment_factory.items()}
    if environment_factory is not None:
        return {None: EnvironmentKind("", environment_factory, shared)}
    return {None: EnvironmentKind("tools", NoEnvironment, shared)} if shared else {}


def rewarding_classes(kinds: Mapping[str | None, EnvironmentKind]) -> list[str]:
    """The classes that give rewards; each is a reward source."""
    return list(dict.fromkeys(kind.class_name for kind in kinds.values() if kind.rewards))


def tool_schema(function: Callable[..., Any], owner: str) -> dict[str, Any]:
    """The JSON schema of a tool, from its type hints and Google-style docstring; raises ValueError if they do not
    describe its arguments, or one has no name for calls. What the docstring leaves out, a decorator may supply.
    """
    try:
        described = parse_google_format_docstring((inspect.getdoc(function) or "").strip())[1]
        signature, required = inspect.signature(function), parameters_of(function).required
        hidden = {k for k, p in signature.parameters.items() if p.default is p.empty} - {*described, *required}
        if inspect.unwrap(function, stop=supplies) is inspect.unwrap(function):
            # No decorator supplies these.
            hidden -= {k for k, p in signature.parameters.items() if p.kind is p.POSITIONAL_ONLY}
        if hidden:
            # The same function for the library, without what a decorator supplies.
            function = wraps(function)(lambda: None)
            shown = [p for name, p in signature.parameters.items() if name not in hidden]
            vars(function)["__signature__"] = signature.replace(parameters=shown)
            function.__annotations__ = {k: v for k, v in function.__annotations__.items() if k not in hidden}
        schema: dict[str, Any] = get_json_schema(function)
        # Calls pass arguments by name.
        inspect.signature(function).bind(**schema["function"]["parameters"]["properties"])
        return schema
    # Evaluating type hints may raise anything.
    except Exception as error:
        raise ValueError(
            f"{owner} cannot be shown to the policy as a tool: {error_text(error)}; give it named, typed arguments "
            "and a docstring with Args:, or begin its name with _ if it is no tool (a partner's is reply(completion))"
        ) from error
