"""Evaluation: statistics over the responses to each prompt, win-rates, judges, and stored answers to compare with.

What samples and scores the responses is in `trainer.evaluation`.
"""
