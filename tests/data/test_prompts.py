import json
from datetime import date
from decimal import Decimal

import pytest
from datasets import Dataset, DatasetDict, Features, Json
from tokenizers import normalizers

from alpaca_ppo.data import PromptForm, load_prompt_dataset, prepare_prompts
from tests.data.tokenizers import (
    CHAT_TEMPLATE,
    CHATML,
    byte_tokenizer,
    chat_tokenizer,
    framing_tokenizer,
    turn_tokenizer,
)
from tests.tiny_models import BOS, EOS, PAD, tiny_tokenizer

WORDS = ["one", "two", "three", "user", "assistant", "system", "named"]
ONE, TWO, THREE, USER, ASSISTANT, SYSTEM, NAMED = range(4, 11)


def prepare(rows, tokenizer=None, *, query_len=8, overlong="drop", **form):
    rows, tokenizer = Dataset.from_list(rows), tokenizer or tiny_tokenizer(WORDS)
    return prepare_prompts(rows, tokenizer, query_len=query_len, overlong=overlong, form=PromptForm(**form))


def test_the_row_of_a_text_prompt_has_every_column():
    prompts = prepare([{"prompt": "one two", "answer": "three", "id": 7}])
    assert len(prompts) == 1 and prompts.num_dropped == 0
    assert prompts[0] == {"input_ids": [ONE, TWO], "row": {"prompt": "one two", "answer": "three", "id": 7}}


def test_a_template_renders_the_prompt_that_rewards_see():
    prompts = prepare([{"question": "two", "prompt": "old"}], prompt_template="one {question} three")
    assert prompts[0] == {"input_ids": [ONE, TWO, THREE], "row": {"question": "two", "prompt": "one two three"}}


def test_alpaca_rows_are_recognized_without_an_option():
    rows = [{"instruction": "one", "input": ""}, {"instruction": "one", "input": "two"}]
    prompts = prepare(rows, byte_tokenizer(), query_len=400)
    assert prompts[0]["row"]["prompt"].endswith("### Instruction:\none\n\n### Response:")
    assert prompts[1]["row"]["prompt"].endswith("### Instruction:\none\n\n### Input:\ntwo\n\n### Response:")
    assert bytes_of(prompts[1]) == prompts[1]["row"]["prompt"].encode()
    assert prompts[1]["row"]["input"] == "two"


def test_overlong_prompts_are_dropped_and_counted_and_the_rest_keep_their_order():
    prompts = prepare([{"prompt": text} for text in ["one", "one two three", "two", "three two one"]], query_len=2)
    assert prompts.num_dropped == 2
    assert [(item["input_ids"], item["row"]["prompt"]) for item in prompts] == [([ONE], "one"), ([TWO], "two")]


SHOWS_TOOLS = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{% if think %}three {% endif %}" + CHAT_TEMPLATE
USES = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for key, value in c.function.arguments.items() %}"
    "{{ key }}{{ ' named' if value is none }} {% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_has_tools_and_template_arguments_of_its_own(as_text):
    tokenizer = chat_tokenizer(WORDS)
    tokenizer.chat_template = SHOWS_TOOLS
    written = json.dumps if as_text else (lambda value: value)
    messages = [{"role": "user", "content": "one"}]
    rows = [
        {"prompt": messages, "tools": written([{"name": "two"}]), "chat_template_kwargs": written({"think": False})},
        {"prompt": messages, "tools": None, "chat_template_kwargs": None},
    ]
    first, second = prepare(rows, tokenizer, query_len=9, chat_template_kwargs={"think": True})
    plain = [BOS, USER, ONE, EOS, BOS, ASSISTANT]
    assert (first["input_ids"], second["input_ids"]) == ([TWO, *plain], [THREE, *plain])
    for column, value, problem in (
        ("chat_template_kwargs", "fast", "row 0: column 'chat_template_kwargs' is 'fast'; make it a mapping"),
        ("chat_template_kwargs", '{"tokenize": true}', "row 0: chat_template_kwargs has 'tokenize'"),
        ("chat_template_kwargs", '{"thin": true}', "row 0: chat_template_kwargs has 'thin', which the .* never reads"),
        (
            "tools",
            "calculator, search",
            "row 0: column 'tools' is 'calculator, search'; make it a list of JSON schemas",
        ),
        ("tools", 3, "row 0: column 'tools' is 3; make it a list of JSON schemas of functions"),
        ("tools", ["calc"], r"row 0: column 'tools' is \['calc'\]; make it a list of JSON schemas of functions"),
        ("tools", '{"name": "two"}', "row 0: column 'tools' is {'name': 'two'}; make it a list of JSON schemas"),
    ):
        with pytest.raises(ValueError, match=problem):
            prepare([{"prompt": messages, column: value}], tokenizer)


