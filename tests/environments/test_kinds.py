from asyncio import wait_for
from functools import cached_property, lru_cache, partialmethod, wraps

import pytest

from alpaca_ppo.environments.kinds import EnvironmentKind, make_kinds
from alpaca_ppo.environments.tool_calls import ToolCall, call_problem


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: first
        b: second
    """
    return a + b


class Counter:
    """As TRL's documentation describes environments: reset, tools, a reward."""

    def reset(self, **row):
        self.count = row["start"]

    def increment(self, step: int) -> int:
        """Counts on.

        Args:
            step: by how much
        """
        self.count += step
        return self.count

    def _helper(self):
        raise AssertionError("no tool")

    def get_reward(self) -> float:
        return float(self.count)


class Partner:
    def reset(self, prompt, seed=0):
        return None

    async def reply(self, completion: str) -> str:
        return completion


class ReplyTool:
    def reset(self, **row): ...

    def reply(self, text: str) -> str:
        """Sends a mail.

        Args:
            text: of the mail
        """
        return text


def test_public_methods_are_tools_and_reserved_ones_are_not():
    kind = make_kinds([add], Counter)[None]
    assert (kind.name, kind.class_name, kind.has_reward, kind.has_reply, kind.rewards) == (
        "Counter", "Counter", True, False, True,
    )  # fmt: skip
    assert [tool.name for tool in kind.tools] == ["add", "increment"]
    assert [tool.function for tool in kind.tools] == [add, None]
    schema = kind.tools[1].schema["function"]
    assert schema["parameters"]["properties"] == {"step": {"type": "integer", "description": "by how much"}}


def test_a_public_static_or_class_method_is_a_tool():
    class Library(Counter):
        add = staticmethod(add)
        increment = classmethod(Counter.increment)
        _hidden = staticmethod(add)

    kind = make_kinds(None, Library)[None]
    assert [tool.name for tool in kind.tools] == ["add", "increment"]
    assert kind.tools[0].schema["function"]["parameters"]["required"] == ["a", "b"]
    Library.three_more = partialmethod(Counter.increment, step=3)
    with pytest.raises(ValueError, match="the method three_more of environment 'Library' cannot be shown"):
        make_kinds(None, Library)


def test_a_reply_to_a_completion_is_a_partner_and_another_one_a_tool():
    partner, tool = make_kinds(None, {"a": Partner, "b": ReplyTool}).values()
    assert (partner.has_reply, partner.has_reward, partner.rewards, partner.tools) == (True, False, True, [])
    assert (tool.has_reply, tool.rewards, [t.name for t in tool.tools]) == (False, False, ["reply"])


def test_tools_alone_have_an_environment_without_state():
    kind = make_kinds([add], None)[None]
    assert (kind.name, kind.rewards, [t.name for t in kind.tools]) == ("tools", False, ["add"])
    assert kind.acquire().reset(anything=1) is None
    assert make_kinds(None, None) == make_kinds([], None) == {}


def test_instances_are_made_once_and_used_again():
    made = []

    def factory():
        made.append(Counter())
        return made[-1]

    kind = EnvironmentKind("counter", factory)
    first = kind.acquire()
    assert made == [first]
    assert kind.acquire() is None
    kind.add(second := factory())
    assert "returned the same object twice" in kind.add(second)
    kind.release(second, reusable=True)
    kind.release(first, reusable=False)
    assert kind.acquire() is second
    assert kind.acquire() is None


def test_properties_that_need_a_reset_are_left_alone():
    class Board(Counter):
        @property
        def doubled(self):
            return 2 * self.count

        @cached_property
        def name(self):
            return str(self.count)

    assert [tool.name for tool in make_kinds(None, Board)[None].tools] == ["increment"]


def with_store(function):
    @wraps(function)
    def decorated(*arguments, **keywords):
        return function(*arguments, store={"a": "x"}, **keywords)

    return decorated


class Shop(Counter):
    @with_store
    def look(self, item: str, store: dict) -> str:
        """Looks.

        Args:
            item: to look for
        """
        return store[item]

    @with_store
    def find(self, item: str, store) -> str:
        """Finds.

        Args:
            item: to find
        """
        return store[item]

    @staticmethod
    @lru_cache
    def price(item: str) -> int:
        """The price.

        Args:
            item: to buy
        """
        return len(item)


