"""The attention that takes what a query sees from its caller."""

import copy
import json
import math

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.models.packed_attention import (
    AttentionSettings,
    dense_attention,
    install_attention,
    underlying_attention,
    uninstall_attention,
)
from tests.tiny_models import tiny_causal_lm


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_without_the_keyword_an_installed_attention_changes_nothing(arch, tmp_path):
    model = tiny_causal_lm(arch)
    ids, mask = torch.arange(4, 16).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    wanted, attention = model(ids, attention_mask=mask).logits, model.config._attn_implementation
    sampled = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    saved = model.config.to_json_string()

    assert install_attention(model) and install_attention(model)
    assert underlying_attention(model) == attention != model.config._attn_implementation
    for same in (model, copy.deepcopy(model)):
        assert torch.equal(same(ids, attention_mask=mask).logits, wanted)
        assert torch.equal(same.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), sampled)
    assert model.config.to_json_string() == saved
    model.save_pretrained(tmp_path)
    assert "packed" not in json.dumps([path.read_text() for path in tmp_path.glob("*.json")])
    assert type(model).from_pretrained(tmp_path).config._attn_implementation == attention

    uninstall_attention(model)
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids, attention_mask=mask).logits, wanted)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0]])
def test_dense_attention_is_a_softmax_over_the_allowed_keys(softcap, sinks):
    # Two heads share one head of keys and values; d = 1, so that a score is a product of numbers.
    query, key = torch.tensor([[[3.0], [1.0]], [[-1.0], [2.0]]]).double(), torch.tensor([[[1.0], [2.0]]]).double()
    value = torch.tensor([[[5.0, 1.0], [7.0, 0.0]]]).double()

    def expected(head: int, position: int, visible: list[int]) -> list[float]:
        scores = [float(query[head, position, 0] * key[0, k, 0]) * 0.5 for k in visible]
        scores = [softcap * math.tanh(s / softcap) for s in scores] if softcap else scores
        total = sum(map(math.exp, scores)) + (math.exp(sinks[head]) if sinks else 0.0)
        return [
            sum(math.exp(s) / total * float(value[0, k, c]) for s, k in zip(scores, visible, strict=True))
            for c in (0, 1)
        ]

    settings = AttentionSettings(0.5, softcap=softcap, sinks=None if sinks is None else torch.tensor(sinks).double())
    causal = torch.tensor([[expected(head, q, list(range(q + 1))) for q in (0, 1)] for head in (0, 1)]).double()
    parts = (query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    assert_close(dense_attention(*parts, None, settings)[0], causal, **tolerance)
    assert_close(dense_attention(*parts, torch.ones(2, 2).tril().bool(), settings)[0], causal, **tolerance)
    # One query of each head, which sees the second key only.
    last = (parts[0][:, :, 1:], *parts[1:])
    only = torch.tensor([[expected(head, 1, [1])] for head in (0, 1)]).double()
    assert_close(dense_attention(*last, torch.tensor([[False, True]]), settings)[0], only, **tolerance)