def test_tools_of_a_row_and_of_the_run_exclude_each_other():
    tokenizer = chat_tokenizer(WORDS)
    tokenizer.chat_template = SHOWS_TOOLS
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "one"}], "tools": [{"name": "two"}]}])
    with pytest.raises(ValueError, match="row 0: column 'tools' is set, but the run has tools of its own"):
        prepare_prompts(rows, tokenizer, query_len=9, tools_of=lambda row: [{"name": "three"}])
    assert len(prepare_prompts(rows, tokenizer, query_len=9, tools_of=lambda row: [])) == 1


def test_tools_of_a_row_that_the_chat_template_would_not_write_are_refused():
    messages = [{"role": "user", "content": "one"}]
    rows = [{"prompt": messages, "tools": None}, {"prompt": messages, "tools": json.dumps([{"name": "two"}])}]
    problem = "row 1: column 'tools': the chat template writes nothing about tools; remove"
    with pytest.raises(ValueError, match=problem):
        prepare(rows, turn_tokenizer(CHATML, special=["<|im_start|>", "<|im_end|>"]), query_len=20)
    # What the template refuses has an error of its own.
    tokenizer = chat_tokenizer(WORDS)
    tokenizer.chat_template = SHOWS_TOOLS + "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match="the chat template refuses row 0"):
        prepare(rows[1:], tokenizer)


@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs"])
def test_a_column_for_the_chat_template_beside_a_prompt_that_is_text_is_refused(column):
    rows = [{"prompt": "one", column: None}, {"prompt": "two", column: '{"one": 1}'}]
    with pytest.raises(
        ValueError, match=f"row 1: column '{column}' is set, but the prompt is text; drop it, or write messages"
    ):
        prepare(rows)
    # Empty, or a part of the text.
    assert len(prepare(rows[:1])) == 1
    prompts = prepare([{"prompt": "one", column: "two"}], prompt_template=f"one {{{column}}}")
    assert prompts[0]["input_ids"] == [ONE, TWO]


def test_a_call_has_its_own_arguments_and_not_those_of_other_rows(tmp_path):
    tokenizer = chat_tokenizer(WORDS)
    tokenizer.chat_template = USES
    rows = [
        {"prompt": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
            {"role": "tool", "content": "one"},
        ]}
        for arguments in ({"two": 2, "one": None}, {"three": 3})
    ]  # fmt: skip
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    of_arrow = prepare_prompts(load_prompt_dataset(str(tmp_path / "rows.parquet")), tokenizer, query_len=9)
    assert [item["input_ids"] for item in of_arrow] == [[TWO], [THREE]]
    # JSON keeps what is written, and its null too.
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_json = prepare_prompts(load_prompt_dataset(str(tmp_path / "rows.jsonl")), tokenizer, query_len=9)
    assert [item["input_ids"] for item in of_json] == [[TWO, ONE, NAMED], [THREE]]


