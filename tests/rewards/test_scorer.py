import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.rewards import RewardError, build_reward

PROMPTS = ["a", "b", "c"]
COMPLETIONS = ["A", "B", "C"]
IDS = [[5, 6, 2], [2], [7, 2]]
ROWS = [{"prompt": p} for p in PROMPTS]


def gives(*scores, name="source"):
    def source(**columns):
        return list(scores)

    source.__name__ = name
    return source


def score(*functions, **options):
    return build_reward(list(functions), **options)(PROMPTS, COMPLETIONS, IDS, ROWS)


def test_rewards_are_the_weighted_sum_of_the_sources():
    result = score(gives(1.0, 2.0, 3.0, name="first"), gives(0.5, 0.0, -1.0, name="second"), reward_weights=[2, -4.0])
    # 2 * 1 - 4 * .5 = 0;  2 * 2 - 0 = 4;  2 * 3 + 4 = 10
    assert_close(result.rewards, torch.tensor([0.0, 4.0, 10.0]))
    assert_close(result.by_source["first"], torch.tensor([1.0, 2.0, 3.0]))
    assert_close(result.by_source["second"], torch.tensor([0.5, 0.0, -1.0]))


def test_none_is_left_out_of_the_sum_and_is_nan_in_its_source():
    result = score(gives(1.0, None, 3.0, name="first"), gives(None, 2.0, 1.0, name="second"))
    assert_close(result.rewards, torch.tensor([1.0, 2.0, 4.0]))
    assert_close(result.by_source["second"], torch.tensor([math.nan, 2.0, 1.0]), equal_nan=True)


def test_the_score_of_a_row_without_tokens_beside_token_scores_is_its_first_entry():
    build = build_reward([gives([], [0.5, 0.5], name="tokens"), gives(2.0, 3.0, name="whole")])
    rewards = build(PROMPTS[:2], COMPLETIONS[:2], [[], [1, 2]], ROWS[:2]).rewards
    assert_close(rewards, torch.tensor([[2.0, 0.0], [0.5, 3.5]]))


def test_token_scores_go_to_their_tokens_and_sequence_scores_to_the_last():
    tokens = gives([0.1, 0.2, 0.3], [0.4], None, name="tokens")
    result = score(tokens, gives(1.0, 2.0, 3.0, name="whole"), reward_weights=[10.0, 1.0])
    # Row 0: 1, 2, 3 + 1.  Row 1: 4 + 2.  Row 2 has two tokens and only the sequence's score.
    assert_close(result.rewards, torch.tensor([[1.0, 2.0, 4.0], [6.0, 0.0, 0.0], [0.0, 3.0, 0.0]]))
    assert_close(result.by_source["tokens"], torch.tensor([0.6, 0.4, math.nan]), equal_nan=True)


@pytest.mark.parametrize(
    "scores",
    [
        (1, True, 2.5),
        torch.tensor([1.0, 1.0, 2.5]),
        np.array([1.0, 1.0, 2.5], dtype=np.float16),
        [torch.tensor(1), np.float32(1.0), np.bool_(True) * 2.5],
        [np.int64(1), np.bool_(True), torch.tensor(2.5, dtype=torch.bfloat16)],
    ],
)
def test_scores_come_as_any_kind_of_number(scores):
    assert_close(score(lambda **columns: scores).rewards, torch.tensor([1.0, 1.0, 2.5]))


def test_token_scores_come_as_tensors_and_arrays():
    result = score(gives(torch.tensor([1.0, 2.0, 3.0]), np.array([4]), (5, 6)))
    assert_close(result.rewards, torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 6.0, 0.0]]))


def test_a_batch_without_rows_has_no_rewards_and_calls_no_function():
    def never(**columns):
        raise AssertionError("called without rows")

    result = build_reward(never)([], [], [], [])
    assert result.rewards.shape == (0,) and result.by_source["never"].shape == (0,)


