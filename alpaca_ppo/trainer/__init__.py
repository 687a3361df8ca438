"""`PPOTrainer`, the loop, and how it is put together from a configuration."""

from alpaca_ppo.trainer.ppo_trainer import PPOTrainer

__all__ = ["PPOTrainer"]