def test_a_null_in_a_tool_or_an_argument_of_the_template_is_kept_where_json_holds_it(tmp_path):
    tokenizer = chat_tokenizer(WORDS)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{% if 'default' in t.parameters %}one {% endif %}two {% endfor %}"
        "{% if think is defined and think is none %}three {% endif %}"
    )
    rows = [
        {
            "prompt": [{"role": "user", "content": "one"}],
            "tools": [{"name": "f", "parameters": parameters}],
            "chat_template_kwargs": keywords,
        }
        for parameters, keywords in (({"default": None, "enum": [1, "a"]}, {"think": None}), ({}, {"think": [1, "a"]}))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_json = prepare_prompts(load_prompt_dataset(str(tmp_path / "rows.jsonl")), tokenizer, query_len=9)
    assert [item["input_ids"] for item in of_json] == [[ONE, TWO, THREE], [TWO]]
    assert [item["row"]["tools"] for item in of_json] == [row["tools"] for row in rows]
    # Arrow gives a row the keys of others.
    for row in rows:
        row["tools"][0]["parameters"].pop("enum", None)
    rows[1]["chat_template_kwargs"]["think"] = "no"
    of_arrow = prepare_prompts(Dataset.from_list(rows[1:] + rows[:1]), tokenizer, query_len=9)
    assert [item["input_ids"] for item in of_arrow] == [[TWO], [TWO]]


@pytest.mark.parametrize("form", ["pandas", "numpy", "torch", "arrow"])
def test_an_output_format_and_a_choice_of_columns_change_no_prompt(form):
    messages = [{"role": "user", "content": "one"}]
    rows = Dataset.from_list([{"prompt": messages, "answer": 1}, {"prompt": messages, "answer": 2}])
    expected = list(prepare_prompts(rows, chat_tokenizer(WORDS), query_len=9))
    for formatted in (rows.with_format(form), rows.with_format(form, columns=["answer"])):
        assert list(prepare_prompts(formatted, chat_tokenizer(WORDS), query_len=9)) == expected
    changed = rows.with_transform(lambda batch: {**batch, "answer": [7] * len(batch["answer"])})
    assert prepare_prompts(changed, chat_tokenizer(WORDS), query_len=9)[1]["row"]["answer"] == 7
    stored = Dataset.from_list([{"q": messages, "a": 1, "image": "x"}, {"q": messages, "a": 2, "image": "y"}])
    made = stored.with_transform(lambda batch: {"prompt": batch["q"], "answer": batch["a"]})
    assert list(prepare_prompts(made, chat_tokenizer(WORDS), query_len=9)) == expected


def test_row_numbers_continue_across_chunks():
    rows = [{"prompt": "one", "id": i} for i in range(2100)]
    rows[3]["prompt"] = rows[1500]["prompt"] = "one two three"
    prompts = prepare(rows, query_len=2)
    assert len(prompts) == 2098 and prompts.num_dropped == 2
    assert [prompts[i]["row"]["id"] for i in (0, 3, 1498, 1499, 2097)] == [0, 4, 1499, 1501, 2099]
    with pytest.raises(ValueError, match="row 1500 has 3 tokens"):
        prepare([*rows[:3], *rows[4:5], *rows[4:]], query_len=2, overlong="error")


def bytes_of(item):
    return byte_tokenizer().decode(item["input_ids"]).encode()


@pytest.mark.parametrize(
    ("frame", "text", "expected"),
    [
        ("<bos> $A <eos>", "one", [BOS, ONE]),
        ("$A <eos>", "one two", [ONE, TWO]),
        ("<bos> $A", "one", [BOS, ONE]),
        # An eos or pad in the text itself stays; only an eos that the tokenizer appended is removed.
        ("<bos> $A <eos>", "one <eos>", [BOS, ONE, EOS]),
        ("<bos> $A", "one <eos>", [BOS, ONE, EOS]),
        ("$A", "one <pad> <eos> two <pad>", [ONE, PAD, EOS, TWO, PAD]),
    ],
)
def test_only_an_eos_that_the_tokenizer_appends_is_removed(frame, text, expected):
    assert prepare([{"prompt": text}], framing_tokenizer(WORDS, frame=frame))[0]["input_ids"] == expected


def test_messages_go_through_the_chat_template_with_the_generation_prompt():
    messages = [{"role": "system", "content": "two"}, {"role": "user", "content": "one"}]
    prompts = prepare([{"prompt": messages, "answer": "x"}], chat_tokenizer(WORDS), query_len=12)
    # One <bos> per turn, from the template: none is added at the start, and the eos of the last turn stays.
    assert prompts[0]["input_ids"] == [BOS, SYSTEM, TWO, EOS, BOS, USER, ONE, EOS, BOS, ASSISTANT]
    assert prompts[0]["row"] == {"prompt": messages, "answer": "x"}


def test_a_key_that_only_other_messages_have_is_removed():
    rows = [
        {"prompt": [{"role": "user", "content": "one"}]},
        {"prompt": [{"role": "user", "content": "two", "name": "three"}]},
    ]
    prompts = prepare(rows, chat_tokenizer(WORDS), query_len=12)
    assert prompts[0]["input_ids"] == [BOS, USER, ONE, EOS, BOS, ASSISTANT]
    assert prompts[1]["input_ids"] == [BOS, USER, TWO, EOS, NAMED, BOS, ASSISTANT]
    assert prompts[0]["row"]["prompt"] == rows[0]["prompt"]


def test_messages_without_a_chat_template_are_refused():
    with pytest.raises(ValueError, match="messages, but the tokenizer has no chat_template"):
        prepare([{"prompt": [{"role": "user", "content": "one"}]}])


@pytest.mark.parametrize("prompt", ["", " \n\t"])
def test_an_empty_prompt_is_refused_with_its_row(prompt):
    with pytest.raises(ValueError, match="prompt in row 1 is empty"):
        prepare([{"prompt": "one"}, {"prompt": prompt}])


def test_a_prompt_without_tokens_is_refused_with_its_row():
    tokenizer = tiny_tokenizer(WORDS)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    with pytest.raises(ValueError, match="prompt in row 1, '~', has no tokens"):
        prepare([{"prompt": "one"}, {"prompt": "~"}], tokenizer)


@pytest.mark.parametrize("prompt", [None, [], 5])
def test_a_missing_prompt_is_refused_with_its_row(prompt):
    with pytest.raises(ValueError, match=r"prompt in row 0 is (None|\[\]|5); pass text, or messages"):
        prepare([{"prompt": prompt}])


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "one"}, {"role": "user", "content": 3}, "one"])
def test_a_message_needs_role_and_content(message):
    with pytest.raises(ValueError, match="row 0 is .*role and content"):
        prepare([{"prompt": [message]}], chat_tokenizer(WORDS))


