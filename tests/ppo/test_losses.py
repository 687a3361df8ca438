"""The terms of a micro-batch's loss, worked out by hand, and what is checked of registered losses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.functional import Loss, aggregate_loss, masked_mean, register_policy_loss
from alpaca_ppo.models import ActorCriticOutputs, ScalarHead
from alpaca_ppo.ppo.losses import policy_terms
from tests.registered import temporary_choices

MASK = tensor([[True, True], [True, False]])


def batch(**others: Tensor) -> Any:
    tensors = {
        "response_mask": MASK,
        "logprobs": torch.full((2, 2), -1.0),
        "recomputed": torch.ones(2, dtype=torch.bool),
        "ref_logprobs": tensor([[-1.5, -1.0], [-2.0, 0.0]]),
        "advantages": tensor([[1.0, 2.0], [3.0, 0.0]]),
        "returns": tensor([[1.0, 2.0], [4.0, 0.0]]),
        "values": torch.zeros(2, 2),
        "denominator": tensor(6.0),
    }
    return {**tensors, **others}


def outputs(**others: Tensor) -> ActorCriticOutputs:
    entropies, values = tensor([[0.5, 1.0], [1.5, 0.0]]), torch.zeros(2, 2)
    tensors = {"logprobs": torch.full((2, 2), -1.0), "entropies": entropies, "values": values, "predictions": values}
    return ActorCriticOutputs(**{**tensors, "value_means": None, **others})  # type: ignore[arg-type]


def critic_terms(head: Any, args: PPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """What the trainer's hook returns for a critic with this head."""
    trainer: Any = SimpleNamespace(args=args, actor_critic=SimpleNamespace(critic=SimpleNamespace(head=head)))
    return PPOTrainer.compute_value_loss(trainer, batch(), outputs())


def test_policy_kl_and_entropy_terms_add_up_over_the_denominator():
    args = PPOConfig(kl_loss_coef=0.1, kl_loss_type="k1+", entropy_coef=0.01)
    loss, stats = policy_terms(batch(), outputs(), args)
    # Ratio 1: -(1 + 2 + 3) / 6 = -1. KL: (0.5 + 0 + 1) / 6 = 0.25. Entropy: (0.5 + 1 + 1.5) / 6 = 0.5.
    assert float(stats["loss/policy"]) == -1 and float(stats["loss/kl"]) == 0.25 and float(stats["loss/entropy"]) == 0.5
    assert float(loss) == pytest.approx(-1 + 0.1 * 0.25 - 0.01 * 0.5)
    # The weights of the responses multiply each term: 2 on the last response doubles its 3, 1 and 1.5.
    weights = tensor([[1.0, 1.0], [2.0, 0.0]])
    stats = policy_terms(batch(loss_weights=weights), outputs(), args)[1]
    expected = pytest.approx([-1.5, 2.5 / 6, 0.75])
    assert [float(stats[f"loss/{name}"]) for name in ("policy", "kl", "entropy")] == expected


def test_without_entropies_only_their_statistic_is_missing():
    args = PPOConfig(kl_loss_coef=0.001)
    loss, stats = policy_terms(batch(), outputs(), args)
    alone, others = policy_terms(batch(), outputs(entropies=None), args)
    assert torch.equal(alone, loss) and set(stats) - set(others) == {"policy/entropy"}


def test_the_samplers_log_probs_are_compared_with_the_policys_in_the_loss_where_they_took_their_place():
    sampler = torch.full((2, 2), -1.0) - tensor([[0.5, 0.0], [0.25, 9.0]])
    taken = batch(rollout_logprobs=sampler)
    del taken["recomputed"]
    for mode in ("auto", "rollout"):
        stats = policy_terms(taken, outputs(), PPOConfig(old_policy=mode))[1]
        # Of three tokens, the last is outside the mask: (0.5 + 0 + 0.25) / 3.
        assert float(stats["mismatch/logprob_abs_mean"]) == 0.25
    stats = policy_terms(batch(rollout_logprobs=sampler), outputs(), PPOConfig())[1]
    assert not any(name.startswith("mismatch/") for name in stats)


def test_the_critics_term_is_the_loss_of_its_head_times_vf_coef():
    head = ScalarHead(4)
    loss, stats = critic_terms(head, PPOConfig(vf_coef=0.5))
    # Half the squared errors 1, 4 and 16 over the denominator.
    assert float(stats["loss/value"]) == 0.5 * 21 / 6 and float(loss) == 0.5 * 0.5 * 21 / 6
    assert float(stats["val/error"]) == 7.0


def test_a_registered_policy_loss_gets_the_batch_and_its_stats_are_named_after_it():
    with temporary_choices():

        @register_policy_loss("reinforce")
        def reinforce(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            *,
            args: Any,
            weights: Tensor,
            denominator: Tensor,
        ) -> Loss:
            losses = -args.cliprange * weights * advantages * logprobs
            stats = {"drift": masked_mean(logprobs - old_logprobs, response_mask)}
            return Loss(aggregate_loss(losses, response_mask, args.loss_agg_mode, denominator=denominator), stats)

        weights = tensor([[1.0, 1.0], [2.0, 0.0]])
        args = PPOConfig(policy_loss="reinforce", cliprange=0.5)
        loss, stats = policy_terms(batch(loss_weights=weights), outputs(logprobs=torch.full((2, 2), -3.0)), args)
    # -0.5 * (1 + 2 + 2 * 3) * -3 / 6.
    assert float(loss) == 2.25 and float(stats["policy/drift"]) == -2.0


def test_what_a_registered_loss_returns_is_checked(monkeypatch: pytest.MonkeyPatch):
    with temporary_choices():
        register_policy_loss("mine")(lambda *args, **keywords: tensor(1.0))  # type: ignore[arg-type,return-value]
        with pytest.raises(ValueError, match="the policy_loss 'mine' returned tensor"):
            policy_terms(batch(), outputs(), PPOConfig(policy_loss="mine"))
    head = ScalarHead(4)
    monkeypatch.setattr(head, "loss", lambda *args, **keywords: tensor(1.0))
    with pytest.raises(ValueError, match="the loss of the critic 'scalar' returned tensor"):
        critic_terms(head, PPOConfig())
