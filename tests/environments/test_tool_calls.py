import json

import pytest

from alpaca_ppo.environments.episode import EnvironmentFailure
from alpaca_ppo.environments.kinds import make_kinds, tool_schema
from alpaca_ppo.environments.tool_calls import (
    ToolCall,
    call_problem,
    find_json_calls,
    find_parsed_calls,
    find_template_calls,
    without_thoughts,
)
from tests.environments.chat import WITH_TOOLS, chat_bytes, conversation
from tests.environments.test_episodes import ROW, Played, call, result
from tests.environments.test_kinds import add


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call at all", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [ToolCall("f", {"a": 1})]),
        ('x<tool_call>\n{"name": "f"}\n</tool_call> y<tool_call>{"name": "g", "arguments": null}</tool_call>',
         [ToolCall("f", {}), ToolCall("g", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', [ToolCall("f", {"a": 2})]),
    ],
)  # fmt: skip
def test_json_calls_are_found(text, calls):
    assert find_json_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{", "the tool call is not closed"),
        ("<tool_call>{]</tool_call>", "the tool call is not valid JSON: "),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the tool call is not valid JSON: "),
        ("<tool_call>[]</tool_call>", "the tool call has no name"),
        ('<tool_call>{"name": 3}</tool_call>', "the tool call has no name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments of f must be an object"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "the arguments of f are not valid JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text, problem):
    (call,) = find_json_calls(text)
    assert call.problem.startswith(problem)


def test_a_parser_of_ones_own():
    def parser(text):
        if "!" in text:
            raise ValueError("no exclamation marks")
        return [{"name": word, "arguments": {}} for word in text.split()]

    assert find_parsed_calls(parser, "f g") == [ToolCall("f", {}), ToolCall("g", {})]
    assert find_parsed_calls(parser, "f!") == [ToolCall("", {}, "no exclamation marks")]
    assert find_parsed_calls(parser, "") == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"a": 1e999}', "inf is no number"),
        ('"{\\"a\\": [NaN]}"', "nan is no number"),
        (f'{{"a": {"[" * 70}{"]" * 70}}}', "they are nested more than 64 deep"),
        ('{"a": ["b\\ud800"]}', r"'b\ud800' has half of a surrogate pair, which is no text"),
        ('{"\\udfff": 1}', r"'\udfff' has half of a surrogate pair, which is no text"),
    ],
)
def test_arguments_that_json_cannot_hold_are_malformed(arguments, problem):
    (call,) = find_json_calls(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert call == ToolCall("f", {}, f"the arguments of f are not valid JSON: {problem}")


@pytest.mark.parametrize(
    ("value", "problem"),
    [(1j, "1j is no JSON value"), ({"b": {1: 2}}, "1 is no text for a key"), ([{3}], "{3} is no JSON value")],
)
def test_a_parser_may_find_what_json_cannot_hold(value, problem):
    (call,) = find_parsed_calls(lambda text: [{"name": "f", "arguments": {"a": value}}], "")
    assert call.problem == f"the arguments of f are not valid JSON: {problem}"
    deep = "[" * 100_000
    (call,) = find_parsed_calls(lambda text: [json.loads(deep)], "")
    assert "recursion" in call.problem


def test_names_are_text_that_a_tokenizer_reads():
    (call,) = find_json_calls('<tool_call>{"name": "a\\ud800", "arguments": {"b": [1, null]}}</tool_call>')
    assert (call.name, call.arguments) == ("a?", {"b": [1, None]})


@pytest.mark.parametrize(
    ("parser", "problem"),
    [
        (lambda text: text, "TypeError: it returned \\['f'\\], which is no list of mappings"),
        (lambda text: [{"name": text}, text], r"TypeError: it returned \[{'name': 'f'}, 'f'\]"),
        (lambda text: {}[text], "KeyError: 'f'"),
    ],
)
def test_a_parser_that_is_wrong_stops_the_run_by_name(parser, problem):
    played = Played(make_kinds([add], None), tool_call_parser=parser)
    with pytest.raises(EnvironmentFailure, match=f"environment 'tools', prompt 5, turn 1: .*{problem}"):
        played.say("f<|im_end|>")


@pytest.mark.parametrize("opened", [False, True])
def test_a_call_that_is_only_thought_of_is_none(opened):
    kinds = make_kinds([add], None)
    template = WITH_TOOLS
    if opened:
        begun = "{{ '<think>\\n' if m.role == 'assistant' }}{{ m.content }}"
        template = template.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
        template = template.replace("{{ m.content }}", begun)
    think, two_and_three = "" if opened else "<think>", call("add", a=2, b=3).removesuffix("<|im_end|>")
    thought = f"{think}Either {two_and_three} or <tool_call>?</think>"

    def played(**keywords):
        return Played(kinds, conversation=conversation(chat_bytes(template)), **keywords)

    assert played().say(f"{thought}5<|im_end|>") is None
    assert played().say(f"{think}{two_and_three}<|im_end|>") is None
    one_and_one = call("add", a=1, b=1)
    assert result(played().say(thought + one_and_one)) == "2"
    # Text that an argument quotes is no thought.
    quoting = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1, "<think>": 1}}</tool_call><|im_end|>'
    assert "unexpected keyword argument '<think>'" in played().say(f"{thought}{quoting}")
    seen = []
    assert played(tool_call_parser=lambda text: seen.append(text) or []).say(f"{thought} 5<|im_end|>") is None
    assert seen == [" 5"]