def test_messages_that_end_with_an_assistant_message_are_refused():
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    with pytest.raises(ValueError, match="row 0 end with the assistant's"):
        prepare([{"prompt": messages}], chat_tokenizer(WORDS))


def test_a_missing_prompt_column_is_refused_with_the_columns_found():
    with pytest.raises(ValueError, match=r"no column 'prompt'; its columns are \['question', 'answer'\]"):
        prepare([{"question": "one", "answer": "two"}])


def test_none_in_a_template_column_is_refused_with_row_and_column():
    with pytest.raises(ValueError, match="row 1: column 'question' is None"):
        prepare([{"question": "one"}, {"question": None}], prompt_template="{question}")


@pytest.mark.parametrize("rows", [[{"prompt": "one"}], DatasetDict({"train": Dataset.from_list([{"prompt": "one"}])})])
def test_anything_but_a_single_split_is_refused(rows):
    with pytest.raises(ValueError, match="pass one split as a datasets.Dataset"):
        prepare_prompts(rows, tiny_tokenizer(WORDS), query_len=4)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        prepare_prompts(Dataset.from_dict({"prompt": []}), tiny_tokenizer(WORDS), query_len=4)


ROWS = [{"prompt": "one two", "answer": "three", "id": i, "tags": {"b": [1, None], "a": 0.5}} for i in range(3)]


