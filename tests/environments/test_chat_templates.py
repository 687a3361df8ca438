"""Which families' chat templates write a conversation that grows, and what is said of those that do not."""

import pytest
from tokenizers import AddedToken

from alpaca_ppo.environments.conversation import tool_call_entry, tool_message
from alpaca_ppo.environments.kinds import make_kinds
from tests.data.tokenizers import byte_tokenizer
from tests.environments import chat_templates as of
from tests.environments.chat import conversation
from tests.environments.test_kinds import add

SCHEMAS = [tool.schema for tool in make_kinds([add], None)[None].tools]
NOTHING = "writes nothing about tools"
NOT_THINKING = {"enable_thinking": False}


def chat(template, marks, keywords):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<bos>", *marks)])
    tokenizer.eos_token = "<eos>" if "<eos>" in template else marks[0]
    tokenizer.chat_template = template
    stop = [tokenizer.convert_tokens_to_ids(mark) for mark in {tokenizer.eos_token, marks[0]}]
    return conversation(tokenizer, stop_token_ids=stop, chat_template_kwargs=keywords)


FORGETS = r"leaves out what the policy thinks between <think> and </think>"
EMPTY_THOUGHT = r"'.*assistant\\nEarlier answer.*, not '.*assistant\\n<think>\\n"
TOOLS_MOVE = r"'<bos>\[INST\] First.*, not '<bos>\[AVAILABLE_TOOLS\]"
FIRST_CALL = r"in another way later: .*\\n<\|call\|>add"
FIRST_RESULT = r"in another way later: .*<eos>\\n<\|output\|>.*, not .*<\|outputs_begin\|>"
# What is wrong with the replies of a partner, with tools, and with both; None where nothing is.
FAMILIES = {
    "qwen 2.5": (of.QWEN_2_5, of.QWEN_MARKS, {}, None, None, None),
    "qwen 3": (of.QWEN_3, of.QWEN_MARKS, {}, FORGETS, None, FORGETS),
    "qwen 3, not thinking": (of.QWEN_3, of.QWEN_MARKS, NOT_THINKING, EMPTY_THOUGHT, EMPTY_THOUGHT, EMPTY_THOUGHT),
    "qwen 3 for training": (of.QWEN_3_FOR_TRAINING, of.QWEN_MARKS, {}, None, None, None),
    "qwen 3 thinking": (of.QWEN_3_THINKING, of.QWEN_MARKS, {}, EMPTY_THOUGHT, None, "in another way later"),
    "llama 3.1": (of.LLAMA_3_1, of.LLAMA_MARKS, {}, None, None, None),
    "mistral 3": (of.MISTRAL_3, of.MISTRAL_MARKS, {}, None, None, TOOLS_MOVE),
    "gemma 2": (of.GEMMA_2, of.GEMMA_MARKS, {}, None, NOTHING, NOTHING),
    "deepseek 3": (of.DEEPSEEK_V3, of.DEEPSEEK_MARKS, {}, None, FIRST_CALL, FIRST_RESULT),
}

# What a policy of the family writes before an answer.
BEFORE = {"mistral 3": " ", "qwen 3 for training": "<think>\n\n</think>\n\n"}


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_in_the_manner_of(family):
    template, marks, keywords, *problems = FAMILIES[family]
    for schemas, replies, problem in zip(([], SCHEMAS, SCHEMAS), (True, False, True), problems, strict=True):
        tried = chat(template, marks, keywords)
        if problem is None:
            tried.check(schemas, replies=replies)
        else:
            with pytest.raises(ValueError, match=problem):
                tried.check(schemas, replies=replies)


@pytest.mark.parametrize("family", [name for name, (*_, replies, _, _) in FAMILIES.items() if replies is None])
def test_turns_and_replies_are_the_tokens_that_the_template_writes(family):
    template, marks, keywords, *_ = FAMILIES[family]
    partner, messages = chat(template, marks, keywords), [{"role": "user", "content": "Hello."}]
    tokenizer = partner.tokenizer
    ids = partner.prompt_ids(messages, [])
    for turn in range(3):
        said = f"I am {turn}."
        turn_of_policy = f"{BEFORE.get(family, '')}{said}{marks[0]}"
        ids += tokenizer(turn_of_policy, add_special_tokens=False)["input_ids"]
        reply = {"role": "user", "content": f"And {turn}?"}
        ids += partner.reply_ids([reply], stopped_by_token=True)
        messages += [{"role": "assistant", "content": said}, reply]
    assert ids == partner.prompt_ids(messages, [])


def test_thoughts_calls_and_results_are_the_tokens_that_the_template_writes():
    partner, messages = chat(of.QWEN_3, of.QWEN_MARKS, {}), [{"role": "user", "content": "2 + 3 + 4?"}]
    ids = partner.prompt_ids(messages, SCHEMAS)
    for turn, sums in enumerate([[(2, 3), (3, 4)], [(5, 4)]]):
        calls = [tool_call_entry("add", {"a": a, "b": b}, 2 * turn + i) for i, (a, b) in enumerate(sums)]
        results = [tool_message("add", str(a + b), 2 * turn + i) for i, (a, b) in enumerate(sums)]
        said = "<think>\nI need it.\n</think>\n\nI add."
        written = said + "".join(
            f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>' for a, b in sums
        )
        ids += partner.tokenizer(written + "<|im_end|>", add_special_tokens=False)["input_ids"]
        ids += partner.reply_ids(results, stopped_by_token=True, tool_calls=calls, schemas=SCHEMAS)
        messages += [{"role": "assistant", "content": said, "tool_calls": calls}, *results]
    assert partner.tokenizer.decode(ids) == partner.tokenizer.decode(partner.prompt_ids(messages, SCHEMAS))
    assert ids == partner.prompt_ids(messages, SCHEMAS)


def test_a_turn_goes_on_with_the_thought_that_the_prompt_begins():
    partner = chat(of.QWEN_3_THINKING, of.QWEN_MARKS, {})
    reply = partner.reply_ids(
        [tool_message("add", "5", 0)],
        stopped_by_token=True,
        tool_calls=[tool_call_entry("add", {"a": 2, "b": 3}, 0)],
        schemas=SCHEMAS,
    )
    written = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert partner.tokenizer.decode(reply) == written
