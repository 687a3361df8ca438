"""`PPOTrainer`, the loop, and how it is put together from a configuration."""

from alpaca_ppo.distributed.launcher import watch_launcher

# The imports below take seconds, and loading data after them longer, in which the launcher may die. This does nothing
# in a process that no launcher started.
watch_launcher()

from alpaca_ppo.trainer.ppo_trainer import PPOTrainer  # noqa: E402

__all__ = ["PPOTrainer"]