SYSTEM = "messages[0].role == 'system' and '/no_think' in messages[0].content"
SAYS_NO = {"prompt": [{"role": "system", "content": "/no_think"}, *ROW["prompt"]]}


@pytest.mark.parametrize(
    ("condition", "otherwise", "row", "opened"),
    [
        (f"not ({SYSTEM})", "", ROW, (True, True)),
        # A reply is written without the row's messages.
        (f"not ({SYSTEM})", "", SAYS_NO, (False, True)),
        (SYSTEM, "", SAYS_NO, (True, False)),
        ("tools", "", ROW, (True, True)),
        ("not tools", "<think></think>", ROW, (False, False)),
        ("last == 'tool'", "", ROW, (False, True)),
    ],
)
def test_messages_and_tools_decide_whether_the_prompt_begins_a_thought(condition, otherwise, row, opened):
    start = f"{{% if {condition} %}}<think>\n{{% else %}}{otherwise}{{% endif %}}"
    template = WITH_TOOLS.replace(
        "{{ m.content }}",
        f"{{% set last = (loop.previtem or m).role %}}{{% if m.role == 'assistant' %}}{start}{{% endif %}}"
        "{{ m.content }}",
    ).replace("assistant\n{% endif", f"assistant\n{{% set last = messages[-1].role %}}{start}{{% endif")
    played = Played(make_kinds([add], None), row, conversation=conversation(chat_bytes(template)))
    one_and_one, two_and_two = call("add", a=1, b=1), call("add", a=2, b=2)
    for begun in opened:
        # Thought of, if the prompt has begun a thought.
        turn = one_and_one.removesuffix("<|im_end|>") + "</think>" + two_and_two if begun else one_and_one
        assert result(played.say(turn)) == ("4" if begun else "2")


CALLED = '<tool_call>{"name": "f"}</tool_call>'
THOUGHTS = (
    "<think> </think>", "[THINK] [/THINK]", "<thinking> </thinking>", "<reasoning> </reasoning>",
    "<thought> </thought>", "<seed:think> </seed:think>", "<|START_THINKING|> <|END_THINKING|>", "◁think▷ ◁/think▷",
    '<think\ttype="deep"> </think>', "<|channel|>analysis<|message|> <|end|>", "<|channel>thought\n <channel|>",
    "<|inner_prefix|> <|inner_suffix|>",
)  # fmt: skip