def test_what_a_decorator_supplies_to_a_tool_is_not_shown_to_the_policy():
    shop = Shop()
    schemas = {tool.name: tool.schema["function"]["parameters"] for tool in make_kinds(None, Shop)[None].tools}
    for name, said in (("look", "to look for"), ("find", "to find"), ("price", "to buy")):
        item = {"item": {"type": "string", "description": said}}
        assert schemas[name] == {"type": "object", "properties": item, "required": ["item"]}
    for tool in make_kinds(None, Shop)[None].tools:
        if tool.name != "increment":
            method = getattr(shop, tool.name)
            assert call_problem(ToolCall(tool.name, {"item": "a"}), method, tool.schema) == ""
            problem = call_problem(ToolCall(tool.name, {"item": "a", "store": {}}), method, tool.schema)
            assert problem == f"wrong arguments for {tool.name}: got an unexpected keyword argument 'store'"
    assert (shop.look(item="a"), shop.find(item="a"), shop.price(item="a")) == ("x", "x", 1)
    # The class itself still says what it takes.
    assert set(Shop.look.__annotations__) == {"item", "store", "return"}

    class Hidden(Counter):
        @with_store
        def look(self, item: str, store: dict, times: int = 1) -> str:
            """Looks.

            Args:
                item: to look for
            """

    with pytest.raises(ValueError, match="look of environment 'Hidden' .* no description for the argument 'times'"):
        make_kinds(None, Hidden)


def logged(function):
    @wraps(function)
    def decorated(self, *arguments, **keywords):
        print(f"{function.__name__} gets {arguments} {keywords}")
        return function(self, *arguments, **keywords)

    return decorated


def retried(function):
    @wraps(function)
    async def decorated(*arguments: object, **keywords: object) -> object:
        return await wait_for(function(*arguments, **keywords), 3)

    return decorated


def changing(change):
    """A decorator that supplies `store` by the statement in the middle of its source."""

    def in_place(function):
        @wraps(function)
        def decorated(*arguments, **keywords):
            keywords["store"] = {"a": "x"}
            return function(*arguments, **keywords)

        return decorated

    def by_a_method(function):
        @wraps(function)
        def decorated(*arguments, **keywords):
            keywords.setdefault("store", {"a": "x"})
            return function(*arguments, **keywords)

        return decorated

    def first(function):
        @wraps(function)
        def decorated(*arguments, **keywords):
            return function({"a": "x"}, *arguments, **keywords)

        return decorated

    def with_others(function):
        @wraps(function)
        def decorated(*arguments, **keywords):
            return function(*arguments, **dict(store={"a": "x"}), **keywords)

        return decorated

    return {"in place": in_place, "method": by_a_method, "first": first, "others": with_others}[change]


def look(store, item: str) -> str:
    """Looks.

    Args:
        item: to look for
    """
    return store[item]


@pytest.mark.parametrize("change", ["in place", "method", "first", "others"])
def test_what_a_decorator_supplies_in_another_way_is_not_shown_either(change):
    tool = changing(change)(look)
    assert tool(item="a") == "x"
    ((shown,),) = (kind.tools for kind in make_kinds([tool], None).values())
    assert [*shown.schema["function"]["parameters"]["properties"]] == ["item"]
    # What passes on what it gets may stand before one that supplies.
    assert make_kinds([wraps(tool)(lambda *a, **k: tool(*a, **k))], None)[None].tools


def test_an_argument_that_no_decorator_supplies_is_not_hidden():
    class Passing(Counter):
        @logged
        def look(self, item: str, store: dict) -> str:
            """Looks.

            Args:
                item: to look for
            """

    with pytest.raises(ValueError, match="look of environment 'Passing' .* no description for the argument 'store'"):
        make_kinds(None, Passing)
    for decorator in (retried, lambda function: retried(retried(function))):
        with pytest.raises(ValueError, match="the tool look cannot be shown .*: .*Argument store is missing a type"):
            make_kinds([decorator(look)], None)


def documented(a: int, /) -> int:
    """Doubles.

    Args:
        a: any
    """
    return 2 * a


