"""Distributional losses recover a distribution of two peaks from samples of it."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from alpaca_ppo.functional import (
    c51_atoms,
    c51_loss,
    cvar_from_categorical,
    cvar_from_quantiles,
    hl_gauss_centres,
    hl_gauss_loss,
    hl_gauss_value,
    quantile_huber_loss,
    quantile_midpoints,
)

pytestmark = pytest.mark.proof

# 40 % N(1, 0.2) and 60 % N(4, 0.4): mean 0.4 * 1 + 0.6 * 4 = 2.8.  With z(p) the standard normal's quantile:
# 25 % quantile: z(0.25 / 0.4 = 0.625) = 0.3186 -> 1 + 0.2 * 0.3186 = 1.064
# 50 %: z((0.5 - 0.4) / 0.6 = 0.1667) = -0.9674 -> 4 - 0.4 * 0.9674 = 3.613
# 75 %: z((0.75 - 0.4) / 0.6 = 0.5833) = 0.2104 -> 4 + 0.4 * 0.2104 = 4.084
# lower 10 %: the lower quarter of N(1, 0.2), 1 - 0.2 * density(z(0.25)) / 0.25 = 1 - 0.2 * 0.3178 / 0.25 = 0.746
MEAN, CVAR, QUARTILES = 2.8, 0.746, tensor([1.064, 3.613, 4.084])


def learn(table, loss_of, *, lr):
    """The `table` that 300 steps leave. A step moves a logit by at most `lr`: at a small one the bins that no return
    falls into, in the tails, keep some of the mass that they start with.
    """
    torch.manual_seed(0)
    shape = (8, 128)
    mask = torch.ones(shape, dtype=torch.bool)
    optimizer = torch.optim.Adam([table], lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 300)
    for _ in range(300):
        low, high = 1 + 0.2 * torch.randn(shape), 4 + 0.4 * torch.randn(shape)
        returns = torch.where(torch.rand(shape) < 0.4, low, high)
        optimizer.zero_grad()
        loss_of(table.expand(*shape, -1), returns, mask).loss.backward()
        optimizer.step()
        schedule.step()
    return table.detach()


def quantile_loss(quantiles, returns, mask):
    return quantile_huber_loss(quantiles, returns, quantile_midpoints(40), mask, kappa=0.05)


def test_learned_quantiles_recover_a_bimodal_distribution():
    start = torch.zeros(40, requires_grad=True)
    quantiles = learn(start, quantile_loss, lr=0.1)
    assert cvar_from_quantiles(quantiles, alpha=1.0).item() == pytest.approx(MEAN, rel=0.02)
    assert cvar_from_quantiles(quantiles, alpha=0.1).item() == pytest.approx(CVAR, rel=0.1)
    # the quantile at 1/4 lies between those at 9.5/40 and 10.5/40
    assert_close(quantiles[[9, 19, 29]] / 2 + quantiles[[10, 20, 30]] / 2, QUARTILES, rtol=0.05, atol=0)


def test_learned_categorical_distribution_recovers_a_bimodal_one():
    support = {"v_min": -1.0, "v_max": 6.0}
    atoms = c51_atoms(71, **support)
    start = torch.zeros(71, requires_grad=True)
    probs = learn(start, lambda *batch: c51_loss(*batch, **support), lr=0.4).softmax(-1)
    assert cvar_from_categorical(probs, atoms, alpha=1.0).item() == pytest.approx(MEAN, rel=0.02)
    assert cvar_from_categorical(probs, atoms, alpha=0.1).item() == pytest.approx(CVAR, rel=0.05)
    # the first atom with a quarter, a half, three quarters of the mass at or below it; atoms are 0.1 apart
    assert_close(atoms[torch.searchsorted(probs.cumsum(0), tensor([0.25, 0.5, 0.75]))], QUARTILES, rtol=0, atol=0.1)


def test_learned_hl_gauss_distribution_recovers_a_bimodal_one():
    # Smoothed by 0.075, a fraction of the deviations 0.2 and 0.4.
    support = {"v_min": -1.0, "v_max": 6.0}
    start = torch.zeros(70, requires_grad=True)
    logits = learn(start, lambda *batch: hl_gauss_loss(*batch, **support, sigma=0.075), lr=0.4)
    assert hl_gauss_value(logits, **support).item() == pytest.approx(MEAN, rel=0.02)
    centres = hl_gauss_centres(70, **support)
    assert cvar_from_categorical(logits.softmax(-1), centres, alpha=0.1).item() == pytest.approx(CVAR, rel=0.05)
    # The upper 10 %: the upper sixth of N(4, 0.4), 4 + 0.4 * density(0.9674) / (1/6) = 4 + 0.4 * 0.24987 * 6 = 4.600
    upper = cvar_from_categorical(logits.softmax(-1), centres, alpha=0.1, tail="upper")
    assert upper.item() == pytest.approx(4.6, rel=0.02)
