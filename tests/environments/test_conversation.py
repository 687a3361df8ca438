import pytest

from alpaca_ppo.environments.conversation import tool_call_entry, tool_message
from alpaca_ppo.environments.kinds import make_kinds
from tests.data.tokenizers import CHATML, byte_tokenizer
from tests.environments.chat import FORGETS_THOUGHTS, WITH_TOOLS, chat_bytes, conversation
from tests.environments.test_kinds import Counter, add

SCHEMAS = [tool.schema for tool in make_kinds([add], None)[None].tools]
QUESTION = [{"role": "user", "content": "2 + 3?"}]
CALL = tool_call_entry("add", {"a": 2, "b": 3}, 0)


def test_prompt_turn_and_reply_are_the_conversation_as_the_template_writes_it():
    chat = conversation()
    tokenizer, result = chat.tokenizer, tool_message("add", "5", 0)
    written = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    turn = tokenizer(written, add_special_tokens=False)["input_ids"]
    ids = [
        *chat.prompt_ids(QUESTION, SCHEMAS),
        *turn,
        *chat.reply_ids([result], stopped_by_token=True, tool_calls=[CALL], schemas=SCHEMAS),
    ]
    whole = [*QUESTION, {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}, result]
    expected = tokenizer.apply_chat_template(whole, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == expected
    assert chat.turn_text(turn) == written.removesuffix("<|im_end|>")
    assert chat.prompt_end(QUESTION, SCHEMAS) == chat.reply_end([result], [CALL], SCHEMAS) == "<|im_start|>assistant\n"


def test_prompt_and_reply_follow_the_template_arguments_of_the_row():
    opens = "{% if think %}<think>{% endif %}"
    thinks = WITH_TOOLS.replace("assistant\n{% endif %}", f"assistant\n{opens}{{% endif %}}")
    thinks = thinks.replace(
        "{{ m.content }}", f"{{% if m.role == 'assistant' %}}{opens}{{% endif %}}{{{{ m.content }}}}"
    )
    chat = conversation(chat_bytes(thinks))
    for row, end in (({"chat_template_kwargs": {"think": True}}, "assistant\n<think>"), ({}, "assistant\n")):
        of_row = chat.of_row({"prompt": QUESTION, **row})
        reply = of_row.reply_ids([{"role": "user", "content": "Go on."}], stopped_by_token=True)
        for ids in (of_row.prompt_ids(QUESTION, []), reply):
            assert chat.tokenizer.decode(ids).endswith(end)
    shown = chat.of_row({"tools": SCHEMAS}).prompt_ids(QUESTION, [])
    assert shown == chat.prompt_ids(QUESTION, SCHEMAS)


def test_a_turn_that_was_cut_off_is_ended_by_the_template():
    chat = conversation()
    reply = [{"role": "user", "content": "Go on."}]
    cut = chat.tokenizer.decode(chat.reply_ids(reply, stopped_by_token=False))
    assert cut == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(chat.reply_ids(reply, stopped_by_token=True)) == cut.removeprefix("<|im_end|>")


def test_plain_text_is_appended_as_it_is():
    chat = conversation(byte_tokenizer(), messages=False)
    assert chat.tokenizer.decode(chat.reply_ids([{"role": "user", "content": " higher\n"}], stopped_by_token=True)) == (
        " higher\n"
    )
    chat.check([], replies=True)


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name():
    tokenizer = chat_bytes(FORGETS_THOUGHTS)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(ValueError, match="the chat template of some/model leaves out"):
        conversation(tokenizer).check([], replies=True)
    with pytest.raises(ValueError, match="leaves out what the policy thinks"):
        conversation(tokenizer).check(SCHEMAS, replies=False)


NUMBERED = WITH_TOOLS.replace("{{ m.content }}", "({{ loop.index }}) {{ m.content }}")


@pytest.mark.parametrize(
    ("template", "schemas", "message"),
    [
        # An old long message is shortened.
        (
            WITH_TOOLS.replace("{{ m.content }}", "{{ m.content if loop.revindex < 6 else m.content[:1000] }}"),
            [],
            r"in another way later: .* 2 of answer",
        ),
        # Only the last messages are written.
        (
            WITH_TOOLS.replace("in messages %}", "in messages[-12:] %}"),
            [],
            r"in another way later: '.*answer 00.*', not '.*First question",
        ),
        (WITH_TOOLS.replace("in messages %}", "in messages[-40:] %}"), [], r"in another way later: "),
        # The results of earlier turns are left out.
        (
            WITH_TOOLS.replace(
                "{{ m.content }}", "{{ m.content if m.role != 'tool' or loop.revindex < 4 else 'omitted' }}"
            ),
            SCHEMAS,
            r"in another way later: .*omitted.*, not .*2 of result 00",
        ),
        # The text around a message depends on its position, or on its length.
        (NUMBERED, SCHEMAS, r"in another way later: '.*\(4\) .*, not '.*\(2\) "),
        (
            WITH_TOOLS.replace("{{ m.content }}", "{{ '[long] ' if m.content|length > 1000 }}{{ m.content }}"),
            [],
            r"in another way later: '.*\[long\] More",
        ),
    ],
    ids=["length", "window", "wide window", "old results", "position", "length at once"],
)
def test_what_a_template_does_only_in_a_long_conversation_is_found(template, schemas, message):
    chat = conversation(chat_bytes(template))
    with pytest.raises(ValueError, match=message):
        chat.check(schemas, replies=not schemas)


def test_a_template_that_ends_turns_with_calls_in_another_way_is_refused():
    end = "{% if m.tool_calls %}<|im_end|>\n\n{% else %}<|im_end|>\n{% endif %}{% endfor %}{% if add"
    chat = conversation(chat_bytes(WITH_TOOLS.replace("<|im_end|>\n{% endfor %}{% if add", end)))
    chat.check([], replies=True)
    with pytest.raises(ValueError, match=r"does not end a turn with tool calls .* with '<\|im_end\|>\\n'"):
        chat.check(SCHEMAS, replies=True)
    # It is no matter if it is only the token that the policy ends its turn with.
    end = end.replace("\n\n", "").replace("<|im_end|>\n", "<|im_start|>")
    conversation(chat_bytes(WITH_TOOLS.replace("<|im_end|>\n{% endfor %}{% if add", end))).check(SCHEMAS, replies=True)


def test_a_template_that_never_writes_thoughts_is_refused():
    template = WITH_TOOLS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    with pytest.raises(ValueError, match="leaves out what the policy thinks between <think> and </think>"):
        conversation(chat_bytes(template)).check([], replies=True)
    # It is no matter where the template's own prompt ends with a thought.
    always = template.replace("assistant\n{% endif %}", "assistant\n</think>{% endif %}")
    always = always.replace("{{ m.role }}\n", "{{ m.role }}\n{{ '</think>' if m.role == 'assistant' }}")
    conversation(chat_bytes(always)).check([], replies=True)


@pytest.mark.parametrize(
    ("template", "schemas", "message"),
    [
        (CHATML, SCHEMAS, "writes nothing about tools"),
        (WITH_TOOLS.replace("{% for m", "{{ raise_exception('no') if tools }}{% for m"), SCHEMAS, "cannot write a"),
        (WITH_TOOLS.replace("{{ m.content }}", "said"), [], "does not write earlier answers"),
        (WITH_TOOLS.replace("{{ m.content }}", "{{ m.content|lower }}"), [], "does not write earlier answers"),
        (WITH_TOOLS + "{% if loop_end is not defined %}{% endif %}", [], None),
    ],
)
def test_templates_that_cannot_write_a_conversation(template, schemas, message):
    chat = conversation(chat_bytes(template))
    if message is None:
        chat.check(schemas, replies=True)
        return
    with pytest.raises(ValueError, match=message):
        chat.check(schemas, replies=not schemas)


def test_tools_need_prompts_of_messages():
    schemas = [tool.schema for tool in make_kinds(None, Counter)[None].tools]
    with pytest.raises(ValueError, match="the policy has tools .increment., but the prompts are plain text"):
        conversation(messages=False).check(schemas, replies=False)


@pytest.mark.parametrize("words", ["your earlier answer was wrong", "first question", "<think>\nx\n</think>"])
def test_a_reply_may_say_anything(words):
    chat = conversation()
    text = chat.tokenizer.decode(chat.reply_ids([{"role": "user", "content": words}], stopped_by_token=False))
    assert text == f"<|im_end|>\n<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    result = chat.reply_ids([tool_message("add", words, 0)], stopped_by_token=True, tool_calls=[CALL], schemas=SCHEMAS)
    assert chat.tokenizer.decode(result) == f"\n<|im_start|>tool\n{words}<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_policy_put_into_its_calls_is_not_given_to_the_template():
    strict = WITH_TOOLS.replace(
        "{% for c in m",
        "{{ raise_exception('one call at a time') if (m.tool_calls or [])|length > 1 }}"
        "{% for c in (m.tool_calls or []) if c.function.arguments %}{{ raise_exception('arguments') }}{% endfor %}"
        "{% for c in m",
    )
    results = [tool_message("add", "5", 0), tool_message("add", "6", 1)]
    calls = [CALL, tool_call_entry("add", {"b": 4}, 1)]
    appended = [
        chat.reply_ids(results, stopped_by_token=True, tool_calls=calls, schemas=SCHEMAS)
        for chat in (conversation(), conversation(chat_bytes(strict)))
    ]
    assert appended[0] == appended[1]


def test_a_template_may_leave_the_text_of_a_turn_with_calls_out():
    chat = conversation(chat_bytes(WITH_TOOLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")))
    chat.check(SCHEMAS, replies=True)
    reply = chat.reply_ids([tool_message("add", "5", 0)], stopped_by_token=True, tool_calls=[CALL], schemas=SCHEMAS)
    assert chat.tokenizer.decode(reply) == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_may_write_an_eos_at_the_end_of_the_text():
    tokenizer = chat_bytes(WITH_TOOLS + "{% if not add_generation_prompt %}<eos>{% endif %}")
    tokenizer.eos_token = "<eos>"
    chat = conversation(tokenizer)
    chat.check(SCHEMAS, replies=True)
    reply = chat.reply_ids([{"role": "user", "content": "x"}], stopped_by_token=False)
    assert tokenizer.decode(reply) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_the_token_that_ends_a_turn_may_begin_the_next_message():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    tokenizer = chat_bytes(template)
    chat = conversation(tokenizer, stop_token_ids=[tokenizer.convert_tokens_to_ids("<|im_start|>")])
    reply = [{"role": "user", "content": "x"}]
    texts = [tokenizer.decode(chat.reply_ids(reply, stopped_by_token=stopped)) for stopped in (True, False)]
    assert texts == ["x<|im_start|>assistant", "<|im_start|>x<|im_start|>assistant"]
