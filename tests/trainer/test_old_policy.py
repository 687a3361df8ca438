"""What each `old_policy` makes of a sampler that is not the policy, on purpose: the gradient, enumerated.

With mu the sampler's distribution and pi the policy's, an update should climb J = sum over y of pi(y) * (r(y) - beta *
log(pi(y) / ref(y))), but the responses come from mu. What the expectation over mu of the trainer's gradient is:

- recompute: the ratio starts at 1, and mu stands for pi everywhere. Biased.
- rollout: the ratio is pi / mu of a token, which puts right the choice of that token alone. How likely the sampler is
  to get there, and how it goes on, stay as they are, the KL in the reward is that of mu, and the clip, which is meant
  for the policy's own steps, cuts the ratio. Biased; without the clip less so, and not at all for one token without KL.
- correct, level token: rollout without the clip, and with the policy's own KL in the reward.
- correct, level sequence: exactly the gradient, as long as the threshold cuts no weight.
"""

import copy

import torch

from alpaca_ppo.ppo.losses import correction_weights
from tests.enumerable import (
    add_advantages,
    enumerable_policy,
    enumerable_trainer,
    enumerated_rollouts,
    expected_loss_gradient,
    objective_gradient,
    probabilities,
    relative_error,
)
from tests.tiny_runs import tiny_trainer
from tests.trainer.test_gradient_truth import BETA, TOLERANCE, either_problem

MODES = ["recompute", "rollout", "correct"]

SEQUENCE = {"old_policy": "correct", "rollout_correction_level": "sequence", "rollout_correction_threshold": 1e9}


def perturbed(model):
    """A copy with noise on the weights of its head."""
    other = copy.deepcopy(model)
    weight = other.get_output_embeddings().weight.data
    weight += 0.05 * torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(7))
    return other


def expected_update(folder, problem, **overrides):
    """The trainer and the direction of descent of its loss, expected over the responses of a perturbed sampler."""
    sampler = perturbed(enumerable_policy(0))
    trainer = enumerable_trainer(folder, **{"kl_coef": BETA, **overrides})
    batch = add_advantages(trainer, enumerated_rollouts(trainer, problem, sampler))
    batch |= correction_weights(batch, trainer.args)
    return trainer, -expected_loss_gradient(trainer, batch, probabilities(sampler, problem))


def error(folder, problem, **overrides):
    trainer, update = expected_update(folder, problem, **overrides)
    return relative_error(update, objective_gradient(trainer, problem, kl_coef=trainer.args.kl_coef))


@either_problem
def test_sequence_weights_remove_the_bias_that_the_other_modes_have(problem, tmp_path):
    assert error(tmp_path / "a", problem, **SEQUENCE) < TOLERANCE
    assert error(tmp_path / "b", problem, old_policy="rollout") > 0.01
    assert error(tmp_path / "c", problem, old_policy="recompute") > 0.01


def test_the_samplers_log_probs_spare_the_policys_pass(tmp_path):
    passes = {}
    for mode in MODES:
        trainer = tiny_trainer(tmp_path / mode, old_policy=mode, padding_free=False)
        calls = []
        trainer.actor_critic.policy.model.base_model.register_forward_hook(lambda *_, seen=calls: seen.append(1))
        batch = trainer.rollout(trainer.prompt_batches(0))
        passes[mode] = len(calls)
        assert torch.equal(batch["logprobs"], batch["rollout_logprobs"]) == (mode == "rollout")
        assert ("entropies" in batch) == ("recomputed" in batch) == (mode != "rollout")
        assert "values" in batch
    # Ten responses, four at once: three passes. The others belong to the sampler.
    assert passes["recompute"] - passes["rollout"] == 3
    assert passes["correct"] == passes["recompute"]
