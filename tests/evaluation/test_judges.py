"""Judges: scores and functions; and stored answers."""

import json

import pytest

from alpaca_ppo.evaluation.comparisons import FunctionJudge, compare, stored_answers

LONG, SHORT = "a much longer answer", "short"
PAIRS = [{"prompt": "p", "answer": "7"}, {"prompt": "q", "answer": "8"}], [LONG, SHORT], [SHORT, LONG]


def test_a_function_sees_both_orders_and_the_columns():
    calls = []

    def longer(prompts, completions, others, answer):
        calls.append((prompts, completions, answer))
        return [float(len(own) > len(other)) for own, other in zip(completions, others, strict=True)]

    assert FunctionJudge(longer, name="longer")(*PAIRS) == [1.0, 0.0]
    assert calls == [(["p", "q"], [LONG, SHORT], ["7", "8"]), (["p", "q"], [SHORT, LONG], ["7", "8"])]
    first = FunctionJudge(lambda prompts, completions, others, **columns: [1.0, None], name="first")
    assert first(*PAIRS) == [0.5, None]
    # A judge that gives the longer answer 1, and the shorter one 0.5 for its place: 1 and 1 - 0.5.
    unsure = iter([[1.0, None], [0.5, 1.0]])
    assert FunctionJudge(lambda **arguments: next(unsure), name="unsure")(*PAIRS) == [0.75, None]


def test_a_column_cannot_have_the_name_of_an_argument():
    with pytest.raises(ValueError, match="the dataset's column 'others' is an argument of eval_judge f; rename it"):
        FunctionJudge(lambda **arguments: [1.0], name="f")([{"prompt": "p", "others": "7"}], [LONG], [SHORT])


def test_equal_scores_are_half_a_win():
    assert [compare(2.0, 1.0), compare(1.0, 1.0), compare(0.0, 1.0)] == [1.0, 0.5, 0.0]
    # The rounding of float32 is a tie.
    assert [compare(1.0, 1.0 + 1e-7), compare(1.001, 1.0), compare(0.0, 1e-7), compare(0.0, 1e-3)] == [0.5, 1, 0.5, 0]


@pytest.mark.parametrize(
    ("verdicts", "message"), [([1.0], "eval_judge f returned .* for 2 pairs"), ([1.0, 2.0], "2.0. for 2 pairs")]
)
def test_a_function_must_return_a_verdict_for_each_pair(verdicts, message):
    with pytest.raises(ValueError, match=message):
        FunctionJudge(lambda **arguments: verdicts, name="f")(*PAIRS)


def test_stored_answers_come_from_a_column_or_a_file(tmp_path):
    rows = [{"prompt": "p", "gold": "1"}, {"prompt": [{"role": "user", "content": "q"}], "gold": "2"}]
    assert stored_answers("column:gold", rows) == ["1", "2"]
    path = tmp_path / "answers.jsonl"
    lines = [{"prompt": rows[1]["prompt"], "response": "b"}, {"prompt": "p", "response": "a"}]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"prompt": "p", "response": "second"}]))
    assert stored_answers(str(path), rows) == ["a", "b"]
    with pytest.raises(ValueError, match='does not answer "r"'):
        stored_answers(str(path), [{"prompt": "r"}])
    with pytest.raises(ValueError, match=r"row 0 has no text in it, only \['prompt', 'gold"):
        stored_answers("column:silver", rows)
    with pytest.raises(ValueError, match="no file in"):
        stored_answers("no/file.jsonl", rows)
    for line, what in (("{", "line 1 is no JSON"), ("3", "line 1 is no JSON"), ('{"prompt": "p"}', "as response")):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=f"answers.jsonl .*{what}"):
            stored_answers(str(path), rows)
    path.write_text('{"prompt": "p", "response": 3}')
    with pytest.raises(ValueError, match="a row without a text as response"):
        stored_answers(str(path), rows)


def test_stored_answers_may_hold_line_breaks_that_json_leaves_as_they_are(tmp_path):
    path = tmp_path / "answers.jsonl"
    line = json.dumps({"prompt": "p", "response": "a\u2028b\x85c"}, ensure_ascii=False)
    path.write_text(line + "\n", encoding="utf-8")
    assert stored_answers(str(path), [{"prompt": "p"}]) == ["a\u2028b\x85c"]
