"""The key-value cache of the decode loop, and the models that it does not support."""

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

from alpaca_ppo.generation import generate
from alpaca_ppo.generation.kv_cache import PreallocatedLayer
from tests.tiny_models import EOS, PAD, tiny_causal_lm, tiny_config

SPECIAL = {"vocab_size": 64, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
RECURRENT = {
    # Mamba has no key-value cache at all; LFM2 has one in some layers only.
    "mamba": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    "lfm2": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
    },
}


def recurrent_model(model_type: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **RECURRENT[model_type], **SPECIAL))


def run(model: PreTrainedModel, backend: str = "decode") -> Any:
    queries = torch.tensor([[5, 6, 7], [8, 9, 10]])
    return generate(
        model,
        queries,
        torch.ones_like(queries),
        max_new_tokens=4,
        pad_token_id=PAD,
        stop_token_ids=[EOS],
        seed=0,
        step=0,
        prompt_ids=torch.arange(2),
        num_return_sequences=2,
        backend=backend,
    )


def test_a_preallocated_layer_holds_the_same_states_as_a_dynamic_one() -> None:
    # 200 tokens outgrow its 64 spare columns three times; rows are repeated and dropped in between.
    generator = torch.Generator().manual_seed(0)
    preallocated, dynamic = PreallocatedLayer(), DynamicLayer()

    def update_both(rows: int, tokens: int) -> None:
        states = torch.randn(2, rows, 2, tokens, 4, generator=generator)
        pairs = zip(preallocated.update(*states.clone()), dynamic.update(*states.clone()), strict=True)
        assert all(torch.equal(actual, expected) for actual, expected in pairs)
        assert preallocated.get_seq_length() == dynamic.get_seq_length()

    update_both(3, 5)
    for layer in (preallocated, dynamic):
        layer.batch_repeat_interleave(2)
    for step in range(200):
        update_both(6 if step < 70 else 4 if step < 71 else 2, 1)
        if step in (69, 70):
            kept = torch.tensor([0, 2, 3, 5]) if step == 69 else torch.tensor([1, 3])
            for layer in (preallocated, dynamic):
                layer.batch_select_indices(kept)


def test_rows_may_be_dropped_before_the_first_step() -> None:
    layer = PreallocatedLayer()
    layer.update(*torch.arange(12.0).view(2, 3, 1, 2, 1))
    layer.batch_select_indices(torch.tensor([2]))
    assert layer.keys.flatten().tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("model_type", "reason"), [("mamba", "takes no past_key_values"), ("lfm2", "caches in LinearAttentionLayer")]
)
def test_recurrent_models_are_referred_to_the_generate_backend(model_type: str, reason: str) -> None:
    model = recurrent_model(model_type)
    with pytest.raises(ValueError, match=f"{reason}.*set generation_backend: generate"):
        run(model)
    generation = run(model, "generate")
    query = torch.tensor([8, 9, 10])
    tokens = generation.responses[2][generation.response_mask[2]]
    with torch.no_grad():
        logits = model.eval()(torch.cat([query, tokens])[None]).logits[0, 2:-1]
    expected = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    assert_close(generation.logprobs[2, : len(tokens)], expected, rtol=1e-5, atol=1e-5)


def test_a_model_with_its_own_cache_layer_is_referred_to_the_generate_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompressedLayer(DynamicLayer):
        pass

    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", CompressedLayer)
    with pytest.raises(ValueError, match="caches in CompressedLayer.*set generation_backend: generate"):
        run(tiny_causal_lm("llama"))


def test_a_model_that_ignores_the_cache_is_referred_to_the_generate_backend() -> None:
    class Forgetful(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, past_key_values=copy.deepcopy(past_key_values), **kwargs)

    with pytest.raises(ValueError, match="Forgetful stored 0 of 3 prompt tokens.*set generation_backend: generate"):
        run(Forgetful(tiny_config("llama")))
