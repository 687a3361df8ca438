"""What an update saves that reads a prompt once for its answers: processor time of the policy's passes on 32 answers.

python -m tests.tools.benchmarks.shared_prompts     # two minutes, on a random model of SmolLM2-135M's shape
"""

import time
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from alpaca_ppo.models import packed_attention
from alpaca_ppo.models.policy import Policy
from alpaca_ppo.models.trial import padding_reason

ANSWERS, LONGEST, REPEATS = 32, 32, 3
CASES = ((16, 2), (20, 8), (40, 8), (57, 2), (57, 8), (250, 8))
"""Tokens of a prompt, and answers to each."""


def seconds(policy: Policy, prompt: int, samples: int, *, shared: bool) -> float:
    """Returns the processor time of a forward and a backward pass over answers of 8 to 30 tokens."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(5, 5000, (ANSWERS // samples, prompt), generator=generator).repeat_interleave(samples, 0)
    responses = torch.randint(5, 5000, (ANSWERS, LONGEST), generator=generator)
    mask = torch.arange(LONGEST) < torch.randint(8, 31, (ANSWERS, 1), generator=generator)
    with mock.patch.object(packed_attention, "SHARED_IN_UPDATES", 1 if shared else 10**9):
        policy.zero_grad()
        start = time.process_time()
        outputs = policy(queries, torch.ones_like(queries), responses, mask, temperature=1.0, chunk_size=512)
        outputs.logprobs.sum().backward()
        return time.process_time() - start


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads))
    policy = Policy(model)
    policy.padding_reason = padding_reason(model, "auto")
    for prompt, samples in CASES:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(REPEATS):
            for shared, found in times.items():
                found.append(seconds(policy, prompt, samples, shared=shared))
        ratio = min(times[True]) / min(times[False])
        print(f"prompts of {prompt} tokens, {samples} answers to each: {ratio:.2f} of the time", flush=True)


if __name__ == "__main__":
    main()
