"""What must hold for the losses of policy and critic, and for the KL in the loss, on any batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from alpaca_ppo.functional import policy_loss
from alpaca_ppo.registry import ADV_ESTIMATORS, POLICY_LOSSES
from tests.independent.property_cases import (
    ESTIMATES,
    LOSSES,
    ONLY_MODE,
    assert_same,
    batches,
    columns_of,
    denominator_of,
    examples,
    modes,
    poisoned,
    rows_of,
)


def outcome(name, batch, mode, denominator=None):
    """The loss, its gradient and its statistics by name."""
    loss, leaf = LOSSES[name]
    mode = ONLY_MODE.get(name, mode)
    trained = batch[leaf].clone().requires_grad_()
    result = loss({**batch, leaf: trained}, loss_agg_mode=mode, denominator=denominator)
    (grad,) = torch.autograd.grad(result.loss, trained)
    return {"loss": result.loss.detach(), "gradient": grad, **result.stats}


def test_every_built_in_estimator_and_policy_loss_is_put_through_the_properties():
    assert set(ADV_ESTIMATORS.built_in) <= set(ESTIMATES) and set(POLICY_LOSSES.built_in) <= set(LOSSES)


@examples(30)
@given(batch=batches(), mode=modes, left=st.integers(0, 2), right=st.integers(0, 2))
def test_columns_without_a_token_change_no_loss(batch, mode, left, right):
    columns = batch["mask"].size(1)
    index = torch.tensor([-1] * left + [*range(columns)] + [-1] * right)
    wider = {key: columns_of(value, index) for key, value in batch.items()}
    # This mode alone divides by the padded length.
    by_length = columns / len(index) if mode == "seq-mean-token-sum-norm" else 1.0
    for name in LOSSES:
        factor = 1.0 if name in ONLY_MODE else by_length
        expected = outcome(name, batch, mode)
        expected["loss"] = factor * expected["loss"]
        expected["gradient"] = factor * columns_of(expected["gradient"], index)
        assert_same(name, outcome(name, wider, mode), expected)


@examples(30)
@given(data=st.data())
def test_the_order_of_rows_changes_no_loss(data):
    batch, mode = data.draw(batches()), data.draw(modes)
    order = torch.tensor(data.draw(st.permutations(range(len(batch["mask"])))))
    for name in LOSSES:
        expected = outcome(name, batch, mode)
        expected["gradient"] = expected["gradient"][order]
        assert_same(name, outcome(name, rows_of(batch, order), mode), expected)


@examples(30)
@given(batch=batches(), mode=modes)
def test_rows_without_a_token_count_for_nothing(batch, mode):
    kept = batch["mask"].any(dim=1)
    for name in LOSSES:
        expected = outcome(name, batch, mode)
        expected["gradient"] = expected["gradient"][kept]
        assert_same(name, outcome(name, rows_of(batch, kept), mode), expected)


@examples(30)
@given(data=st.data())
def test_parts_with_the_count_of_the_whole_add_up_to_the_whole(data):
    batch, mode = data.draw(batches()), data.draw(modes)
    rows = len(batch["mask"])
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    # A part without rows is one of the cases: a rank may have none.
    parts = [part_of == part for part in range(3)]
    for name in LOSSES:
        expected = outcome(name, batch, mode)
        count = denominator_of(name, batch, mode)
        outcomes = [outcome(name, rows_of(batch, part), mode, denominator=count) for part in parts]
        gradient = torch.zeros_like(expected["gradient"])
        for part, of_part in zip(parts, outcomes, strict=True):
            gradient[part] = of_part["gradient"]
        total = sum(of_part["loss"] for of_part in outcomes)
        assert_same(name, {"loss": total, "gradient": gradient}, expected)


@examples(30)
@given(batch=batches(), mode=modes)
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(batch, mode):
    dirty = poisoned(batch)
    for name in LOSSES:
        expected, results = outcome(name, batch, mode), outcome(name, dirty, mode)
        for key, result in results.items():
            assert torch.equal(result, expected[key]), (name, key)
        assert results["gradient"][~batch["mask"]].eq(0).all(), name


@examples(30)
@given(batch=batches(), mode=modes, factor=st.sampled_from([0.01, 5.0, 1e6]))
def test_policy_losses_scale_with_the_advantages(batch, mode, factor):
    scaled = {**batch, "advantages": factor * batch["advantages"]}
    for name in ("clip", "dual clip", "gspo", "cispo", "sapo", "gmpo", "dppo", "dppo_kl"):
        expected, result = outcome(name, batch, mode), outcome(name, scaled, mode)
        for key in ("loss", "gradient"):
            assert_same(name, {key: result[key]}, {key: factor * expected[key]})


@examples(30)
@given(batch=batches(), mode=modes, low=st.floats(0.0, 1.0), high=st.floats(0.0, 2.0))
def test_clipping_only_ever_raises_the_policy_loss_and_dual_clip_only_lowers_it(batch, mode, low, high):
    tensors = (batch["logprobs"], batch["old_logprobs"], batch["advantages"], batch["mask"])
    free = policy_loss(*tensors, cliprange_low=1.0, cliprange_high=1e12, loss_agg_mode=mode).loss
    clipped = policy_loss(*tensors, cliprange_low=low, cliprange_high=high, loss_agg_mode=mode).loss
    dual = policy_loss(*tensors, cliprange_low=low, cliprange_high=high, clip_ratio_c=1.5, loss_agg_mode=mode).loss
    assert clipped >= free - 1e-12 and dual <= clipped + 1e-12
