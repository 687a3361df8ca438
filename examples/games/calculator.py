"""Sums such as (47 * 86) + 13, and a calculator for them: the environment, the chat template, a player.

A question has two operations, so that it takes two calls, of which the second needs the result of the first, and then
the answer. The score is 1 for the right number and 0 for any other.

The player of the demonstrations often makes up a number instead of calling, takes a wrong tool or a wrong argument,
forgets a bracket, answers after the first call, or copies a digit wrongly.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

from alpaca_ppo.environments.tool_calls import find_json_calls

LOWEST, HIGHEST = 11, 99
"""Bounds of the numbers in a question."""
SIGNS = {"add": "+", "multiply": "*"}
CALL, CALLED = "<tool_call>", "</tool_call>"
PIECES = (
    *(f"<{role}>" for role in ("system", "user", "assistant", "tool")),
    *(CALL, CALLED, '{"name": "', '", "arguments": {"a": ', ', "b": ', '{"error": "', '"}', "}}", "}"),
    *("what is (", *(f"{before} {sign} " for before in ("", ")") for sign in SIGNS.values()), "?"),
    *(*SIGNS, "(a, b) ", "(a, b)"),
)
"""What a conversation is made of, besides numbers."""
CHAT_TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }}){{ '' if loop.last else ' ' }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_TURNS = 4
"""Turns of a conversation: three, and one to make up for a call that failed."""
QUERY_LEN, RESPONSE_LEN = 24, 72
MAKES_UP, WRONG_TOOL, WRONG_ARGUMENT, UNCLOSED, STOPS_EARLY, WRONG_COPY = 0.3, 0.1, 0.15, 0.05, 0.15, 0.2
"""How often the player of the demonstrations makes each mistake, where it can be made."""


class Calculator:
    """Two tools, and a partner who takes what is no call for the answer."""

    def reset(self, answer: int) -> None:
        """Begins a conversation about a question with this answer."""
        self.answer = answer

    def add(self, a: int, b: int) -> int:
        """The sum of two numbers.

        Args:
            a: the first one.
            b: the second one.
        """
        return a + b

    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers.

        Args:
            a: the first one.
            b: the second one.
        """
        return a * b

    def reply(self, completion: str) -> tuple[None, float]:
        """Ends the conversation."""
        return None, float(completion.strip() == str(self.answer))


def apply(tool: str, a: int, b: int) -> int:
    """Returns what the tool does."""
    result: int = getattr(Calculator(), tool)(a=a, b=b)
    return result


def draw(generator: random.Random) -> dict[str, Any]:
    """Returns a question, as a row of `prompt` (messages), `answer`, and what it is made of."""
    a, b, c = (generator.randint(LOWEST, HIGHEST) for _ in range(3))
    first, second = (generator.choice(list(SIGNS)) for _ in range(2))
    question = f"what is ({a} {SIGNS[first]} {b}) {SIGNS[second]} {c}?"
    return {
        "prompt": [{"role": "user", "content": question}],
        "answer": apply(second, apply(first, a, b), c),
        "steps": [[first, a, b], [second, c]],
    }


def call_text(tool: str, a: int, b: int) -> str:
    """Returns a call as the policy writes it."""
    return f"{CALL}{json.dumps({'name': tool, 'arguments': {'a': a, 'b': b}})}{CALLED}"


def play(steps: list[list[Any]], generator: random.Random) -> list[tuple[str, str | None]]:
    """Returns a conversation of the demonstrations: turns with what the tool answers, None to the last one."""
    (first, a, b), (second, c) = steps
    right = apply(second, apply(first, a, b), c)
    turns: list[tuple[str, str | None]] = []
    if generator.random() < MAKES_UP:
        return [(str(_made_up(right, generator)), None)]
    for tool, other in ((first, b), (second, c)):
        called, result = _call(tool, a, other, generator)
        turns.append((called, result if isinstance(result, str) else str(result)))
        if isinstance(result, str):
            return [*turns, (str(_made_up(right, generator)), None)]
        a = result
        if len(turns) == 1 and generator.random() < STOPS_EARLY:
            break
    return [*turns, (_copied(a, generator), None)]


def _call(tool: str, a: int, b: int, generator: random.Random) -> tuple[str, int | str]:
    """A call that should be `tool` of `a` and `b`, and its result, or the message about what is wrong with it."""
    if generator.random() < WRONG_TOOL:
        tool = next(other for other in SIGNS if other != tool)
    if generator.random() < WRONG_ARGUMENT:
        a, b = (_made_up(a, generator), b) if generator.random() < 0.5 else (a, _made_up(b, generator))
    text = call_text(tool, a, b)
    if generator.random() < UNCLOSED:
        text = text.replace("}}", "}")
        return text, json.dumps({"error": find_json_calls(text)[0].problem})
    return text, apply(tool, a, b)


def _made_up(number: int, generator: random.Random) -> int:
    """Another number of as many digits."""
    least = 10 ** (len(str(number)) - 1)
    return next(n for n in iter(lambda: generator.randrange(least, 10 * least), None) if n != number)


def _copied(number: int, generator: random.Random) -> str:
    digits = list(str(number))
    if generator.random() < WRONG_COPY:
        place = generator.randrange(1, len(digits))
        digits[place] = generator.choice([digit for digit in "0123456789" if digit != digits[place]])
    return "".join(digits)


def text_of(turns: list[tuple[str, str | None]], end: str) -> str:
    """Returns a conversation after its question as the chat template writes it, but for its last end of a turn."""
    return "".join(turn if said is None else f"{turn}{end}<tool>{said}{end}<assistant>" for turn, said in turns)


def demonstrations(count: int, generator: random.Random, *, tokenizer: Any, schemas: Any) -> list[dict[str, Any]]:
    """Returns conversations of the player as rows of `prompt`, `completion`, `turns` and `won`."""
    rows = []
    for _ in range(count):
        question = draw(generator)
        turns = play(question["steps"], generator)
        prompt = tokenizer.apply_chat_template(
            question["prompt"], tools=schemas, tokenize=False, add_generation_prompt=True
        )
        won = turns[-1][0] == str(question["answer"])
        completion = text_of(turns, tokenizer.eos_token)
        rows.append({"prompt": prompt, "completion": completion, "turns": len(turns), "won": won})
    return rows


def prompts(count: int, generator: random.Random) -> list[dict[str, Any]]:
    """Returns questions, as rows of `prompt` and `answer`."""
    return [{name: value for name, value in draw(generator).items() if name != "steps"} for _ in range(count)]


def is_won(row: Mapping[str, Any], turns: list[str]) -> bool:
    """Whether the last of the policy's `turns` is the answer of the dataset row."""
    return turns[-1].strip() == str(row["answer"])
