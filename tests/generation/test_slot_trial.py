"""Which models are sampled in slots, and what happens with the others."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from alpaca_ppo.generation import slots
from alpaca_ppo.generation.slots import slot_problem
from tests.generation.test_generate import run, tensors_of
from tests.tiny_models import PACKED, PADDED, tiny_causal_lm, tiny_config
from tests.tiny_runs import metric_lines, tiny_trainer


def test_rounding_in_half_precision_is_no_problem() -> None:
    # test_slots asks for every family in float64.
    for arch in ("llama", "gemma2", "gpt_oss", "deepseek_v3"):
        assert arch in PACKED and slot_problem(tiny_causal_lm(arch, dtype=torch.bfloat16)) is None


def test_other_families_are_not_and_auto_generates_them() -> None:
    for arch in PADDED:
        assert slot_problem(tiny_causal_lm(arch)) is not None
    model = tiny_causal_lm("bloom")
    found, expected = run(model, rows_at_once=2), run(model, backend="generate", rows_at_once=2)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), tensors_of(expected), strict=True))
    with pytest.raises(ValueError, match="generation_backend slots cannot run BloomForCausalLM"):
        run(model, backend="slots")


CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class Forgetful(LlamaForCausalLM):
    """Reads the cache, and stores nothing in the one that was passed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **{**kwargs, CACHE: copy.deepcopy(kwargs.get(CACHE))})

    forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)


class Strict(LlamaForCausalLM):
    """Knows no further keywords."""

    def forward(self, input_ids: Any = None, cache: Any = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, **{CACHE: cache})


class Failing(LlamaForCausalLM):
    """Cannot do what it is asked to."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert kwargs.pop(CACHE, None) is None, "no cache"
        return super().forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)


def of_class(kind: type[PreTrainedModel]) -> PreTrainedModel:
    model = kind(tiny_config("llama")).eval()
    model.load_state_dict(tiny_causal_lm("llama").state_dict())
    return model


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Forgetful, "its logits differ by .* from those of a pass over the row"),
        (Strict, "a trial raised TypeError: .*unexpected keyword"),
        (Failing, "a trial raised AssertionError: no cache"),
    ],
)
def test_a_model_that_cannot_is_found_by_a_trial(kind: type[PreTrainedModel], problem: str) -> None:
    with pytest.raises(ValueError, match=f"slots cannot run .*{problem}"):
        run(of_class(kind), backend="slots")


def test_a_model_whose_attention_cannot_be_replaced_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("llama")
    monkeypatch.setattr(slots, "packing_problem", lambda model: None)
    assert "its attention (sdpa) reads a cache of its own" in str(slot_problem(model))


def test_the_trial_leaves_modes_as_they_were() -> None:
    model = tiny_causal_lm("llama", hidden_act="gelu").train()
    model.lm_head.eval()
    assert slot_problem(model) is None
    assert [name for name, module in model.named_modules() if not module.training] == ["lm_head"]


@pytest.mark.parametrize("arch", ["lfm2", "mamba", "bloom"])
def test_a_family_that_slots_cannot_run_trains_a_step_without_an_option(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = tiny_trainer(tmp_path, model=tiny_causal_lm(arch), total_episodes=10)
    trainer.train()
    (line,) = metric_lines(tmp_path)
    assert line["mismatch/logprob_abs_mean"] < 1e-4 and line["ppo/policy/optimizer_steps"] > 0
    reason = slot_problem(tiny_causal_lm(arch))
    said = capsys.readouterr().out
    assert reason and said.count(reason) == said.count("sampled by model.generate") == 1
