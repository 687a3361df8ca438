"""Columns that become messages, and what a run says of its prompts; the exact text that a chat model reads."""

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from alpaca_ppo.data import PromptForm, introduction, prepare_prompts
from tests.data.tokenizers import CHATML, byte_tokenizer

SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"


def chat_model():
    """A byte-level tokenizer with ChatML, whose ids decode to the exact text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    return tokenizer


def user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def prepare(rows, tokenizer=None, *, query_len=1000, overlong="drop", **form):
    rows, tokenizer = Dataset.from_list(rows), tokenizer or chat_model()
    return prepare_prompts(rows, tokenizer, query_len=query_len, overlong=overlong, form=PromptForm(**form))


def texts(prompts):
    return [chat_model().decode(item["input_ids"]) for item in prompts]


def test_alpaca_rows_are_messages_for_a_chat_model_without_an_option():
    rows = [{"instruction": "Sing.", "input": ""}, {"instruction": "Add.", "input": "1 2"}]
    prompts = prepare(rows)
    assert texts(prompts) == [user("Sing.") + ANSWER, user("Add.\n1 2") + ANSWER]
    assert prompts[1]["row"] == {**rows[1], "prompt": [{"role": "user", "content": "Add.\n1 2"}]}
    with_system = prepare(rows, system_prompt="Be brief.")
    assert texts(with_system) == [SYSTEM + text for text in texts(prompts)]
    # A template that is written out stays text.
    (plain,) = texts(prepare(rows[:1], prompt_template="alpaca"))
    assert plain.startswith("Below is an instruction") and plain.endswith("### Instruction:\nSing.\n\n### Response:")


@pytest.mark.parametrize("blank", [None, "", " \n"])
def test_only_the_column_input_may_be_blank_in_a_users_message(blank):
    rows = [{"question": "1 + 1?", "input": blank}, {"question": "2 + 2?", "input": "Think."}]
    prompts = prepare(rows, system_prompt="Be brief.", user_template="{question}\n{input}")
    assert texts(prompts) == [SYSTEM + user(text) + ANSWER for text in ("1 + 1?", "2 + 2?\nThink.")]
    with pytest.raises(ValueError, match="column 'question' is None" if blank is None else "prompt in row 0 is empty"):
        prepare([{"question": blank}], user_template="{question}")
    # Alone, it is what a row has to have.
    with pytest.raises(ValueError, match="column 'input' is None" if blank is None else "prompt in row 0 is empty"):
        prepare(rows, user_template="{input}")


def test_a_system_prompt_comes_before_text_of_a_column_and_before_messages_without_their_own():
    assert texts(prepare([{"prompt": "Hi "}], system_prompt="Be brief.")) == [SYSTEM + user("Hi") + ANSWER]
    message, own = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be long."}
    prompts = prepare([{"prompt": [message]}, {"prompt": [own, message]}], system_prompt="Be brief.")
    assert texts(prompts) == [SYSTEM + user("Hi") + ANSWER, SYSTEM.replace("brief", "long") + user("Hi") + ANSWER]


def test_text_of_a_column_stays_as_it_is_written():
    rows = [{"prompt": user("Hi") + ANSWER}]
    assert texts(prepare(rows)) == [user("Hi") + ANSWER]


def test_a_users_message_is_refused_without_a_chat_template_and_with_unknown_columns():
    with pytest.raises(ValueError, match="the tokenizer has no chat_template"):
        prepare([{"question": "Hi"}], byte_tokenizer(), user_template="{question}")
    with pytest.raises(ValueError, match=r"user_template '\{query\}' uses \['query'\], but .* \['question'\]"):
        prepare([{"question": "Hi"}], user_template="{query}")
    with pytest.raises(ValueError, match=r"user_template 'alpaca' must name columns in braces"):
        prepare([{"question": "Hi"}], user_template="alpaca")


HINT = " without the tokenizer's chat template (user_template makes messages)"


@pytest.mark.parametrize(
    ("rows", "form", "line"),
    [
        ([{"prompt": "Hi\n"}], {}, f"prompts are text{HINT}, of prompt_column 'prompt'; the first: 'Hi\\n'"),
        ([{"q": "Hi"}], {"prompt_template": "{q}\n"}, f"text{HINT}, of prompt_template '{{q}}\\n'; the first: 'Hi\\n'"),
        # Marks of turns in a text are somebody's own chat template.
        ([{"prompt": user("Hi")}], {}, f"are text, of prompt_column 'prompt'; the first: {user('Hi')!r}"),
        ([{"instruction": "Hi"}], {}, "messages, of user_template '{instruction}\\n{input}'; the first: "),
        ([{"instruction": "Hi"}], {}, f"the first: {user('Hi') + ANSWER!r}"),
        ([{"prompt": "Hi " * 200}], {}, f"the first: '{'Hi ' * 66}Hi [...] {('Hi ' * 34)[-100:]}'"),
    ],
)
def test_a_run_says_what_makes_its_prompts_and_shows_the_first(rows, form, line):
    (said,) = introduction(prepare(rows, **form), chat_model())
    assert said.endswith(line) or line in said


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        ("Reply as {{input}}: {question}", {"question": "Hi"}, "Reply as {input}: Hi"),
        ("{{x}} {input} {question}", {"question": "Hi", "input": " "}, "{x}  Hi"),
        ("{question}: {input}", {"question": "Sum", "input": 0}, "Sum: 0"),
    ],
)
def test_doubled_braces_of_a_user_template_are_literal_beside_an_optional_input(template, row, text):
    assert texts(prepare([row], user_template=template)) == [user(text) + ANSWER]


@pytest.mark.parametrize("option", ["user_template", "prompt_template"])
def test_a_backslash_and_an_n_in_a_template_are_said_to_be_no_line_break(option):
    # What single quotes of a shell, and text without quotes in YAML, make of a line break.
    first, said = introduction(prepare([{"q": "Hi"}], **{option: r"{q}\nA:"}), chat_model())
    assert first.startswith("prompts are ") and said.startswith(f"{option} ") and r"$'...'" in said


def test_alpacas_template_for_a_model_without_chat_template_is_named():
    tokenizer = byte_tokenizer()
    (said,) = introduction(prepare([{"instruction": "Hi"}], tokenizer), tokenizer)
    assert said.startswith("prompts are text, of prompt_template 'alpaca'; the first: 'Below is an instruction")
    assert said.endswith("### Response:'")


@pytest.mark.parametrize(
    ("learned", "now", "then_and_now"),
    [
        # The mistake that made a quarter of all answers empty.
        ({"prompt_template": "Q: {q}\nA:\n"}, {"prompt_template": "Q: {q}\nA:"}, [r"'Q: …\nA:\n'", r"'Q: …\nA:'"]),
        ({"user_template": "{q}"}, {"prompt_template": "{q}"}, [repr(user("…") + ANSWER), "'…'"]),
        (
            {"user_template": "{q}"},
            {"user_template": "{q}", "system_prompt": "Be brief."},
            [repr(user("…") + ANSWER), repr(SYSTEM + user("…") + ANSWER)],
        ),
        # Another wording of the columns' names is none of the prompt's.
        ({"prompt_template": "{q}\n"}, {"prompt_template": "{p}\n"}, None),
        ({"user_template": "{q}"}, {"prompt_column": "p", "system_prompt": None}, [repr(user("…") + ANSWER), "'…'"]),
        ({"user_template": "{q}"}, {"prompt_column": "messages"}, None),
        ({"prompt_column": "q"}, {"prompt_column": "p"}, None),
        # What a column holds may have been written by the template, and then begins and ends as it does.
        ({"prompt_column": "q"}, {"prompt_template": "Q: {q}"}, None),
        ({"prompt_template": "Q: {q}\nA:"}, {"prompt_column": "written"}, None),
        ({"prompt_template": "Q: {q}\nA:\n"}, {"prompt_column": "written"}, [r"'Q: …\nA:\n'", "'…'"]),
        # A request of the user's own.
        ({"user_template": "{q}"}, {"user_template": "{q} Think."}, None),
        # ChatML by hand is what the chat template writes.
        ({"prompt_template": user("{q}") + ANSWER}, {"user_template": "{q}"}, None),
    ],
)
def test_prompts_that_are_written_otherwise_than_the_model_learned_are_reported(learned, now, then_and_now, tmp_path):
    row = {"q": "one", "p": "two", "messages": [{"role": "user", "content": "three"}], "written": "Q: four\nA:"}
    tokenizer = chat_model()
    assert len(introduction(prepare([row], **learned), tokenizer)) == 1
    prepare([row], **learned).record_wording(tokenizer)
    tokenizer.save_pretrained(tmp_path / "model")
    # Through another trainer's folder, as after reward modelling.
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "copy")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "copy")
    said = introduction(prepare([row], **now), loaded)[1:]
    if then_and_now is None:
        assert said == []
    else:
        then, here = then_and_now
        assert said == [
            f"the model was trained on prompts written {then}, but these are written {here} (…: their own text)"
        ]


def test_a_difference_at_the_end_of_a_long_template_is_shown():
    tokenizer = chat_model()
    prepare([{"instruction": "Hi"}], prompt_template="{instruction} " + "x" * 900 + " y\n").record_wording(tokenizer)
    said = prepare([{"instruction": "Hi"}], prompt_template="{instruction} " + "x" * 900 + " y").other_wording(
        tokenizer
    )
    assert f"written '{'x' * 28} y\\n', but these are written '{'x' * 28} y'" in said


def test_a_date_in_the_chat_template_is_no_difference():
    tokenizer = chat_model()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}" + CHATML
    prompts = prepare([{"q": "Hi"}], tokenizer, user_template="{q}")
    prompts.record_wording(tokenizer)
    assert prompts.wording == "%d %b %Y %H:%M:%S.%f" + user("…") + ANSWER
    assert "%d" not in texts(prompts)[0]
    assert prepare([{"q": "Hi"}], tokenizer, user_template="{q}").other_wording(tokenizer) == ""


def test_the_lengths_of_prompts_that_are_all_too_long_are_told_with_what_wrote_them():
    rows = [{"q": "x" * n} for n in (3, 9, 5)]
    with pytest.raises(
        ValueError,
        match=r"all 3 prompts of prompt_template '\{q\}' .* query_len \(2\): the shortest 3, the "
        "median 5, the longest 9; raise query_len",
    ):
        prepare(rows, query_len=2, prompt_template="{q}")
