"""Estimates the memory of a run without loading weights: `python -m alpaca_ppo.estimate_memory --config run.yaml`."""
