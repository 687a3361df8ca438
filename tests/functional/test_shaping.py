import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import (
    last_token_index,
    overlong_penalty,
    register_kl_estimator,
    response_lengths,
    shape_rewards,
)
from alpaca_ppo.functional.shaping import per_token
from tests.registered import temporary_choices

HOLED = tensor([[True, False, True, False], [True, True, False, False]])


def test_a_length_reaches_to_the_last_true_over_holes():
    mask = torch.cat([HOLED, torch.zeros(1, 4, dtype=torch.bool)])
    assert response_lengths(mask).tolist() == [3, 2, 0]
    assert last_token_index(mask).tolist() == [2, 1, -1]


def test_the_reward_of_a_response_goes_to_its_last_chosen_token():
    mask = tensor([[True, True, False], [True, False, True]])
    assert per_token(tensor([1.0, 3.0]), mask).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 3.0]]
    assert per_token(torch.eye(2, 3), mask).tolist() == torch.eye(2, 3).tolist()


def test_shape_rewards_by_hand():
    # kl = (-0.12 + 0.15, -0.08 + 0.10) = (0.03, 0.02); times -0.01; the score on the last token
    logprobs, ref_logprobs = tensor([[-0.12, -0.08]]), tensor([[-0.15, -0.10]])
    shaped = shape_rewards(tensor([1.0]), logprobs, ref_logprobs, torch.ones(1, 2, dtype=torch.bool), kl_coef=0.01)
    assert_close(shaped.shaped_rewards, tensor([[-0.0003, 0.9998]]))
    assert_close(shaped.non_score_rewards, tensor([[-0.0003, -0.0002]]))
    assert_close(shaped.kl, tensor([[0.03, 0.02]]))


def test_the_score_is_on_the_last_masked_token_not_after_it():
    zeros = torch.zeros(2, 4)
    shaped = shape_rewards(tensor([5.0, 7.0]), zeros, zeros, HOLED, kl_coef=0.1)
    assert_close(shaped.shaped_rewards, tensor([[0.0, 0, 5, 0], [0, 7, 0, 0]]))


def test_scores_of_tokens_are_added_token_by_token_inside_the_mask():
    zeros = torch.zeros(2, 4)
    scores = tensor([[1.0, nan, 2.0, nan], [3.0, 4.0, nan, 9.0]])
    shaped = shape_rewards(scores, zeros + 1, zeros, HOLED, kl_coef=0.5)
    assert_close(shaped.shaped_rewards, tensor([[0.5, 0, 1.5, 0], [2.5, 3.5, 0, 0]]))


def test_gradients_match_finite_differences():
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2,), (2, 4), (2, 4))]
    assert gradcheck(lambda *x: shape_rewards(*x, HOLED, kl_coef=0.3, kl_estimator="k3"), inputs)


def test_a_registered_estimator_makes_the_penalty_inside_the_mask_alone():
    zeros = torch.zeros(2, 4)
    with temporary_choices():
        register_kl_estimator("shifted")(lambda difference: difference + 3)
        shaped = shape_rewards(tensor([5.0, 7.0]), zeros + 1, zeros, HOLED, kl_coef=0.1, kl_estimator="shifted")
    # 1 - 0 + 3 = 4 on each masked token, times -0.1; the scores on the last ones.
    assert_close(shaped.kl, tensor([[4.0, 0, 4, 0], [4, 4, 0, 0]]))
    assert_close(shaped.shaped_rewards, tensor([[-0.4, 0, 4.6, 0], [-0.4, 6.6, 0, 0]]))


def test_half_precision_gives_float32():
    logprobs = torch.zeros(2, 4, dtype=torch.bfloat16)
    shaped = shape_rewards(tensor([1.0, 2.0], dtype=torch.bfloat16), logprobs, logprobs, HOLED, kl_coef=0.1)
    assert all(result.dtype == torch.float32 for result in shaped)


def test_a_row_without_a_token_is_refused_by_number():
    mask = HOLED.clone()
    mask[1] = False
    with pytest.raises(ValueError, match=r"no token in rows \[1\] of 2"):
        shape_rewards(torch.ones(2), torch.zeros(2, 4), torch.zeros(2, 4), mask, kl_coef=0.1)


def test_scores_of_another_shape_are_refused():
    with pytest.raises(
        ValueError, match=r"scores has shape \(3,\); it must be \(2,\), one score for each response, or \(2, 4\)"
    ):
        shape_rewards(torch.ones(3), torch.zeros(2, 4), torch.zeros(2, 4), HOLED, kl_coef=0.1)


def test_the_overlong_penalty_grows_over_the_buffer():
    # Nothing up to 8 of 10, then a half each.
    lengths = tensor([0, 8, 9, 10, 11, 500])
    expected = tensor([0.0, 0.0, -1.0, -2.0, -2.0, -2.0])
    assert_close(overlong_penalty(lengths, max_len=10, buffer_len=2, factor=2.0), expected)
    assert overlong_penalty(lengths.double(), max_len=10, buffer_len=10).tolist() == [0, -0.8, -0.9, -1, -1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_len": 0}, r"buffer_len is 0; it must be at least 1 and at most max_len \(10\)"),
        ({"buffer_len": 11}, "buffer_len is 11"),
        ({"buffer_len": 2, "factor": -1.0}, "factor is -1.0; it must be a number of at least 0"),
        ({"buffer_len": 2, "factor": nan}, "factor is nan"),
    ],
)
def test_an_overlong_penalty_that_is_none_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(tensor([3]), max_len=10, **options)
