"""Finds tool calls in the policy's text, and checks their arguments."""

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from alpaca_ppo.async_calls import error_text
from alpaca_ppo.config.fields import shown

_DEEPEST = 64
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_CALL = r"<tool_call>(?>.*?(?:</tool_call>|\Z))"
# <think>, [THINK], <|START_THINKING|>, <think type="deep"> and others begin a thought; [reason], and `<think>` as code,
# do not.
_WORD = r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad)"
_TAG = rf"(?<!`)(?:[<◁]|\[(?=think\]))\|?\s*(?:start_|begin_of_|seed:)?{_WORD}(?:\s[^<>=]*=[^<>]*|\s*)\|?[>\]▷]"
_END = rf"[<\[◁]\|?\s*(?:/\s*|/seed:|end_|end_of_){_WORD}\s*\|?[>\]▷]"
# Messages of their own: of gpt-oss, Gemma and Apertus.
_CHANNEL = r"<\|(?:channel\|>analysis<\|message\||channel>thought|inner_prefix\|>)"
_CHANNEL_END = r"(?:<\|end\|>|<channel\|>|<\|inner_suffix\|>)"
_BEGUN = re.compile(rf"(?is)(?:{_TAG}(?!.*{_END})|{_CHANNEL}(?!.*{_CHANNEL_END})).*")
# Up to an end that no tag precedes, not even the name of one in the arguments of a call.
_ON = rf"(?:{_CALL}|(?!{_TAG}|<tool_call>).)*?{_END}"
# A thought, or a call (group 1), whose arguments may quote one.
_TAGGED = rf"(?:\A{_ON}|{_TAG}.*?(?:{_END}|\Z))(?:{_ON})*"
_THOUGHT = re.compile(rf"(?is){_TAGGED}|{_CHANNEL}.*?(?:{_CHANNEL_END}|\Z)|({_CALL})")
_JSON_TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}


class ToolCall(NamedTuple):
    """A call that the policy wrote; if it cannot be made, `problem` says why, and is shown to the policy."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


# Returns the calls in a turn's text, each with `name` and `arguments`; ValueError for a malformed one. The text
# includes special tokens, except for the one that ended the turn, and no thoughts.
ToolCallParser = Callable[[str], Sequence[Mapping[str, Any]]]


def encodable(text: str) -> str:
    """`text` with a question mark for each lone surrogate, which neither tokenizers nor files accept."""
    return text.encode("utf-8", "replace").decode()


def without_thoughts(text: str, prompt_end: str = "") -> str:
    """A turn's text without its thoughts, in which calls are only mentioned. A thought begins with a tag outside of a
    call, or with the turn, if an end comes first or if `prompt_end` begins it. It reaches to the last end before the
    next beginning, or else to the end of the turn.
    """
    return _THOUGHT.sub(lambda found: found[1] or "", prompt_end[len(_BEGUN.sub("", prompt_end)) :] + text)


def find_json_calls(text: str) -> list[ToolCall]:
    """The calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls = []
    for body, end in _BLOCK.findall(text):
        try:
            call = _checked(json.loads(body))
        except (ValueError, RecursionError) as error:
            call = ToolCall("", {}, f"the tool call is not valid JSON: {error}")
        calls.append(call if end else ToolCall("", {}, "the tool call is not closed with </tool_call>"))
    return calls


def _checked(entry: Any) -> ToolCall:
    """The call in `entry`, a mapping with `name` and `arguments` (a mapping, or one as JSON text)."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return ToolCall("", {}, "the tool call has no name; it must be an object with 'name' and 'arguments'")
    name, arguments = encodable(entry["name"]), entry.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, f"the arguments of {name} are not valid JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ToolCall(name, {}, f"the arguments of {name} must be an object with a value for each argument")
    if problem := _value_problem(arguments):
        return ToolCall(name, {}, f"the arguments of {name} are not valid JSON: {problem}")
    return ToolCall(name, dict(arguments))


def _value_problem(value: Any, depth: int = 0) -> str:
    """Why reward functions, servers and tables cannot take `value` as JSON; empty if they can."""
    if depth > _DEEPEST:
        return f"they are nested more than {_DEEPEST} deep"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is no number"
    if isinstance(value, Mapping):
        problems = [f"{shown(key)} is no text for a key" for key in value if not isinstance(key, str)]
        return problems[0] if problems else _value_problem([*value, *value.values()], depth)
    if isinstance(value, list | tuple):
        return next(filter(None, (_value_problem(entry, depth + 1) for entry in value)), "")
    if isinstance(value, str) and encodable(value) != value:
        return f"{shown(value)} has half of a surrogate pair, which is no text"
    return "" if value is None or isinstance(value, str | int | float) else f"{shown(value)} is no JSON value"


def find_parsed_calls(parser: ToolCallParser, text: str) -> list[ToolCall]:
    """The calls that a parser of the user finds in `text`; raises TypeError if it returns no list of mappings."""
    try:
        calls = list(parser(text))
    # The second of text that nests too deeply.
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, str(error))]
    if not all(isinstance(call, Mapping) for call in calls):
        raise TypeError(f"it returned {shown(calls)}, which is no list of mappings with 'name' and 'arguments'")
    return [_checked(call) for call in calls]


def find_template_calls(tokenizer: Any, text: str, prefix: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """The calls in the form of the tokenizer's own `response_template`; `prefix` is the end of what precedes `text`."""
    prefix = without_thoughts(_BEGUN.sub("", prefix))
    try:
        message = tokenizer.parse_response(text, prefix=prefix, tools=[dict(schema) for schema in schemas])
        return [_checked(call.get("function", call)) for call in message.get("tool_calls") or ()]
    # The parser raises whatever its pattern or the JSON in it raises.
    except Exception as error:
        return [ToolCall("", {}, f"the tool call cannot be read: {error_text(error)}")]


def call_problem(call: ToolCall, function: Callable[..., Any], schema: Mapping[str, Any]) -> str:
    """What is wrong with the call's arguments; empty if nothing is."""
    properties, signature = schema["function"]["parameters"].get("properties", {}), inspect.signature(function)
    # Without those that a decorator supplies.
    offered = [p for p in signature.parameters.values() if p.name in properties or p.default is not p.empty]
    try:
        signature.replace(parameters=offered).bind(**call.arguments)
    except TypeError as error:
        return f"wrong arguments for {call.name}: {error}"
    for name, value in call.arguments.items():
        declared = properties.get(name, {})
        json_type = declared.get("type")
        # A union's type is a list.
        types: Any = _JSON_TYPES.get(json_type) if isinstance(json_type, str) else None
        if types is None or (value is None and declared.get("nullable", False)):
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and json_type != "boolean"):
            return f"wrong arguments for {call.name}: {name} must be of type {json_type}, not {json.dumps(value)[:80]}"
    return ""
