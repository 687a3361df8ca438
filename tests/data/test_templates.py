import pytest

from alpaca_ppo.data import PROMPT_TEMPLATES, PromptForm

ALPACA = ["instruction", "input", "output"]


def template(text, columns):
    return PromptForm(prompt_template=text).resolved(columns, chat=False).template


def test_alpaca_template_has_the_published_wording_with_an_input():
    rendered = template("alpaca", ALPACA).render({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert rendered == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:"
    )


@pytest.mark.parametrize("row", [{"input": ""}, {"input": None}, {"input": " \n"}, {}])
def test_alpaca_template_omits_the_input_section_without_an_input(row):
    rendered = PROMPT_TEMPLATES["alpaca"].render({"instruction": "Sing.", **row})
    assert rendered == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSing.\n\n### Response:"
    )


def test_format_string_takes_any_columns_and_keeps_doubled_braces():
    found = template("{{json}} {question} ({level}) {question}", ["question", "level", "answer"])
    assert found.columns == ("question", "level")
    # Braces in a value are plain text.
    assert found.render({"question": "{x}²?", "level": 3}) == "{json} {x}²? (3) {x}²?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vicuna", "prompt_template 'vicuna' must name columns in braces.*, or be one of alpaca"),
        ("Q: {query}", "uses \\['query'\\], but the columns are \\['question', 'answer'\\]"),
        ("Q: {question", "not a valid format string .*double each literal brace"),
        ("Q: {}", "name columns in braces"),
        ("Q: {0}", "name columns in braces"),
        ("Q: {question.__class__}", "name columns in braces"),
        ("Q: {question[0]}", "name columns in braces"),
        ("Q: {question!r}", "name columns in braces"),
        ("Q: {question:>9}", "name columns in braces"),
        ("Q: {{question}}", "must name columns in braces"),
    ],
)
def test_an_invalid_template_is_refused_before_any_row_is_read(text, message):
    with pytest.raises(ValueError, match=message):
        template(text, ["question", "answer"])


@pytest.mark.parametrize("value", [0, False])
def test_an_input_that_counts_as_false_is_no_blank(value):
    rendered = PROMPT_TEMPLATES["alpaca"].render({"instruction": "Negate.", "input": value})
    assert f"### Input:\n{value}\n" in rendered
