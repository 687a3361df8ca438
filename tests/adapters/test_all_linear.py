"""`--lora_target_modules all-linear`: adapters on every linear layer but the output head, in several families."""

import pytest
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.config.script_arguments import LoraArguments
from tests.tiny_models import tiny_causal_lm

# In qwen2 the head is tied to the embedding.
CASES = {"qwen2": {"tie_word_embeddings": True}, "gpt2": {}, "gpt_neox": {}, "gemma3": {}, "opt": {}}


@pytest.mark.parametrize("arch", CASES)
def test_every_linear_layer_but_the_head_gets_an_adapter(arch):
    model = tiny_causal_lm(arch, **CASES[arch])
    head = model.get_output_embeddings()
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    arguments = LoraArguments(use_peft=True, lora_target_modules=["all-linear"])
    adapters = add_policy_adapter(model, arguments.peft_config("CAUSAL_LM"))
    found = {name for name, module in adapters.model.named_modules() if isinstance(module, LoraLayer)}
    assert found == linear