def test_sources_of_equal_name_are_numbered_and_errors_use_the_number():
    with pytest.raises(RewardError, match="reward source 'source_3' returned 2 scores"):
        score(gives(1.0, 2.0, 3.0), gives(1.0, 2.0, 3.0), gives(1.0, 2.0))


@pytest.mark.parametrize(
    ("scores", "message", "row"),
    [
        ([1.0, math.nan, 1.0], "returned nan, which is not finite in float32", 1),
        ([1.0, 1.0, -math.inf], "returned -inf, which is not finite", 2),
        ([1e39, 1.0, 1.0], r"returned 1e\+39, which is not finite", 0),
        ([10**400, 1.0, 1.0], "which is not finite", 0),
        ([[1.0, math.nan, 0.0], 1.0, 1.0], "returned nan, which is not finite", 0),
        ([1.0, "2", 1.0], "returned '2', a str and not a number", 1),
        ([1.0, 1.0, [None, 1.0]], "returned None, a NoneType and not a number", 2),
        ([1.0, 1.0, 1j], "a complex and not a number", 2),
        ([[1.0, 1.0], 1.0, 1.0], "returned 2 token scores for 3 response tokens", 0),
        ([1.0, None, 1.0], "returned None; a row needs a score from some source", 1),
    ],
)
def test_an_unusable_score_names_source_row_and_text(scores, message, row):
    with pytest.raises(RewardError, match=message) as caught:
        score(gives(*scores, name="judge"))
    assert (caught.value.source, caught.value.row) == ("judge", row)
    assert str(caught.value).startswith("reward source 'judge' ")
    assert str(caught.value).endswith(f"on row {row}\n  prompt: {PROMPTS[row]!r}\n  completion: {COMPLETIONS[row]!r}")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], "returned 2 scores for 3 responses"),
        ([1.0] * 4, "returned 4 scores for 3 responses"),
        (1.0, "returned a float instead of a list of 3 numbers"),
        (torch.tensor(1.0), "returned a float instead of a list"),
        (None, "returned a NoneType instead of a list"),
        ({"score": 1.0}, "returned a dict instead of a list"),
        ("abc", "returned a str instead of a list"),
    ],
)
def test_a_result_that_is_not_a_list_of_scores_is_refused(result, message):
    with pytest.raises(RewardError, match=f"source 'lambda' {message}.*, on a batch of 3 rows"):
        score(lambda **columns: result)


def test_a_row_that_no_source_scores_is_refused_with_the_names_of_all():
    with pytest.raises(RewardError, match="reward source 'one, two' returned None.*, on row 0"):
        score(gives(None, 1.0, 1.0, name="one"), gives(None, None, 1.0, name="two"))


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        build_reward(gives(1.0))(PROMPTS, COMPLETIONS[:2], IDS, ROWS)


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_with_the_name_of_an_argument_is_refused(name):
    with pytest.raises(ValueError, match=rf"columns \['{name}'\] have the names of arguments .*rename"):
        build_reward(gives(1.0))(["a"], ["A"], [[1]], [{"prompt": "a", name: 1}])


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ([gives(1.0)], {"reward_weights": [1.0, 2.0]}, "reward_weights has 2 entries for 1 reward_funcs"),
        ([gives(1.0)], {"reward_processing_classes": [None, None]}, "has 2 entries for 1 reward_funcs"),
        ([3.0], {}, "metric_funcs has 3.0"),
        ([torch.nn.Linear(2, 1)], {}, "metric_funcs has Linear.*use a function, a classifier"),
        (["no_such_module:judge"], {}, "no module 'no_such_module'"),
    ],
)
def test_bad_sources_are_refused_when_the_scorer_is_built(functions, options, message):
    with pytest.raises(ValueError, match=message):
        build_reward(functions, **options)


def test_a_number_of_many_digits_is_refused_in_words():
    with pytest.raises(RewardError, match="returned a number of 20001 bits, which is not finite in float32"):
        score(lambda **columns: [0.0, 2**20000, 0.0])
