"""Tokens of the environment are context and nothing else: they are no part of a loss, KL, reward, return, whitening,
statistic or count. Whatever is known of such a token is NaN here, which no sum survives; what counts tokens is compared
with the chosen ones alone.
"""

import pytest
import torch

from alpaca_ppo import PPOTrainer
from alpaca_ppo.ppo import metrics
from tests.environments.test_games import GAME, Partner
from tests.tiny_runs import metric_lines, tiny_trainer, weights

EVERYTHING = {
    "ppo_epochs": 2,
    "entropy_coef": 0.01,
    "kl_loss_coef": 0.001,
    "whiten_rewards": True,
    "turn_gamma": 0.9,
    "turn_lam": 0.8,
}

WITHOUT_CRITIC = {"turn_gamma": None, "turn_lam": None, "whiten_rewards": False}


def poison(tensors, mask):
    """NaN in the columns of `tensors` that the policy did not choose."""
    for value in tensors.values():
        if value.shape == mask.shape and value.is_floating_point():
            value[~mask] = torch.nan


class Recording(PPOTrainer):
    """Keeps what each step samples, and what it learns from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampled, self.learned, self.denominators = [], [], []

    def rollout(self, prompt_batches):
        self.sampled.append(self.sample(prompt_batches))
        return dict(self.sampled[-1])

    def sample(self, prompt_batches):
        return super().rollout(prompt_batches)

    def step_with_rollouts(self, rollouts):
        self.learned.append(rollouts)
        self.denominators.clear()
        return super().step_with_rollouts(rollouts)

    def compute_policy_loss(self, batch, outputs):
        self.denominators.append(float(batch["denominator"]))
        return super().compute_policy_loss(batch, outputs)


def poisoned(sampled):
    """A trainer that samples what another one did, and knows nothing of tokens that the policy did not choose."""

    class Poisoned(Recording):
        def sample(self, prompt_batches):
            rollouts = {name: value.clone() for name, value in sampled[self.state.global_step].items()}
            # Rewards are 0 there, whoever returns them (`hook_checks.check_scores`).
            poison({name: value for name, value in rollouts.items() if name != "rewards"}, rollouts["response_mask"])
            return rollouts

        def step_with_rollouts(self, rollouts):
            learned = {name: rollouts[name].clone() for name in ("advantages", "returns")}
            poison(learned, rollouts["response_mask"])
            return super().step_with_rollouts({**rollouts, **learned})

    return Poisoned


def trained(folder, trainer_class, **overrides):
    trainer = tiny_trainer(
        folder,
        trainer_class=trainer_class,
        trainer_arguments={"environment_factory": Partner, "reward_funcs": None},
        **{**GAME, **EVERYTHING, **overrides},
    )
    trainer.train()
    return trainer


VARIANTS = {
    "gae": {},
    "grpo": {**WITHOUT_CRITIC, "adv_estimator": "grpo", "num_return_sequences": 2},
    "iqn, gspo, correct": {
        **{"critic": "iqn", "num_atoms": 4, "policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
        **{"old_policy": "correct"},
    },
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_what_stands_in_a_hole_changes_neither_weights_nor_metrics(tmp_path, overrides):
    clean = trained(tmp_path / "clean", Recording, **overrides)
    other = trained(tmp_path / "poisoned", poisoned(clean.sampled), **overrides)
    mask = clean.learned[0]["response_mask"]
    assert not mask[:, :4].all() and other.learned[0]["logprobs"][~mask].isnan().all()
    assert metric_lines(tmp_path / "poisoned") == metric_lines(tmp_path / "clean")
    for name, value in weights(other).items():
        assert torch.equal(value, weights(clean)[name]), name


def test_lengths_and_denominators_count_chosen_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "ENTROPY_STEPS", 1)
    trainer = trained(tmp_path, Recording, step_batch_size=10, kl_coef=5.0, kl_estimator="k3")
    # Of the second step: before the first update there is no KL.
    rollouts, line = trainer.learned[1], metric_lines(tmp_path)[1]
    mask = rollouts["response_mask"]
    count = int(mask.sum())
    assert (mask[:, 1:] & ~mask[:, :-1]).any(), "there are holes"
    assert line["objective/response_length"] == pytest.approx(count / 10) and line["tokens/sampled"] == count
    assert line["objective/kl_avg_seq"] > 1e-6
    means = {"objective/kl_avg_seq": "kl", "objective/entropies": "entropies", "ppo/returns/mean": "returns"}
    for metric, key in means.items():
        assert line[metric] == pytest.approx(float(rollouts[key][mask].double().mean()), rel=1e-5), metric
    assert set(trainer.denominators) == {count}
    assert not any(rollouts[name][~mask].any() for name in ("kl", "shaped_rewards", "advantages", "returns", "rewards"))