def fingerprint(rows, **options):
    return prepare(rows, **options).fingerprint


def test_the_fingerprint_depends_on_the_content_and_not_on_its_source(tmp_path):
    one = fingerprint(ROWS)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows")
    columns_turned = Dataset.from_list([dict(reversed(row.items())) for row in ROWS])
    others = [Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))]
    others += [Dataset.load_from_disk(str(tmp_path / "rows")), columns_turned]
    others += [Dataset.from_list([*ROWS, *ROWS]).select([3, 1, 5])]
    assert {prepare_prompts(data, tiny_tokenizer(WORDS), query_len=8).fingerprint for data in others[:3]} == {one}
    assert prepare_prompts(others[3], tiny_tokenizer(WORDS), query_len=8).fingerprint == one


@pytest.mark.parametrize("key", ["prompt", "answer", "id", "tags"])
def test_the_fingerprint_changes_with_every_column(key):
    other = {"prompt": "two one", "answer": "two", "id": 9, "tags": {"b": [1, 2], "a": 0.5}}[key]
    assert fingerprint([*ROWS[:2], ROWS[2] | {key: other}]) != fingerprint(ROWS)


def test_the_fingerprint_changes_with_order_number_and_tokens():
    one = fingerprint(ROWS)
    assert fingerprint(ROWS[::-1]) != one and fingerprint(ROWS[:2]) != one
    assert fingerprint(ROWS, tokenizer=tiny_tokenizer(WORDS[::-1])) != one
    assert fingerprint(ROWS, prompt_template="{prompt} {answer}") != one


def test_the_fingerprint_covers_bytes_dates_and_arrays():
    base = {"prompt": "one", "raw": b"\xff", "day": date(2026, 1, 2), "price": Decimal("1.50"), "numbers": [1, 2]}
    changes = {"raw": b"\xfe", "day": date(2026, 1, 3), "price": Decimal("1.51"), "numbers": [1, 3]}
    seen = {fingerprint([base | {key: value}]) for key, value in changes.items()} | {fingerprint([base])}
    assert len(seen) == 5

    def as_arrays(numbers):
        data = Dataset.from_list([{"prompt": "one", "numbers": numbers}])
        return data.with_format("numpy", columns=["numbers"], output_all_columns=True)

    arrays = [prepare_prompts(as_arrays(n), tiny_tokenizer(WORDS), query_len=8).fingerprint for n in ([1, 2], [1, 3])]
    assert arrays[0] != arrays[1]


def test_prompts_are_all_text_or_all_messages():
    message = [{"role": "user", "content": "one"}]
    features = Features({"prompt": Json()})
    for rows, message_of in (
        ([{"prompt": "one"}, {"prompt": message}], r"row 1 is \[\{.*, unlike row 0; make all"),
        ([{"prompt": message}, {"prompt": "one"}], "row 1 is 'one', unlike row 0; make all"),
        # The first row of the second thousand.
        ([{"prompt": "one"}] * 1000 + [{"prompt": message}], r"row 1000 is \[\{"),
    ):
        with pytest.raises(ValueError, match=message_of):
            prepare_prompts(Dataset.from_list(rows, features=features), chat_tokenizer(WORDS), query_len=9)


def test_a_row_that_the_chat_template_refuses_is_named():
    tokenizer = chat_tokenizer(WORDS)
    refuse = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    rows = [{"prompt": [{"role": role, "content": "one"}]} for role in ("user", "user", "system")]
    with pytest.raises(ValueError, match="the chat template refuses row 2, .*roles must alternate"):
        prepare(rows, tokenizer)
