"""What must hold for advantages, returns, shaped rewards, whitening and importance weights on any batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from alpaca_ppo.functional import GROUP_ESTIMATORS, gae, group_advantages, masked_whiten, reinforce_plus_plus, remax
from tests.independent.property_cases import (
    BY_GROUP,
    BY_ROW,
    ESTIMATES,
    SHAPING,
    assert_same,
    batches,
    columns_of,
    examples,
    gradients,
    left_aligned,
    poisoned,
    rows_of,
)

LINEAR = (
    "gae",
    "gae, undiscounted",
    "gae, a lam for each row",
    "gae, decoupled and adaptive",
    "remax",
    "grpo_no_std",
    "rloo",
    "opo",
)
BASELINE = "reinforce_plus_plus_baseline"
SCALE_FREE = ("grpo", "gae, whitened", BASELINE, "reinforce_plus_plus", "whitening")
IN_REWARD_UNITS = ("rewards", "values", "scores", "baseline_scores")


def defined(batch, *families):
    """The estimates of `families` that the batch has, by name: shaping refuses a row without a token."""
    full = bool(batch["mask"].any(dim=1).all())
    return {name: of for family in families for name, of in family.items() if full or name not in SHAPING}.items()


@examples(30)
@given(data=st.data())
def test_columns_without_a_token_change_nothing(data):
    batch = data.draw(batches())
    index = [-1] * data.draw(st.integers(0, 2))
    for column in range(batch["mask"].size(1)):
        index += [column] + [-1] * data.draw(st.integers(0, 2))
    index = torch.tensor(index)
    wider = {key: columns_of(value, index) for key, value in batch.items()}
    for name, estimate in defined(batch, ESTIMATES, SHAPING):
        expected = {key: columns_of(value, index) for key, value in estimate(batch).items()}
        assert_same(name, estimate(wider), expected)


@examples(30)
@given(batch=batches())
def test_holes_in_the_mask_count_for_nothing(batch):
    mask = batch["mask"]
    aligned = {key: left_aligned(value, mask) for key, value in batch.items()}
    for name, estimate in defined(batch, ESTIMATES, SHAPING):
        expected = {key: left_aligned(value, mask) for key, value in estimate(batch).items()}
        assert_same(name, estimate(aligned), expected)


@examples(30)
@given(batch=batches())
def test_rows_without_a_token_count_for_nothing(batch):
    kept = batch["mask"].any(dim=1)
    for name, estimate in ESTIMATES.items():
        assert_same(name, estimate(rows_of(batch, kept)), rows_of(estimate(batch), kept))


@examples(30)
@given(data=st.data())
def test_rows_in_another_order_have_their_results_in_that_order(data):
    batch = data.draw(batches())
    order = torch.tensor(data.draw(st.permutations(range(len(batch["mask"])))))
    for name, estimate in defined(batch, ESTIMATES, SHAPING):
        assert_same(name, estimate(rows_of(batch, order)), rows_of(estimate(batch), order))


@examples(30)
@given(batch=batches())
def test_rows_or_groups_on_their_own_have_the_results_of_the_whole_batch(batch):
    for family in (BY_ROW, SHAPING, BY_GROUP):
        ids = batch["group_ids"] if family is BY_GROUP else torch.arange(len(batch["mask"]))
        part = ids == ids[0]
        for name, estimate in defined(batch, family):
            assert_same(name, estimate(rows_of(batch, part)), rows_of(estimate(batch), part))


@examples(30)
@given(batch=batches())
def test_what_stands_outside_the_mask_reaches_neither_results_nor_gradients(batch):
    clean, dirty = (
        {key: value.clone().requires_grad_(value.is_floating_point()) for key, value in tensors.items()}
        for tensors in (batch, poisoned(batch))
    )
    for name, estimate in defined(batch, ESTIMATES, SHAPING):
        results, expected = estimate(dirty), estimate(clean)
        for key, result in results.items():
            assert torch.equal(result, expected[key]), (name, key)
            assert result.dim() == 1 or result[~batch["mask"]].eq(0).all(), (name, key)
        expected_gradients = gradients(expected, clean)
        for key, grad in gradients(results, dirty).items():
            assert torch.equal(grad, expected_gradients[key]) and grad.isfinite().all(), (name, key)


@examples(30)
@given(batch=batches(), factor=st.sampled_from([-1.0, 3.0, -0.004, 1e6]))
def test_advantages_and_returns_scale_with_rewards_and_values(batch, factor):
    scaled = {**batch, **{key: factor * batch[key] for key in IN_REWARD_UNITS}}
    for name in LINEAR:
        expected = {key: factor * value for key, value in ESTIMATES[name](batch).items()}
        assert_same(name, ESTIMATES[name](scaled), expected)


@examples(30)
@given(batch=batches(), factor=st.sampled_from([-1.0, 7.0, 1e3, -1e12]))
def test_normalised_advantages_do_not_depend_on_the_scale_of_rewards(batch, factor):
    # In units in which the constant beside the std, 1e-6 or 1e-4, is small.
    large = {**batch, **{key: 1e9 * batch[key] for key in IN_REWARD_UNITS}}
    scaled = {**large, **{key: factor * large[key] for key in IN_REWARD_UNITS}}
    for name in SCALE_FREE:
        key = "whitened" if name == "whitening" else "advantages"
        expected = (1 if factor > 0 else -1) * ESTIMATES[name](large)[key]
        if name == "grpo":
            # The score of a response that is alone in its group is divided by 1.
            expected = torch.where(alone_in_group(batch).unsqueeze(1), abs(factor) * expected, expected)
        assert_same(name, {key: ESTIMATES[name](scaled)[key]}, {key: expected})


def alone_in_group(batch):
    """(B,): whether no other row with a token is in the row's group."""
    member, ids = batch["mask"].any(dim=1), batch["group_ids"]
    return ((ids.unsqueeze(0) == ids.unsqueeze(1)) & member.unsqueeze(0)).sum(dim=1) < 2


