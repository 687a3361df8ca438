import pytest

from alpaca_ppo.rewards import RewardError, build_reward
from examples.rewards.gsm8k import correctness, well_formed

SOLUTION = "She has 3 + 4 = <<3+4=7>>7 eggs.\n#### "


RIGHT = [("7", "7"), ("$1,234", "1234"), ("1234", "1,234"), ("7.", "7"), ("7.00", "7"), ("0.5", ".5"), ("-$7", "-7")]
# Only the last result counts.
RIGHT += [("$-7", "-7"), ("$ 7 dollars", "7"), ("8\nNo.\n#### 7", "7")]
# An #### without a number has no result.
WRONG = [("8", "7"), ("7.5", "7"), ("-7", "7"), ("77", "7"), ("seven", "7"), ("", "7"), ("7\n####", "7")]
WRONG += [("7\nNo.\n#### 8", "7"), ("123456789012345678901", "123456789012345678902")]


def test_correctness_compares_the_numbers_after_the_last_hashes():
    for cases, expected in ((RIGHT, 1.0), (WRONG, 0.0)):
        completions = [SOLUTION + written for written, _ in cases]
        answers = [f"Work.\n#### {answer}" for _, answer in cases]
        assert correctness(completions=completions, answer=answers) == [expected] * len(cases)


def test_correctness_is_zero_without_hashes():
    assert correctness(completions=["The answer is 7"], answer=["#### 7"]) == [0.0]


def test_correctness_finds_the_answer_in_the_extra_info_of_verls_files():
    rows = [{"answer": "3 + 4 = 7\n#### 7", "split": "train"}] * 2
    assert correctness(completions=[SOLUTION + "7", SOLUTION + "8"], extra_info=rows) == [1.0, 0.0]
    with pytest.raises(ValueError, match="no column answer, and no extra_info"):
        correctness(completions=["7"])


def test_an_answer_without_a_result_is_refused_with_its_row():
    scorer = build_reward(correctness)
    rows = [{"prompt": "a", "answer": "#### 1"}, {"prompt": "b", "answer": "two"}]
    with pytest.raises(
        RewardError, match="'correctness' raised ValueError: the answer has no '#### number': 'two'; .*, on row 1"
    ):
        scorer(["a", "b"], ["#### 1", "#### 2"], [[1], [1]], rows)


def test_well_formed_requires_exactly_one_result_line_at_the_end():
    right = ["Work.\n#### 7", "#### 7", "Work.\n#### -1,234.50\n", "Work.\n#### 7 "]
    ends = [" #### 7", "\n####7", "\n#### seven", "\n####", "\n#### $7", "\n#### 7 eggs", "\n#### 7.", "\n#### 1,23"]
    ends += ["\n#### 7\nMore.", "\n#### 7\n#### 7", "\n##### 7", "\n####\n7"]
    assert well_formed(completions=right) == [1.0] * 4
    assert well_formed(completions=["", *(f"Work.{end}" for end in ends)]) == [0.0] * 13


def test_both_accept_messages():
    completions = [[{"role": "assistant", "content": "Work.\n#### 7"}], [{"role": "assistant", "content": "7"}]]
    assert well_formed(completions=completions) == [1.0, 0.0]
    assert correctness(completions=completions, answer=["#### 7", "#### 7"]) == [1.0, 0.0]


@pytest.mark.parametrize("spec", ["examples.rewards.gsm8k:{}", "examples/rewards/gsm8k.py:{}"])
def test_both_are_found_by_module_and_by_file(spec, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    scorer = build_reward([spec.format("correctness"), spec.format("well_formed")], reward_weights=[1.0, 0.25])
    result = scorer(["a"], ["#### 7"], [[1, 2]], [{"prompt": "a", "answer": "#### 7"}])
    assert list(result.by_source) == ["correctness", "well_formed"] and result.rewards.tolist() == [1.25]
