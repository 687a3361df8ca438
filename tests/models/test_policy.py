"""The policy's log-probabilities against a plain forward pass, on every architecture."""

import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from alpaca_ppo.models import Policy, disable_dropout
from alpaca_ppo.models.policy import logit_scaling
from alpaca_ppo.ppo.teacher import TeacherModel
from tests.tiny_models import ARCHITECTURES, tiny_causal_lm


def padded_batch() -> dict[str, torch.Tensor]:
    """Prompts of 1, 3, 5 tokens, responses of 4 (with a hole), 1, 2; ids that include pad (0) and eos (2)."""
    return {
        "queries": torch.tensor([[0, 0, 0, 0, 7], [0, 0, 9, 0, 2], [5, 6, 7, 8, 9]]),
        "query_attn_masks": torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "responses": torch.tensor([[11, 0, 13, 2], [2, 0, 0, 0], [17, 18, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool),
    }


def plain_logprobs(model: PreTrainedModel, batch: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    """Log-probabilities row by row, without padding, from the model's own logits and torch's log_softmax."""
    out = torch.zeros(batch["responses"].shape, dtype=torch.float64)
    for i in range(out.size(0)):
        prompt = batch["queries"][i][batch["query_attn_masks"][i].bool()]
        length = int(batch["response_mask"][i].nonzero().max()) + 1
        response = batch["responses"][i, :length]
        logits = model(input_ids=torch.cat([prompt, response]).unsqueeze(0)).logits[0]
        rows = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        out[i, :length] = rows.gather(1, response.unsqueeze(1)).squeeze(1)
    return torch.where(batch["response_mask"], out, 0.0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logprobs_equal_an_unpadded_forward_pass_in_any_batch(arch):
    model = tiny_causal_lm(arch, dtype=torch.float64)
    batch = padded_batch()
    with torch.no_grad():
        outputs = Policy(model)(**batch, temperature=0.7, chunk_size=2)
        expected = plain_logprobs(model, batch, temperature=0.7)
    assert_close(outputs.logprobs, expected, rtol=1e-9, atol=1e-9)
    assert bool((outputs.entropies[batch["response_mask"]] > 0).all())
    assert bool((outputs.entropies[~batch["response_mask"]] == 0).all())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_train_mode_equals_eval_mode_once_dropout_is_disabled(arch):
    drops = {"gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"), "bloom": ("attention_dropout", "hidden_dropout")}
    overrides = {name: 0.5 for name in drops.get(arch, ("attention_dropout",))}
    model = tiny_causal_lm(arch, **overrides).train()
    ids = torch.arange(4, 12).unsqueeze(0)
    with torch.no_grad():
        noisy = [model(input_ids=ids).logits for _ in range(2)]
        assert not torch.equal(*noisy)
        disable_dropout(model)
        assert_close(model(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_a_model_without_a_language_head_is_refused():
    with pytest.raises(ValueError, match="no language-model head"):
        Policy(tiny_causal_lm("llama").base_model)


@pytest.mark.parametrize("kind", [Policy, TeacherModel])
def test_a_model_that_changes_its_logits_in_an_unsupported_way_is_refused(kind):
    model = tiny_causal_lm("gemma2", final_logit_softcapping=2.0)
    assert logit_scaling(model.config)[1] is not None
    plain = model.config.final_logit_softcapping
    forward = model.forward

    def shifted(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = shifted
    with pytest.raises(ValueError, match="logits are not its head's; override outputs_from_states"):
        kind(model)
    assert model.config.final_logit_softcapping == plain


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_logits_that_are_not_finite_are_refused(value):
    model = tiny_causal_lm("llama")
    forward = model.forward

    def masked(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits[..., 5] = value
        return output

    model.forward = masked
    with pytest.raises(ValueError, match="LlamaForCausalLM's logits are not finite"):
        Policy(model)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("llama4", r"Llama4ForCausalLM .* no backbone under its base_model_prefix \('language_model'\)"),
        ("bart", "BartForCausalLM cannot be a policy: it has .*decoder_layers"),
    ],
)
def test_a_class_without_a_usable_backbone_is_refused_by_name(arch, message):
    with pytest.raises(ValueError, match=message):
        Policy(tiny_causal_lm(arch))
