"""PPO written a second time, in plain torch and from the papers: what the trainer's weights are compared with.

It shares no code with the package. The caller gives it what is random, or tested elsewhere: the sampled tokens, the raw
scores, the rows of each optimizer step and the quantile levels of an iqn critic. It computes everything else:
log-probs, entropies and values of policy, reference and critic, shaped rewards, advantages, losses, gradients, AdamW,
the learning rate and the KL coefficient. It is slow on purpose: one row at a time, an optimizer step in one piece.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.independent import heads, losses
from tests.independent.adamw import AdamW, of_critic, rate_factor, separate_critic_steps
from tests.independent.advantages import ESTIMATORS, Rows, kl_values, next_kl_coef, returns_to_go, whitened
from tests.independent.networks import Networks, PolicyRow, Row, Weights, part


@dataclass(frozen=True)
class Samples:
    """What one rollout drew. Entry i of each list is of row i; a tensor (C_i,) has one number per chosen token."""

    rows: list[Row]
    prompt_ids: list[int]
    stopped: list[bool]
    rollout_logprobs: Rows
    scores_by_source: list[list[float | list[float] | None]]
    """Row i's raw scores: of each source a number, one per chosen token, or None."""
    greedy: "Samples | None" = None
    """For remax: the greedy response to the prompt of each row."""


@dataclass(frozen=True)
class Randomness:
    """The random choices of the updates, as functions of the PPO step (from 0)."""

    batches: Callable[[int], Iterator[tuple[int, Tensor]]]
    """The epoch and the rows of each optimizer step of the policy."""
    critic_batches: Callable[[int], Iterator[tuple[int, Tensor]]]
    """The epoch and the rows of each optimizer step that trains the critic alone."""
    taus: Callable[[int, int, int], Tensor | None]
    """(step, epoch, number of the optimizer step) -> the quantile levels of an iqn critic's loss."""


@dataclass
class Experience:
    """One rollout with everything the updates read, and what the trainer's own rollouts are compared with."""

    old: Rows
    reference: Rows
    entropies: Rows
    values: Rows | None
    kl: Rows
    shaped: Rows
    advantages: Rows
    returns: Rows
    weights: Rows | None


