"""Environments, tools and conversation partners: what answers the policy between its turns.

The sampler asks for their answers through `generation.turns`.
"""
