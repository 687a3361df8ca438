"""The demonstration that critics learn return distributions: true values, results of shorter runs, table and figure."""

import math

import pytest
import torch
from torch.testing import assert_close

from examples.critics import return_distributions
from examples.critics.distributions import DISTRIBUTIONS, QUARTILES, TAIL
from examples.critics.return_distributions import KINDS, DistributionReward, predict, train_critic

pytestmark = pytest.mark.proof

LEVELS = torch.tensor(QUARTILES, dtype=torch.float64)


@pytest.fixture(scope="module", params=KINDS)
def learned(request, tmp_path_factory):
    """The kind of a critic, and what it predicts for each distribution after a short run."""
    # A low quantile that is too low rises only by the small weight of its level. In an iqn critic all levels share
    # their parameters as well, so it needs the full run. A mean is found sooner.
    steps = {"iqn": return_distributions.STEPS, "scalar": 25}.get(request.param, 50)
    critic = train_critic(request.param, tmp_path_factory.mktemp(request.param), seed=0, steps=steps)
    return request.param, {name: predict(critic, name) for name in DISTRIBUTIONS}


def test_every_critic_learns_the_mean_within_five_percent(learned):
    _, predictions = learned
    for name, distribution in DISTRIBUTIONS.items():
        assert predictions[name].mean == pytest.approx(distribution.tail_mean(1.0), rel=0.05), name


def test_every_distributional_critic_learns_the_lowest_tenth(learned):
    kind, predictions = learned
    # The levels of an iqn critic are embedded by 64 cosines, with which single ones are off by chance.
    within = 0.15 if kind == "iqn" else 0.1
    for name, distribution in DISTRIBUTIONS.items():
        if kind == "scalar":
            assert predictions[name].tail_mean is None
        else:
            assert predictions[name].tail_mean == pytest.approx(distribution.tail_mean(TAIL), rel=within), name


def test_the_true_values_equal_the_closed_forms():
    # N(m, s): quartiles m -+ 0.67449 s; mean of the lower tenth m - s * density(-1.28155) / 0.1 = m - 1.75498 s.
    steady, gamble, costly = (DISTRIBUTIONS[name] for name in ("steady", "gamble", "costly"))
    assert_close(steady.quantiles(LEVELS), 3 + 0.5 * torch.tensor([-0.67449, 0, 0.67449]).double(), rtol=0, atol=1e-5)
    assert steady.tail_mean(0.1) == pytest.approx(3 - 0.5 * 1.75498, abs=1e-4)
    # 0.2 * -1 + 0.8 * 4 = 3. The lower tenth is the lower half of N(-1, 0.4): -1 - 0.4 * sqrt(2 / pi).
    assert gamble.tail_mean(1.0) == pytest.approx(3.0, abs=1e-4)
    assert gamble.tail_mean(0.1) == pytest.approx(-1 - 0.4 * math.sqrt(2 / math.pi), abs=1e-4)
    # Variance within the components 0.2 * 0.4^2 + 0.8 * 0.6^2 = 0.32, between them 0.2 * 0.8 * 5^2 = 4.
    assert gamble.deviation() == pytest.approx(math.sqrt(4.32), rel=1e-3)
    # -1 - Exp(1) at level tau is -1 + log(tau); mean of the lower tenth -1 - (1 + log 10).
    assert_close(costly.quantiles(LEVELS), LEVELS.log() - 1)
    assert costly.tail_mean(0.1) == pytest.approx(-2 - math.log(10), rel=1e-4)


def test_scores_follow_the_distribution_of_each_prompt_and_the_seed():
    prompts = ["play steady", "play gamble", "play costly"] * 4000
    scores = torch.tensor(DistributionReward(0)(prompts, [""] * len(prompts))).view(-1, 3)
    for name, drawn in zip(DISTRIBUTIONS, scores.T, strict=True):
        # Three standard errors.
        assert float(drawn.mean()) == pytest.approx(
            DISTRIBUTIONS[name].tail_mean(1.0), abs=3 * DISTRIBUTIONS[name].deviation() / 63
        )
        below = (drawn.unsqueeze(1) < DISTRIBUTIONS[name].quantiles(LEVELS)).double().mean(dim=0)
        assert_close(below, LEVELS, rtol=0, atol=0.024)
    assert DistributionReward(0)(prompts[:9], [""] * 9) == DistributionReward(0)(prompts[:9], [""] * 9)
    assert DistributionReward(0)(prompts[:9], [""] * 9) != DistributionReward(1)(prompts[:9], [""] * 9)
