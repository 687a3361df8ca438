"""Which steps pretrain the critic: the policy is frozen, and the critic's targets are Monte-Carlo returns.

A new critic knows nothing of the policy's returns, and advantages made of its values push the policy anywhere. It is
therefore trained first (VC-PPO, arXiv:2503.01491, section 4.1), on returns that no value enters. How those are computed
is in `advantages`, which passes a rollout needs then in `old_policy`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.ppo.metrics import critic_explained_variance
from alpaca_ppo.types import Rollouts


class CriticPretraining:
    """Decides which steps pretrain the critic: the first `critic_pretraining_steps`, or fewer.

    They end after the first step whose values, before its update, explain `critic_pretraining_explained_variance` of
    the variance of its Monte-Carlo returns (`ppo/val/explained_variance`). That step's update still trains the critic
    alone: its returns are Monte-Carlo returns. All ranks have the same global rollouts, so they decide alike.

    Args:
        args: of the run.
        on_early_end: called with the number of pretraining steps if they end before the configured number.
        report: called with a message for the user when the bound is reached, and when it is not.
    """

    def __init__(self, args: PPOConfig, *, on_early_end: Callable[[int], Any], report: Callable[[str], Any]) -> None:
        self.num_steps = args.critic_pretraining_steps
        """The run's first steps that pretrain the critic, as far as is known."""
        self._args, self._bound = args, args.critic_pretraining_explained_variance
        self._on_early_end, self._report = on_early_end, report

    def includes(self, step: int) -> bool:
        """Whether `step` (from 0) trains the critic alone."""
        return step < self.num_steps

    def end_step(self, step: int, rollouts: Rollouts) -> None:
        """Ends the pretraining after `step` if its critic was good enough; does nothing for later steps.

        Args:
            step: from 0, whose update is complete.
            rollouts: of that step, with values and returns.
        """
        if self._bound is None or not self.includes(step):
            return
        variance, done, planned = critic_explained_variance(rollouts, self._args), step + 1, self.num_steps
        if variance >= self._bound:
            self._report(
                f"step {done}: the critic explains {variance:.3g} of the variance of the returns "
                f"(critic_pretraining_explained_variance: {self._bound:g}), so it is pretrained after {done} of "
                f"{planned} steps"
            )
            if done < planned:
                self.num_steps = done
                self._on_early_end(done)
        elif done == planned:
            self._report(
                f"step {done}: critic_pretraining_steps are over, but the critic explains {variance:.3g} of the "
                f"variance of the returns, less than critic_pretraining_explained_variance: {self._bound:g}"
            )

    def state_dict(self) -> dict[str, int]:
        """The number of pretraining steps, for `load_state_dict`."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores what `state_dict` returned."""
        self.num_steps = int(state["num_steps"])