def with_default(a: int = 1, /) -> int:
    """Doubles.

    Args:
        a: any
    """
    return 2 * a


def undocumented(a: int, /) -> int:
    """Doubles."""
    return 2 * a


def several(*args: int) -> int:
    """Adds.

    Args:
        args: any
    """
    return sum(args)


@wraps(undocumented)
def passed_on(*args: int, **keywords: int) -> int:
    return undocumented(*args, **keywords)


@pytest.mark.parametrize("tool", [documented, with_default, undocumented, several, passed_on])
def test_a_tool_whose_arguments_have_no_names_is_refused(tool):
    with pytest.raises(
        ValueError, match=f"the tool {tool.__name__} cannot be shown .*; give it named, typed arguments"
    ):
        make_kinds([tool], None)


def test_a_decorator_may_supply_an_argument_without_a_name():
    @changing("first")
    def look(store: dict, /, item: str) -> str:
        """Looks.

        Args:
            item: to look for
        """
        return store[item]

    ((tool,),) = (kind.tools for kind in make_kinds([look], None).values())
    assert [*tool.schema["function"]["parameters"]["properties"]] == ["item"] and look(item="a") == "x"


def test_hints_that_cannot_be_read_and_names_without_a_member():
    def look(at: "Missing") -> str:  # noqa: F821
        """Looks.

        Args:
            at: something
        """

    with pytest.raises(
        ValueError, match="the tool look cannot be shown to the policy as a tool: NameError: name 'Miss"
    ):
        make_kinds([look], None)

    class Delegates(Counter):
        def __dir__(self):
            return [*super().__dir__(), "ghost"]

    assert [tool.name for tool in make_kinds(None, Delegates)[None].tools] == ["increment"]


def test_reset_gets_the_columns_that_it_names_and_a_seed_that_it_names():
    row = {"prompt": "p", "start": 3}
    assert make_kinds(None, Counter)[None].reset_arguments(row, 7) == row
    assert make_kinds(None, Partner)[None].reset_arguments(row, 7) == {"prompt": "p", "seed": 7}
    assert make_kinds(None, Partner)[None].reset_arguments({**row, "seed": 1}, 7) == {"prompt": "p", "seed": 1}

    class Both(Counter):
        def reset(self, seed, **row): ...

    assert make_kinds(None, Both)[None].reset_arguments(row, 7) == {**row, "seed": 7}

    class Strict(Counter):
        def reset(self, target): ...

    with pytest.raises(ValueError, match=r"reset of 'Strict' requires \['target'\], but the"):
        make_kinds(None, Strict)[None].reset_arguments(row, 7)


class Undocumented(Counter):
    def helper(self, x):
        return x


class NoReset:
    def get_reward(self):
        return 1.0


@pytest.mark.parametrize(
    ("tools", "factory", "message"),
    [
        (None, NoReset, "environment 'NoReset' .* has no method reset"),
        (None, Undocumented, "method helper of environment 'Undocumented' cannot be shown to the policy as a tool"),
        ([lambda x: x], None, "the tool <lambda> cannot be shown"),
        ([add, add], Counter, "environment 'Counter' has several tools named 'add'"),
        (None, {}, "environment_factory is an empty dictionary"),
        (None, {"": Counter}, "environment_factory has an environment without a name"),
        (None, {"a": "Counter"}, "environment_factory 'a' raised TypeError: 'str' .* let it need no arguments"),
        (None, {"shop": lambda: 1 / 0}, "environment_factory 'shop' raised ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_named(tools, factory, message):
    with pytest.raises(ValueError, match=message):
        make_kinds(tools, factory)


def test_a_factory_that_needs_arguments_is_refused_by_their_names():
    class Sized(Counter):
        def __init__(self, size, *rest, colour="red", **more):
            self.size = size

    with pytest.raises(ValueError, match="environment_factory 'Sized' raised TypeError: .*'size'"):
        make_kinds(None, Sized)
    assert make_kinds(None, lambda: Sized(3))[None].name == "Sized"


def test_a_reply_whose_parameter_has_another_name_is_told_which_one():
    class Named(Counter):
        def reply(self, text):
            return text

    with pytest.raises(ValueError, match="the method reply of environment 'Named'.*reply.completion."):
        make_kinds(None, Named)
