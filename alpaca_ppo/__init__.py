"""alpaca_ppo."""
