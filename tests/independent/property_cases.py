"""Random batches for the property-based tests, and the functions of `alpaca_ppo.functional` that they are put through.

A batch is a dictionary of float64 tensors: (B,) one number for each row, (B, R) one for each token, (B, R, K) several.
What differs from batch to batch (shapes, masks with holes and empty rows, groups, ties, magnitudes) is drawn by
Hypothesis, so that a failure is shrunk to a small one; the numbers come from a generator that it seeds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from alpaca_ppo import functional as F
from alpaca_ppo.registry import KL_ESTIMATORS

Batch = dict[str, Tensor]
Strategy = st.SearchStrategy[Any]

PER_TOKEN = ("rewards", "values", "logprobs", "old_logprobs", "ref_logprobs", "advantages", "returns", "old_values")
WIDTH = 3
"""K, of logits and quantiles."""


def examples(count: int, *, shrink: bool = True) -> Any:
    """A decorator: `count` examples, the same in every run; none is kept on the disk. Without `shrink`, the first
    failure is reported as it is: with slow examples, the search for a smaller one takes minutes.
    """
    phases = (Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else []))
    # On a loaded machine anything is slow.
    slow = [HealthCheck.too_slow]
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, phases=phases, suppress_health_check=slow
    )


@st.composite
def batches(draw: Callable[[Strategy], Any], *, empty_rows: bool = True, max_rows: int = 5) -> Batch:
    """A batch of up to `max_rows` rows and four tokens; at least one token counts, in each row unless `empty_rows`."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, 4))
    bits = st.lists(st.booleans(), min_size=columns, max_size=columns)
    bits = bits if empty_rows else bits.filter(any)
    mask = torch.tensor(draw(st.lists(bits, min_size=rows, max_size=rows).filter(lambda m: any(map(any, m)))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    whole, scale = draw(st.booleans()), draw(st.sampled_from([1.0, 0.01, 300.0]))

    def numbers(*shape: int, size: float = 1.0) -> Tensor:
        values = torch.randn(*shape, dtype=torch.float64, generator=generator)
        # Whole numbers have ties, and exact zeros.
        return size * (values.mul(1.5).round() if whole else values)

    batch = {name: numbers(rows, columns) for name in PER_TOKEN}
    batch |= {name: numbers(rows, columns, size=scale) for name in ("rewards", "values", "returns", "old_values")}
    batch |= {name: numbers(rows, size=scale) for name in ("scores", "baseline_scores")}
    batch["vpreds"] = batch["old_values"] + 0.3 * numbers(rows, columns, size=scale)
    batch["weights"] = numbers(rows, columns).abs() + 0.1
    batch |= {name: numbers(rows, columns, WIDTH) for name in ("logits", "quantiles")}
    batch["row_lam"] = torch.rand(rows, dtype=torch.float64, generator=generator)
    batch["group_ids"] = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    batch["mask"] = mask
    return batch


Estimate = Callable[[Batch], dict[str, Tensor]]
"""From a batch to named results, (B,) or (B, R) each, zero outside the mask."""


def _gae(gamma: float, lam: float | None, *, whiten: bool = False) -> Estimate:
    def estimate(b: Batch) -> dict[str, Tensor]:
        result = F.gae(b["rewards"], b["values"], b["mask"], gamma=gamma, lam=b["row_lam"] if lam is None else lam)
        advantages = F.masked_whiten(result.advantages, b["mask"]) if whiten else result.advantages
        return {"advantages": advantages, "returns": result.returns}

    return estimate


def _adaptive(b: Batch) -> dict[str, Tensor]:
    lam = F.length_adaptive_lam(b["mask"], alpha=0.6)
    return F.decoupled_gae(b["rewards"], b["values"], b["mask"], gamma=0.9, lam_policy=lam, lam_critic=1.0)._asdict()


def _gdpo(b: Batch) -> dict[str, Tensor]:
    sources, weights = torch.stack([b["scores"], b["baseline_scores"]], dim=1), torch.tensor([1.0, -0.5])
    return {"advantages": F.gdpo_advantages(sources, weights, b["group_ids"], b["mask"], penalties=0.1 * b["scores"])}


def _group(estimator: str) -> Estimate:
    return lambda b: {"advantages": F.group_advantages(b["scores"], b["group_ids"], b["mask"], estimator=estimator)}


def _shaping(estimator: str, scores: str) -> Estimate:
    return lambda b: F.shape_rewards(
        b[scores], b["logprobs"], b["ref_logprobs"], b["mask"], kl_coef=0.3, kl_estimator=estimator
    )._asdict()


def _correction(level: str, normalize: bool) -> Estimate:
    return lambda b: {
        "weights": F.rollout_correction_weights(
            b["logprobs"], b["old_logprobs"], b["mask"], level=level, threshold=1.5, normalize=normalize
        )
    }


BY_ROW: dict[str, Estimate] = {
    "gae": _gae(0.9, 0.8),
    "gae, undiscounted": _gae(1.0, 1.0),
    "gae, a lam for each row": _gae(0.97, None),
    "gae, decoupled and adaptive": _adaptive,
    "remax": lambda b: F.remax(b["rewards"], b["baseline_scores"], b["mask"])._asdict(),
    "weights of tokens": _correction("token", normalize=False),
    "weights of sequences": _correction("sequence", normalize=False),
}
"""Each row's result depends on that row alone."""

SHAPING: dict[str, Estimate] = {
    **{f"shaping, {name}": _shaping(name, "scores") for name in KL_ESTIMATORS.built_in},
    "shaping of token scores": _shaping("k1", "rewards"),
}
"""By row too, and every row needs a token."""

BY_GROUP: dict[str, Estimate] = {
    name: _group(name) for name in F.GROUP_ESTIMATORS if name != "reinforce_plus_plus_baseline"
}
"""Each row's result depends on its group."""

BY_BATCH: dict[str, Estimate] = {
    "gae, whitened": _gae(0.9, 0.8, whiten=True),
    "reinforce_plus_plus": lambda b: F.reinforce_plus_plus(b["rewards"], b["mask"], gamma=0.9)._asdict(),
    "reinforce_plus_plus_baseline": _group("reinforce_plus_plus_baseline"),
    "gdpo": _gdpo,
    "whitening": lambda b: {"whitened": F.masked_whiten(b["rewards"], b["mask"])},
    "whitening, mean kept": lambda b: {"whitened": F.masked_whiten(b["rewards"], b["mask"], keep_mean=True)},
    "weights of tokens, normalized": _correction("token", normalize=True),
    "weights of sequences, normalized": _correction("sequence", normalize=True),
}
"""Each row's result depends on the whole batch."""

ESTIMATES: dict[str, Estimate] = {**BY_ROW, **BY_GROUP, **BY_BATCH}

LossOf = Callable[..., F.Loss]
"""loss(batch, loss_agg_mode=..., denominator=None)"""


def _policy(loss: LossOf, **options: Any) -> LossOf:
    return lambda b, **how: loss(
        b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"], **options, weights=b["weights"], **how
    )


def _probable(loss: LossOf) -> LossOf:
    """`loss` of log-probs below 0, as those of the batch need not be."""

    def of(b: Batch, **how: Any) -> F.Loss:
        return loss({**b, "logprobs": b["logprobs"] - 4, "old_logprobs": b["old_logprobs"] - 4}, **how)

    return of


def _gmpo(b: Batch, *, loss_agg_mode: str, denominator: Any = None) -> F.Loss:
    assert loss_agg_mode == "seq-mean-token-mean", "its only one"
    return _policy(F.gmpo_policy_loss, cliprange_low=0.3, cliprange_high=0.4)(b, denominator=denominator)


def _positive_nll(b: Batch, *, loss_agg_mode: str, denominator: Any = None) -> F.Loss:
    assert loss_agg_mode == "token-mean", "its only one"
    return F.positive_nll_loss(b["logprobs"], b["scores"] > 0, b["mask"], denominator=denominator)


def _gspo(b: Batch, **how: Any) -> F.Loss:
    ranges = {"cliprange_low": 0.3, "cliprange_high": 0.4}
    return F.gspo_policy_loss(b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"], **ranges, **how)


def _value(**options: Any) -> LossOf:
    return lambda b, **how: F.value_loss(b["vpreds"], b["old_values"], b["returns"], b["mask"], **options, **how)


def _kl(estimator: str) -> LossOf:
    def loss(b: Batch, *, loss_agg_mode: str, denominator: Any = None) -> F.Loss:
        mask = b["mask"]
        kl = F.kl_penalty(F.zero_outside(b["logprobs"], mask), F.zero_outside(b["ref_logprobs"], mask), estimator)
        return F.Loss(F.aggregate_loss(kl, mask, loss_agg_mode, denominator=denominator), {})

    return loss


LOSSES: dict[str, tuple[LossOf, str]] = {
    "clip": (_policy(F.policy_loss, cliprange_low=0.2, cliprange_high=0.3), "logprobs"),
    "dual clip": (_policy(F.policy_loss, cliprange_low=0.2, cliprange_high=0.2, clip_ratio_c=1.5), "logprobs"),
    "gspo": (_gspo, "logprobs"),
    "cispo": (_policy(F.cispo_policy_loss, cliprange_low=0.2, cliprange_high=0.3), "logprobs"),
    "sapo": (_policy(F.sapo_policy_loss, tau_pos=0.8, tau_neg=1.2), "logprobs"),
    "gmpo": (_gmpo, "logprobs"),
    "dppo": (
        _probable(_policy(F.dppo_policy_loss, cliprange_low=0.02, cliprange_high=0.03, clip_ratio_c=1.5)),
        "logprobs",
    ),
    "dppo_kl": (
        _probable(_policy(F.dppo_policy_loss, divergence="kl", cliprange_low=0.005, cliprange_high=0.01)),
        "logprobs",
    ),
    "positive nll": (_positive_nll, "logprobs"),
    "value": (_value(), "vpreds"),
    "clipped value": (_value(cliprange_value=0.2), "vpreds"),
    "c51": (lambda b, **how: F.c51_loss(b["logits"], b["returns"], b["mask"], v_min=-2.0, v_max=2.0, **how), "logits"),
    "hl_gauss": (
        lambda b, **how: F.hl_gauss_loss(b["logits"], b["returns"], b["mask"], v_min=-2.0, v_max=2.0, sigma=0.7, **how),
        "logits",
    ),
    "quantile": (
        lambda b, **how: F.quantile_huber_loss(
            b["quantiles"], b["returns"], F.quantile_midpoints(WIDTH, dtype=torch.float64), b["mask"], **how
        ),
        "quantiles",
    ),
    **{f"kl, {name}": (_kl(name), "logprobs") for name in KL_ESTIMATORS.names_with(kink_at_zero=False)},
}
"""Each loss, and the input that receives its gradient."""

ONLY_MODE = {"gmpo": "seq-mean-token-mean", "positive nll": "token-mean"}
"""How losses average that cannot do it in another way."""

modes = st.sampled_from(F.LOSS_AGG_MODES)


def sequences_or_tokens(batch: Batch, mode: str) -> int:
    """What `mode` divides the loss of the whole optimizer step by."""
    mask = batch["mask"]
    return int(mask.sum() if mode == "token-mean" else mask.any(dim=1).sum())


def denominator_of(name: str, batch: Batch, mode: str) -> int:
    """What the loss `name` of the whole optimizer step is divided by."""
    counted = batch
    if name == "positive nll":
        counted = {"mask": batch["mask"] & (batch["scores"] > 0).unsqueeze(1)}
    return sequences_or_tokens(counted, ONLY_MODE.get(name, mode))


def rows_of(batch: Batch, index: Tensor) -> Batch:
    """The rows `index` of `batch`, in that order."""
    return {name: value[index] for name, value in batch.items()}


def columns_of(values: Tensor, index: Tensor) -> Tensor:
    """The columns `index` of (B, R, ...) `values`, zeros where it is -1; (B,) values are unchanged."""
    if values.dim() == 1:
        return values
    padded = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
    return padded[:, index]


def left_aligned(values: Tensor, mask: Tensor) -> Tensor:
    """The masked entries of each row of (B, R, ...) `values`, moved to its left end; (B,) values are unchanged."""
    if values.dim() == 1:
        return values
    order = (~mask).int().argsort(dim=1, stable=True)
    rows = torch.arange(len(mask)).unsqueeze(1)
    moved, kept = values[rows, order], mask[rows, order]
    return torch.where(kept.view(kept.shape + (1,) * (values.dim() - 2)), moved, torch.zeros_like(moved))


def poisoned(batch: Batch) -> Batch:
    """`batch` with NaN and infinities wherever its mask is False, and as the scores of rows without a token."""
    mask = batch["mask"]
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)

    def poison(name: str, values: Tensor) -> Tensor:
        if not values.is_floating_point() or name == "row_lam":
            return values
        counts = mask.any(dim=1) if values.dim() == 1 else mask.view(mask.shape + (1,) * (values.dim() - 2))
        return torch.where(counts, values, bad[torch.arange(values.numel()) % 3].view_as(values))

    return {name: poison(name, values) for name, values in batch.items()}


def gradients(results: dict[str, Tensor], batch: Batch) -> Batch:
    """The gradients of the sum of all results, each entry with a weight of its own, by the input's name."""
    total = torch.zeros((), dtype=torch.float64)
    for result in results.values():
        weights = torch.linspace(-1.3, 2.1, result.numel(), dtype=torch.float64).view_as(result)
        total = total + (weights * result).sum()
    leaves = {name: value for name, value in batch.items() if value.requires_grad}
    if not total.requires_grad:
        return {}
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def assert_same(name: str, results: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-9) -> None:
    """That all of `results` are as expected up to `tolerance`, relative to the largest of the expected numbers."""
    for key, result in results.items():
        size = max(1.0, float(expected[key].abs().max()))
        message = partial("{}, {}: {}".format, name, key)
        assert_close(result, expected[key], rtol=tolerance, atol=tolerance * size, msg=message)
