"""A real model learns to write sentences: SmolLM2-135M-Instruct, with given words and a rule for a reward."""
