import math

import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from alpaca_ppo.functional import ROLLOUT_CORRECTION_LEVELS, rollout_correction_weights

# Token ratios old / rollout: 2 and 3 in the first row, 0.5 in the second, none in the third.
ROLLOUT = tensor([[-4.0, -4.0, nan], [nan, -4.0, nan], [nan, nan, nan]], dtype=torch.float64)
OLD = ROLLOUT + tensor([[2.0, 3.0, 1.0], [1.0, 0.5, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
MASK = tensor([[True, True, False], [False, True, False], [False, False, False]])


def weights_of(old=OLD, rollout=ROLLOUT, mask=MASK, **settings):
    return rollout_correction_weights(old, rollout, mask, **({"level": "token", "threshold": math.inf} | settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [2.0, 3.0, 0.5]),
        ({"threshold": 2.5}, [2.0, 2.5, 0.5]),
        # mean over the tokens after truncation: (2 + 2.5 + 0.5) / 3 = 5 / 3
        ({"threshold": 2.5, "normalize": True}, [1.2, 1.5, 0.3]),
        # 2 * 3 = 6 on both tokens
        ({"level": "sequence"}, [6.0, 6.0, 0.5]),
        ({"level": "sequence", "threshold": 2.5}, [2.5, 2.5, 0.5]),
        # mean over the two sequences that have tokens: (2.5 + 0.5) / 2 = 1.5
        ({"level": "sequence", "threshold": 2.5, "normalize": True}, [5 / 3, 5 / 3, 1 / 3]),
    ],
)
def test_weights_by_hand(settings, expected):
    first, second, third = expected
    weights = weights_of(**settings)
    assert_close(weights, tensor([[first, second, 0.0], [0.0, third, 0.0], [0.0] * 3], dtype=torch.float64))


def test_the_log_ratio_is_cut_at_twenty():
    mask = torch.ones(2, 2, dtype=torch.bool)
    old, rollout = tensor([[-1.0, -1.0], [-101.0, -1.0]]), tensor([[-101.0, -1.0], [-1.0, -1.0]])
    assert_close(weights_of(old, rollout, mask), tensor([[20.0, 0.0], [-20.0, 0.0]]).exp())
    # 15 + 15 = 30: the sum is cut, not its terms
    summed = weights_of(tensor([[-1.0, -1.0]]), tensor([[-16.0, -16.0]]), mask[:1], level="sequence")
    assert_close(summed, tensor([[20.0, 20.0]]).exp())


@pytest.mark.parametrize("level", ROLLOUT_CORRECTION_LEVELS)
def test_weights_have_no_gradient(level):
    old = OLD.clone().requires_grad_()
    assert not weights_of(old, level=level, normalize=True).requires_grad


@pytest.mark.parametrize("rows", [2, 0])
@pytest.mark.parametrize("level", ROLLOUT_CORRECTION_LEVELS)
def test_a_batch_without_tokens_has_weights_of_zero(level, rows):
    padding, mask = torch.full((rows, 3), nan), torch.zeros(rows, 3, dtype=torch.bool)
    weights = weights_of(padding, padding, mask, level=level, threshold=2.0, normalize=True)
    assert weights.shape == (rows, 3) and weights.eq(0).all()


@pytest.mark.parametrize("level", ROLLOUT_CORRECTION_LEVELS)
def test_half_precision_is_computed_in_float32_and_float64_stays(level):
    mask = torch.ones(1, 2, dtype=torch.bool)
    old, rollout = tensor([[-1.5, -1.0]]), tensor([[-1.25, -1.0]])
    narrow = weights_of(old.bfloat16(), rollout.bfloat16(), mask, level=level)
    assert_close(narrow, weights_of(old, rollout, mask, level=level))
    assert weights_of(old.double(), rollout.double(), mask, level=level).dtype == torch.float64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "row"}, "level is 'row'; it must be one of token, sequence"),
        ({"threshold": 0.0}, "threshold is 0.0; it must be positive"),
        ({"threshold": nan}, "threshold is nan; it must be positive"),
        ({"old": OLD[:, :2]}, r"mask has shape \(3, 3\), but values \(3, 2\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        weights_of(**settings)
