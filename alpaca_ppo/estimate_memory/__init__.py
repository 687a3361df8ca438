"""How much memory a run will take: `python -m alpaca_ppo.estimate_memory --config run.yaml`."""
