"""Environments, tools and conversation partners: what answers the policy between its turns.

The sampler's side of it is `generation.turns`; the trainer begins and ends episodes in `PPOTrainer.collect_rollouts`.
"""
