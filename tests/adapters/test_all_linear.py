"""`--lora_target_modules all-linear`: adapters on every linear layer but the output head, in several families."""

import pytest
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.config.script_arguments import LoraArguments
from tests.tiny_models import tiny_causal_lm

CASES = [
    ("llama", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("gemma3", {}),
    ("opt", {}),
]


@pytest.mark.parametrize(("arch", "overrides"), CASES, ids=[arch for arch, _ in CASES])
def test_every_linear_layer_but_the_head_gets_an_adapter(arch, overrides):
    model = tiny_causal_lm(arch, **overrides)
    head = model.get_output_embeddings()
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    arguments = LoraArguments(use_peft=True, lora_target_modules=["all-linear"])
    adapters = add_policy_adapter(model, arguments.peft_config("CAUSAL_LM"))
    found = {name for name, module in adapters.model.named_modules() if isinstance(module, LoraLayer)}
    assert found == linear
