"""The sampler: prompts to responses, with the log-prob of every chosen token.

A KV-cache decode loop of our own, the randomness of its tokens, and what stops a response. It knows nothing of
rewards, of processes or of configuration objects.
"""

from alpaca_ppo.generation.generate import generate
from alpaca_ppo.generation.responses import Generation
from alpaca_ppo.generation.stopping_criteria import resolve_stop_tokens, resolve_truncate_tokens

__all__ = ["Generation", "generate", "resolve_stop_tokens", "resolve_truncate_tokens"]
