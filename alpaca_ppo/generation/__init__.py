"""The sampler: from prompts to responses, with the log-prob of every chosen token.

`generate` is its entry point. The package does not depend on rewards or environments.
"""

# Registers them.
import alpaca_ppo.generation.built_in_backends  # noqa: F401
from alpaca_ppo.generation.backends import Backend, generate, make_backend, register_generation_backend
from alpaca_ppo.generation.responses import Generation, SamplingHooks, SamplingParams
from alpaca_ppo.generation.stopping import StopStrings, resolve_stop_tokens, resolve_truncate_tokens, resolve_turn_end
from alpaca_ppo.generation.turns import PENDING, Turn, Turns

__all__ = [
    "PENDING", "Backend", "Generation", "SamplingHooks", "SamplingParams", "StopStrings", "Turn", "Turns", "generate",
    "make_backend", "register_generation_backend", "resolve_stop_tokens", "resolve_truncate_tokens",
    "resolve_turn_end",
]  # fmt: skip