@examples(60)
@given(
    mask=batches(empty_rows=False, max_rows=7).map(lambda batch: batch["mask"]),
    # The sums of numbers such as 1.0 are exact in float32.
    value=st.sampled_from([0.1, 1000.7, -12345.6]) | st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False),
    copies=st.sampled_from([1, 3, 400]),
    noise=st.booleans(),
)
def test_rewards_that_are_all_alike_give_no_advantage(mask, value, copies, noise):
    mask = mask.repeat(copies, 1)
    rows, last = len(mask), torch.where(mask, torch.arange(mask.size(1)), -1).argmax(dim=1, keepdim=True)
    scores = torch.full((rows,), value)
    if noise:
        # The next number in float32: the same one, computed in another way.
        scores[::2] = scores[::2].nextafter(torch.tensor(torch.inf))
    rewards = torch.zeros(mask.shape).scatter(1, last, scores.unsqueeze(1))
    untrained = gae(rewards, torch.zeros(mask.shape), mask, gamma=1.0, lam=1.0).advantages
    advantages = {
        "whitening": masked_whiten(scores.unsqueeze(1).expand(mask.shape), mask),
        "gae, whitened": masked_whiten(untrained, mask),
        "reinforce_plus_plus": reinforce_plus_plus(rewards, mask, gamma=1.0).advantages,
        "remax": remax(rewards, scores, mask).advantages,
    }
    # Pairs; the last of an odd number of rows makes a group of three.
    pairs = torch.arange(rows).clamp_max(rows // 2 * 2 - 1) // 2
    for estimator in GROUP_ESTIMATORS if rows > 1 else ():
        advantages[estimator] = group_advantages(scores, pairs, mask, estimator=estimator)
    for name, result in advantages.items():
        # Beside 0, the next number is 1e-45, and no multiple of it is smaller.
        assert result.abs().amax() <= (1e-30 if abs(value) < 1e-30 else 0), name
