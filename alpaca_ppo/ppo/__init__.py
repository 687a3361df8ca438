"""One step of PPO, without a trainer: rollouts, advantages, losses and updates."""
