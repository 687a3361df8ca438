"""`PPOTrainer`: the loop over steps, its setup and its evaluations."""

from alpaca_ppo.distributed.launcher import watch_launcher

# Before the imports below, which take seconds in which the launcher may die. Does nothing without a launcher.
watch_launcher()

from alpaca_ppo.trainer.ppo_trainer import PPOTrainer  # noqa: E402

__all__ = ["PPOTrainer"]