@pytest.mark.parametrize("form", THOUGHTS)
def test_every_form_of_a_thought_only_mentions_calls(form):
    begin, end = form.split(" ")
    thought = f"I write {begin} and {CALLED}"
    assert without_thoughts(f"\n{begin}{thought}") == "\n"
    assert without_thoughts(f"{begin}{thought}{end}{CALLED}") == CALLED
    assert without_thoughts(f"a {begin}{CALLED}{end} b") == "a  b"
    assert without_thoughts(f"{CALLED}Hm.\n{begin}\n{thought}") == f"{CALLED}Hm.\n"
    assert without_thoughts(f"<|im_start|>assistant\n{begin}{thought}") == "<|im_start|>assistant\n"
    assert without_thoughts(f"{begin}a{end}{CALLED}{begin}b{end}{CALLED}") == CALLED * 2
    # The prompt begins it.
    assert without_thoughts(f"{thought}{end}{CALLED}", f"<|im_start|>assistant\n{begin}\n") == CALLED
    assert without_thoughts(CALLED, f"{begin}{end}") == CALLED


@pytest.mark.parametrize(
    "thought",
    [
        "<think>a <think>b C</think> C</think>",
        "<think>I write </think> and C</think>",
        "C</think>",
        "C</think>C</think>",
    ],
)
def test_a_thought_reaches_to_its_last_end(thought):
    assert without_thoughts(thought.replace("C", CALLED) + CALLED) == CALLED


def test_an_argument_does_not_end_a_thought():
    quoting = CALLED.replace('"f"', '"f", "arguments": {"a": "b</think>"}')
    assert without_thoughts(f"<think>a</think>{quoting}") == without_thoughts(quoting) == quoting


@pytest.mark.parametrize(
    "text", ["[Reason]", "Use `<think>` for it:", "<reason for it>", "<|channel|>commentary<|message|>"]
)
def test_other_marks_begin_no_thought(text):
    assert without_thoughts(f"{text} {CALLED}<|end|>") == f"{text} {CALLED}<|end|>"


def test_the_tokenizers_own_form_of_calls():
    # The form of transformers' documentation on response parsing: fields between marks, JSON within.
    tokenizer = chat_bytes()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": {"open": "[call]", "close": "[/call]", "repeats": True, "content": "json"}},
    }
    thought = '<think>[call]{"name": "add", "arguments": {"a": 0, "b": 0}}[/call]</think>'
    played = Played(make_kinds([add], None), conversation=conversation(tokenizer))
    assert result(played.say(thought + '[call]{"name": "add", "arguments": {"a": 3, "b": 1}}[/call]<|im_end|>')) == "4"
    assert "the tool call cannot be read" in played.say("[call]{[/call]<|im_end|>")
    assert played.end("over<|im_end|>")["tool_failures"] == 1


def sized(a: int, b: float = 1.0, c: list[int] | None = None, d: bool = False, e: int | str = 1) -> str:
    """Sizes.

    Args:
        a: x
        b: y
        c: z
        d: u
        e: v
    """
    return ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": 1}, ""),
        ({"a": 1, "b": 2, "c": None, "d": True, "e": "text"}, ""),
        ({}, "wrong arguments for sized: missing a required argument: 'a'"),
        ({"a": 1, "z": 2}, "wrong arguments for sized: got an unexpected keyword argument 'z'"),
        ({"a": "1"}, 'wrong arguments for sized: a must be of type integer, not "1"'),
        ({"a": True}, "wrong arguments for sized: a must be of type integer, not true"),
        ({"a": 1, "c": 3}, "wrong arguments for sized: c must be of type array, not 3"),
        ({"a": None}, "wrong arguments for sized: a must be of type integer, not null"),
    ],
)
def test_arguments_are_compared_with_the_signature(arguments, problem):
    assert call_problem(ToolCall("sized", arguments), sized, tool_schema(sized, "sized")) == problem


def test_a_template_that_finds_what_is_no_call_is_a_malformed_call():
    class Tokenizer:
        def parse_response(self, text, **context):
            return {"tool_calls": text.split()}

    found = find_template_calls(Tokenizer(), "add", "", [])
    assert [call.problem.split(":")[0] for call in found] == ["the tool call cannot be read"]
