"""Estimates the memory of a run without loading weights: `alpaca-ppo estimate-memory --config run.yaml`."""