@dataclass
class IndependentPPO:
    """A run.

    Args:
        networks: architectures and frozen weights.
        weights: the trained weights at the start, in float64; replaced by every optimizer step.
        config: the run's options by name.
        randomness: the random choices of the updates.
        total_steps: PPO steps of the whole run, for the learning-rate schedule.
    """

    networks: Networks
    weights: Weights
    config: Mapping[str, Any]
    randomness: Randomness
    total_steps: int
    kl_coef: float = field(init=False)
    scores: list[list[float]] = field(default_factory=list)
    """Of each PPO step that trained the policy, before any penalty."""
    num_updates: int = 0
    policy_updates: int = 0
    critic_updates: int = 0
    """Of `num_updates`, those that trained the policy, and those that trained the critic."""
    num_ppo_steps: int = 0
    pretraining_steps: int = field(init=False)
    """The first PPO steps, which train the critic alone; fewer than planned once it explains enough."""
    early_stops: int = 0
    """PPO steps whose updates `target_kl_stop` ended."""

    def __post_init__(self) -> None:
        self.kl_coef = self.config["kl_coef"]
        self.optimizer = AdamW(self.config)
        self.pretraining_steps = self.config["critic_pretraining_steps"]

    def step(self, samples: Samples) -> Experience:
        """One PPO step on `samples`; returns what it learned from, and leaves the new weights in `weights`."""
        with torch.no_grad():
            experience = self._experience(samples)
        policy_total, critic_total = self._planned_updates(len(samples.rows))
        for number, (learner, epoch, chosen) in enumerate(self._plan(len(samples.rows))):
            rows = [i for i in chosen.tolist() if samples.stopped[i] or not self.config["mask_truncated"]]
            if not rows:
                continue
            taus = self.randomness.taus(self.num_ppo_steps, epoch, number)
            gradients = self._gradients(samples, experience, rows, taus, learner)
            if gradients is None:
                self.early_stops += 1
                break
            factor = rate_factor(self.policy_updates, policy_total, self.config, critic=False)
            critic_factor = rate_factor(self.critic_updates, critic_total, self.config, critic=True)
            self.weights = self.optimizer.step(self.weights, gradients, factor, critic_factor)
            self.num_updates += 1
            self.policy_updates += learner != "critic"
            self.critic_updates += learner != "policy"
        if not self._pretrains:
            self.scores.append([self._raw_score(by_source) for by_source in samples.scores_by_source])
            self.kl_coef = next_kl_coef(self.kl_coef, experience.kl, self.config, self.scores)
        self.num_ppo_steps += 1
        return experience

    @property
    def _pretrains(self) -> bool:
        """Whether this PPO step trains the critic alone."""
        return self.num_ppo_steps < self.pretraining_steps

    @property
    def _separate(self) -> bool:
        return separate_critic_steps(self.config)

    def _updates_of_rollout(self, rows: int) -> tuple[int, int]:
        """Optimizer steps of the policy on one rollout, and those of a critic that steps alone."""
        config = self.config
        policy = config["ppo_epochs"] * math.ceil(rows / config["step_batch_size"])
        size = of_critic(config, "step_batch_size", "critic_step_batch_size")
        passes = of_critic(config, "ppo_epochs", "critic_epochs") if self._separate else config["ppo_epochs"]
        return policy, passes * math.ceil(rows / size)

    def _planned_updates(self, rows: int) -> tuple[int, int]:
        """Optimizer steps of policy and critic in the whole run; the policy takes none in critic pretraining."""
        policy, critic = self._updates_of_rollout(rows)
        return policy * (self.total_steps - self.pretraining_steps), critic * self.total_steps

    def _plan(self, rows: int) -> list[tuple[str, int, Tensor]]:
        """Who learns in each optimizer step of this PPO step (policy, critic or both), its epoch and its rows."""
        critic_only = self._pretrains
        policy, critic = self._updates_of_rollout(rows)
        plan = []
        if self._separate or critic_only:
            plan += [("critic", *batch) for batch in self.randomness.critic_batches(self.num_ppo_steps)]
            assert len(plan) == critic
        if not critic_only:
            learner = "policy" if self._separate else "both"
            batches = list(self.randomness.batches(self.num_ppo_steps))
            assert len(batches) == policy
            plan += [(learner, *batch) for batch in batches]
        return plan

    def _policy(self, weights: Weights, row: Row) -> PolicyRow:
        return self.networks.policy_row(weights, row, temperature=self.config["temperature"])

    def _critic(self, weights: Weights, row: Row, taus: Tensor | None = None) -> tuple[Tensor, Tensor]:
        states = self.networks.critic_states(weights, row)
        return heads.predictions(part(weights, "head"), states, self.config, taus)

    def _experience(self, samples: Samples) -> Experience:
        config, temperature = self.config, self.config["temperature"]
        current = [self._policy(self.weights, row) for row in samples.rows]
        old = [row.logprobs for row in current]
        reference = [self.networks.reference_row(row, temperature=temperature).logprobs for row in samples.rows]
        weights = None
        if config["old_policy"] == "correct":
            trained = [stopped or not config["mask_truncated"] for stopped in samples.stopped]
            weights = losses.correction_weights(old, samples.rollout_logprobs, config, trained=trained)
        elif config["old_policy"] == "rollout":
            old = samples.rollout_logprobs
        else:
            # With auto, the first steps recompute.
            assert config["old_policy"] in ("auto", "recompute"), (
                f"no independent computation of old_policy {config['old_policy']!r}"
            )
        if config["reference"] == "none":
            reference = old
        values = None
        if self.networks.layout is not None:
            values = [self._critic(self.weights, row)[1] for row in samples.rows]
        kl = [kl_values(a - b, config["kl_estimator"]) for a, b in zip(old, reference, strict=True)]
        coef = self.kl_coef
        shaped = [reward - coef * k for reward, k in zip(self._rewards(samples), kl, strict=True)]
        if self.networks.teacher is not None:
            for i, row in enumerate(samples.rows):
                taught = self.networks.language_model(self.networks.teacher, row, temperature).logprobs
                shaped[i] = shaped[i] + config["teacher_coef"] * (taught - old[i])
        baseline = None if samples.greedy is None else [float(r.sum()) for r in self._rewards(samples.greedy)]
        rewards = whitened(shaped, keep_mean=True) if config["whiten_rewards"] else shaped
        advantages, returns = ESTIMATORS[config["adv_estimator"]](
            rewards,
            config,
            values=values,
            prompt_ids=samples.prompt_ids,
            baseline_scores=baseline,
            scores_by_source=samples.scores_by_source,
        )
        if self._pretrains:
            returns = returns_to_go(rewards, config["gamma"])
        return Experience(
            old, reference, [row.entropies for row in current], values, kl, shaped, advantages, returns, weights
        )

    def _rewards(self, samples: Samples) -> Rows:
        """Before the KL penalty: the weighted sources, a response's score on its last chosen token."""
        penalty, rows = self.config["penalty_reward_value"], []
        for row, by_source, stopped in zip(samples.rows, samples.scores_by_source, samples.stopped, strict=True):
            reward = torch.zeros(sum(row.chosen), dtype=torch.float64)
            weights = self.config["reward_weights"] or [1.0] * len(by_source)
            for score, weight in zip(by_source, weights, strict=True):
                if isinstance(score, list):
                    reward += weight * torch.tensor(score, dtype=torch.float64)
                elif score is not None:
                    reward[-1] += weight * score
            if penalty is not None and not stopped:
                reward = torch.zeros_like(reward)
                reward[-1] = penalty
            reward[-1] -= self._overlong(row)
            rows.append(reward)
        return rows

    def _overlong(self, row: Row) -> float:
        """What the number of tokens that the policy chose takes from a response's reward."""
        most, buffer = self.config["response_len"], self.config["overlong_buffer_len"]
        return 0.0 if buffer is None else max(0, sum(row.chosen) - (most - buffer)) / buffer

    def _raw_score(self, by_source: list[float | list[float] | None]) -> float:
        """Of a response, before any penalty."""
        weights = self.config["reward_weights"] or [1.0] * len(by_source)
        sums = [sum(score) if isinstance(score, list) else score or 0.0 for score in by_source]
        return sum(weight * score for weight, score in zip(weights, sums, strict=True))

    def _gradients(
        self, samples: Samples, experience: Experience, rows: list[int], taus: Tensor | None, learner: str
    ) -> dict[str, Tensor] | None:
        """The gradient of the loss of one optimizer step, of `learner`; None if target_kl_stop ends the step's
        updates.
        """
        weights = {name: w.detach().requires_grad_() for name, w in self.weights.items()}
        loss = torch.zeros((), dtype=torch.float64)
        if learner != "critic":
            current = [self._policy(weights, samples.rows[i]) for i in rows]
            new, old = [row.logprobs for row in current], [experience.old[i] for i in rows]
            stop = self.config["target_kl_stop"]
            if stop is not None and losses.approximate_kl(new, old) > stop:
                return None
            loss = loss + self._policy_terms(current, experience, rows)
            scores = [self._raw_score(samples.scores_by_source[i]) for i in rows]
            loss = loss + self.config["positive_nll_coef"] * losses.success_loss(new, scores, self.config)
        if learner != "policy" and experience.values is not None:
            loss = loss + self.config["vf_coef"] * self._value_loss(weights, samples, experience, rows, taus)
        other = {"both": None, "policy": True, "critic": False}[learner]
        trained = {n: w for n, w in weights.items() if n.startswith(("critic.", "head.")) != other}
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {name: g for name, g in zip(trained, found, strict=True) if g is not None}

    def _policy_terms(self, current: list[PolicyRow], experience: Experience, rows: list[int]) -> Tensor:
        config, new = self.config, [row.logprobs for row in current]
        old, advantages = [experience.old[i] for i in rows], [experience.advantages[i] for i in rows]
        of_tokens = losses.policy_loss(new, old, advantages, config)
        if config["kl_loss_coef"]:
            kl = losses.kl_loss(new, [experience.reference[i] for i in rows], config)
            of_tokens = [loss + config["kl_loss_coef"] * k for loss, k in zip(of_tokens, kl, strict=True)]
        entropies = [row.entropies for row in current]
        of_tokens = [loss - config["entropy_coef"] * e for loss, e in zip(of_tokens, entropies, strict=True)]
        if experience.weights is not None:
            # All three are expectations over tokens that the sampler drew.
            of_tokens = [loss * experience.weights[i] for loss, i in zip(of_tokens, rows, strict=True)]
        return losses.averaged(of_tokens, config)

    def _value_loss(
        self, weights: Weights, samples: Samples, experience: Experience, rows: list[int], taus: Tensor | None
    ) -> Tensor:
        assert experience.values is not None
        of_rows = []
        for i in rows:
            predicted, _ = self._critic(weights, samples.rows[i], taus)
            of_rows.append(
                heads.token_losses(predicted, experience.returns[i], experience.values[i], self.config, taus)
            )
        return losses.averaged(of_rows, self.config)
