"""Every function against numbers that independent programs computed in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from alpaca_ppo import functional as F
from tests.golden_cases import GOLDEN, golden_cases


def whitened_gae(**inputs):
    estimated = F.gae(**inputs)
    return *estimated, F.masked_whiten(estimated.advantages, inputs["response_mask"])


def c51(logits, returns, response_mask, **support):
    atoms = F.c51_atoms(logits.size(-1), **support, dtype=torch.float64)
    loss = F.c51_loss(logits, returns, response_mask, **support).loss
    return F.c51_project(returns, atoms), loss, F.cvar_from_categorical(logits.softmax(-1), atoms, alpha=1.0)


def hl_gauss(logits, returns, response_mask, *, sigma, **support):
    targets = F.hl_gauss_project(returns, num_bins=logits.size(-1), sigma=sigma, **support)
    loss = F.hl_gauss_loss(logits, returns, response_mask, sigma=sigma, **support).loss
    return targets, loss, F.hl_gauss_value(logits, **support)


def quantile_huber(**inputs):
    return F.quantile_huber_loss(**inputs).loss, F.cvar_from_quantiles(inputs["quantiles"], alpha=1.0)


def logprobs_and_entropies(logits, labels, *, temperature):
    return F.token_logprobs(logits, labels, temperature=temperature), F.entropy_from_logits(logits / temperature)


def in_chunks(logits, labels, *, temperature):
    # With the identity for a head, hidden states are logits.
    head = torch.eye(logits.size(-1), dtype=logits.dtype)
    return F.chunked_logprobs(logits, head, labels, temperature=temperature, chunk_size=3)


LOSSES = ("policy", "gspo_policy", "cispo_policy", "sapo_policy", "gmpo_policy", "dppo_policy", "value")
CASES = [
    *((name, getattr(F, name)) for name in """
        aggregate_loss decoupled_gae gdpo_advantages group_advantages informative_rows kl_penalty length_adaptive_lam
        masked_mean masked_var masked_whiten overlong_penalty reinforce_plus_plus remax rollout_correction_weights
        shape_rewards""".split()),
    ("c51", c51),
    ("cvar_upper_categorical", partial(F.cvar_from_categorical, tail="upper")),
    ("cvar_upper_quantiles", partial(F.cvar_from_quantiles, tail="upper")),
    ("gae", whitened_gae),
    ("gae_per_row_lam", F.gae),
    ("grpo_passk", partial(F.group_advantages, estimator="grpo_passk")),
    ("hl_gauss", hl_gauss),
    ("positive_nll_loss", lambda **inputs: F.positive_nll_loss(**inputs).loss),
    ("qae", partial(F.group_advantages, estimator="qae")),
    ("quantile_huber", quantile_huber),
    ("token_logprobs", logprobs_and_entropies),
    ("token_logprobs", in_chunks),
    ("turn_gae", F.gae),
]  # fmt: skip


@pytest.mark.parametrize(("name", "function"), CASES)
def test_functions_match_golden(name, function):
    for inputs, expected in golden_cases(name):
        found = function(**inputs)
        for ours, theirs in zip([found] if isinstance(found, Tensor) else found, expected.values(), strict=True):
            assert_close(ours.double(), torch.as_tensor(theirs).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_their_gradients_and_stats_match_golden(name):
    leaf = "vpreds" if name == "value" else "logprobs"
    for inputs, expected in golden_cases(f"{name}_loss"):
        inputs[leaf].requires_grad_()
        loss, stats = getattr(F, f"{name}_loss")(**inputs)
        (grad,) = torch.autograd.grad(loss, inputs[leaf])
        assert_close(grad, expected.pop(f"grad_wrt_{leaf}"), rtol=0, atol=1e-6)
        found = {"loss": loss.item(), **{stat: value.item() for stat, value in stats.items()}}
        assert {number: found[number] for number in expected} == pytest.approx(expected, abs=1e-6)


def test_every_golden_file_is_read():
    elsewhere = {"adaptive_kl_horizon", "adaptive_kl_proportional"}
    read = {name for name, _ in CASES} | {f"{name}_loss" for name in LOSSES} | elsewhere
    assert read == {path.stem for path in GOLDEN.glob("*.json")}
