"""Models with a state that runs from token to token in some layers, and attention in the others."""

import pytest
import torch
from peft import LoraConfig

from tests.tiny_models import HYBRIDS, PAD, tiny_causal_lm
from tests.tiny_runs import metric_lines, tiny_trainer

NAMED = {
    "qwen3_next": ["q_proj", "in_proj_qkvz", "out_proj"],
    "qwen3_5_moe": ["q_proj", "in_proj_qkv", "out_proj"],
    "kimi_linear": ["q_proj", "o_proj", "f_a_proj"],
    "bailing_hybrid": ["q_proj", "o_proj", "f_proj"],
    "jamba": ["q_proj", "in_proj", "out_proj"],
    "granitemoehybrid": ["q_proj", "in_proj", "out_proj"],
    "lfm2_moe": ["q_proj", "in_proj", "out_proj"],
}
"""Layers for adapters, of mixtures of experts: PEFT maps all-linear to the experts' parameters too."""
BLANKS, LENGTHS = (0, 2, 4, 5, 1), (7, 3, 5, 1, 6)
"""Of five rows: tokens without a prompt on the left, and of the response."""


def rows():
    """Prompts of at most 6 tokens and responses of at most 7, as `ActorCritic.forward` takes them."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (torch.randint(4, 60, (5, width), generator=generator) for width in (6, 7))
    prompt_mask = torch.stack([torch.arange(6) >= blanks for blanks in BLANKS]).long()
    response_mask = torch.stack([torch.arange(7) < length for length in LENGTHS])
    prompts[prompt_mask == 0], responses[~response_mask] = PAD, PAD
    return prompts, prompt_mask, responses, response_mask


def log_probs(trainer, *rows):
    with torch.no_grad():
        return trainer.actor_critic.eval()(*rows, temperature=1.0, chunk_size=8).logprobs


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_every_trained_weight_of_a_hybrid_moves_and_padding_changes_nothing(family, adapted, tmp_path):
    lora = LoraConfig(r=2, target_modules=NAMED.get(family, "all-linear"))
    given = {"peft_config": lora} if adapted else {}
    trainer = tiny_trainer(tmp_path, model=tiny_causal_lm(family), trainer_arguments=given, learning_rate=1e-2)
    prompts, prompt_mask, responses, response_mask = rows()
    together = log_probs(trainer, *rows())
    for row, (blanks, length) in enumerate(zip(BLANKS, LENGTHS, strict=True)):
        one, start, end = slice(row, row + 1), slice(blanks, None), slice(length)
        inputs = prompts[one, start], prompt_mask[one, start], responses[one, end], response_mask[one, end]
        torch.testing.assert_close(log_probs(trainer, *inputs), together[one, end], rtol=0, atol=2e-5)

    trained = {name: p for name, p in trainer.actor_critic.policy.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    trainer.train()
    assert trained and not [name for name, p in trained.items() if torch.equal(p, before[name])]
    assert all(abs(line.get("mismatch/logprob_abs_mean", 0.0)) < 1e-5 for line in metric_lines(tmp_path))
