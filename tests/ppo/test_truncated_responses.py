"""`mask_truncated`: what responses that did not stop take part in, and what not."""

import pytest
import torch

from alpaca_ppo import PPOConfig
from alpaca_ppo.ppo.losses import correction_weights, step_denominators
from alpaca_ppo.ppo.row_masks import gradient_mask, gradient_rows
from alpaca_ppo.ppo.updates import Applied
from tests.tiny_runs import one_update, tiny_trainer, weights, with_advantages

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
ROLLOUTS = {
    "response_mask": MASK,
    "stopped": torch.tensor([False, True, True, True]),
    "scores": torch.tensor([1.0, 0.5, 0.0, 1.0]),
}


def test_without_the_option_every_response_gives_a_gradient():
    args = PPOConfig()
    assert torch.equal(gradient_mask(ROLLOUTS, args), MASK) and gradient_rows(ROLLOUTS, args).all()


def test_with_it_those_that_stopped_give_one():
    args = PPOConfig(mask_truncated=True)
    assert gradient_mask(ROLLOUTS, args).tolist() == [[False] * 3, *MASK[1:].tolist()]
    assert gradient_rows(ROLLOUTS, args).tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("mode", "rows", "expected"),
    [
        ("token-mean", [0, 1, 2, 3], 6),
        ("seq-mean-token-sum", [0, 1, 2, 3], 3),
        ("token-mean", [1, 3], 1),
        ("token-mean", [], 1),
        ("seq-mean-token-mean", [3], 1),
    ],
)
def test_losses_are_divided_by_the_tokens_or_sequences_of_the_rows_and_never_by_zero(mode, rows, expected):
    args = PPOConfig(loss_agg_mode=mode)
    denominators = step_denominators(ROLLOUTS, torch.tensor(rows, dtype=torch.long), args)
    assert {name: value.item() for name, value in denominators.items()} == {"denominator": expected}


@pytest.mark.parametrize(
    ("threshold", "rows", "expected"), [(0.0, [0, 1, 2, 3], 4), (0.5, [0, 1, 2], 3), (1.0, [0], 1)]
)
def test_the_log_likelihood_of_successes_is_divided_by_their_tokens(threshold, rows, expected):
    # Scores of 1 and 0.5 have three tokens and one; a score at the threshold is no success.
    args = PPOConfig(positive_nll_coef=0.1, positive_nll_threshold=threshold)
    assert step_denominators(ROLLOUTS, torch.tensor(rows), args)["positive_tokens"].item() == expected


def test_importance_weights_are_those_of_the_responses_that_give_a_gradient():
    args = PPOConfig(mask_truncated=True, old_policy="correct")
    logprobs = torch.tensor([[0.5, 0.5, 0.5], [0.0, 0, 0], [0.0, 0, 0], [0, 0, 0]])
    given = {**ROLLOUTS, "logprobs": logprobs, "rollout_logprobs": torch.zeros(4, 3)}
    assert torch.equal(correction_weights(given, args)["loss_weights"], torch.where(gradient_mask(given, args), 1.0, 0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trainer, and rollouts of which the first and the last response did not stop."""
    options = {
        "dtype": torch.float64,
        "mask_truncated": True,
        "old_policy": "rollout",
        "adam_epsilon": 0.1,
        "target_kl_stop": 1e9,
    }
    trainer = tiny_trainer(tmp_path_factory.mktemp("run"), **options)
    rollouts = with_advantages(trainer, trainer.prompt_batches(0))
    rollouts["stopped"] = torch.ones_like(rollouts["stopped"])
    rollouts["stopped"][[0, -1]] = False
    return trainer, rollouts, weights(trainer)


def update(run, rows, *, rollouts=None, **options):
    """By how much one optimizer step on `rows` moves each weight, and its statistics."""
    trainer, given, before = run
    # Of an earlier step.
    trainer.updater.engine.optimizer.state.clear()
    stats, applied = one_update(trainer, given if rollouts is None else rollouts, rows, **options)
    assert applied == Applied()
    moved = {name: weight - before[name] for name, weight in weights(trainer).items()}
    trainer.actor_critic.load_state_dict(before, strict=False)
    return moved, stats


def test_an_optimizer_step_is_that_of_the_other_responses_alone(run):
    rows = list(range(len(run[1]["stopped"])))
    # What a response that was cut off would have taught does not matter.
    poisoned = dict(run[1])
    for name in ("advantages", "returns", "logprobs", "values"):
        poisoned[name] = run[1][name].clone()
        poisoned[name][[0, -1]] = torch.nan
    masked, of_masked = update(run, rows, rollouts=poisoned)
    others, of_others = update(run, rows[1:-1])
    assert of_masked == of_others and all(torch.equal(masked[name], others[name]) for name in others)
    assert any(change.abs().max() > 0 for change in others.values())


def test_an_optimizer_step_without_another_response_has_no_gradient(run):
    # Neither the sampler's log-probs nor the KL are judged without a token.
    checked = []
    moved, stats = update(run, [0], check=checked.append)
    assert not checked and all(not change.any() for change in moved.values())
    assert stats["policy/grad_norm"] == stats["val/grad_norm"] == 0
    assert {stats[name] for name in stats if name.startswith("loss/")} == {0.0}
