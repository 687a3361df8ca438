"""Evaluation: statistics over the responses to each prompt, win-rates, judges, and stored answers to compare with.
`trainer.evaluation` samples and scores the responses.
"""
