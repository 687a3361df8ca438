"""Captured decode steps and the memory that is kept for them: always the tensors that count now, and never a crash.

Captures are `tapes`, which replay operators on the memory of the capture as a CUDA graph does.
"""

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from alpaca_ppo.generation import Generation, generate, graphs, slots
from alpaca_ppo.generation.graphs import host_read, slot_memory, weights_binding
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models.packed_attention import install_attention
from tests.generation.tapes import Tapes
from tests.generation.test_generate import padded
from tests.generation.test_slot_step import SLOTS, assert_same, memory_for, params_of, plain, sampled
from tests.tiny_models import EOS, PAD, SMALLEST, tiny_causal_lm

BUCKETS = slots.StepShapes(
    slot_unit=lambda rows: 1 << (rows - 1).bit_length(), column_unit=16, check_every=3, growth=8, admission_cost=1.0
)
"""Shapes as on an accelerator; a cache that is too small grows during a call."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    """Has `generate` capture its steps, as on CUDA."""
    return installed(Tapes(), monkeypatch)


def installed(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> Tapes:
    monkeypatch.setattr(graphs, "CudaCapture", tapes)
    monkeypatch.setattr(graphs, "_on_cuda", lambda model: True)
    monkeypatch.setattr(slots, "EXACT", BUCKETS)
    return tapes


PROMPTS = [[5, 9, 33], [7, 8, 9, 40]]


def ask(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **changes: Any) -> Generation:
    """Responses to `prompts`, in slots unless another backend is asked for."""
    settings: dict[str, Any] = {
        "max_new_tokens": 8,
        "pad_token_id": PAD,
        "stop_token_ids": (),
        "seed": 0,
        "step": 0,
        "prompt_ids": torch.arange(len(prompts)),
        "backend": "slots",
    }
    return generate(model, *padded(prompts), **{**settings, **changes})


def change(model: PreTrainedModel) -> None:
    """Changes all weights where they are."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def test_a_memory_serves_another_rollout_other_settings_and_changed_weights() -> None:
    model = tiny_causal_lm("llama", dtype=torch.float64)
    assert install_attention(model)
    tapes = Tapes()
    memory = memory_for(model, new_capture=tapes)
    first = sampled(memory, model, params_of())
    # Another step of the run has other random numbers, and weights that changed where they are.
    for parameter in model.parameters():
        parameter.mul_(0.7)
    later = sampled(memory, model, params_of(step=3))
    assert tapes.captured == 2
    assert_same(later, plain(model, params_of(step=3)))
    assert not torch.equal(first.responses, later.responses)
    greedy = params_of(do_sample=False)
    assert_same(sampled(memory, model, greedy), plain(model, greedy))
    assert tapes.captured == 4


def test_weights_that_moved_are_captured_again() -> None:
    model = tiny_causal_lm("llama", dtype=torch.float64)
    assert install_attention(model)
    tapes, params = Tapes(), params_of()
    memory = memory_for(model, new_capture=tapes)
    sampled(memory, model, params)
    weight = model.get_input_embeddings().weight
    weight.data = weight.data.flip(0).clone()
    assert_same(sampled(memory, model, params), plain(model, params))
    assert tapes.captured == 4


def test_adapters_that_are_switched_count_as_other_weights() -> None:
    model = tiny_causal_lm("llama")
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    base = lora.get_base_model()
    bound = weights_binding(base)
    assert weights_binding(base) == bound
    with lora.disable_adapter():
        assert weights_binding(base) != bound
    assert weights_binding(base) == bound
    base.model.layers[0].self_attn.q_proj.set_scale("default", 0.5)
    assert weights_binding(base) != bound
    base.model.layers[0].self_attn.q_proj.set_scale("default", 1.0)
    assert weights_binding(base) == bound
    lora.merge_adapter()
    assert weights_binding(base) != bound


def test_captured_steps_sample_what_the_decode_loop_samples(tapes: Tapes) -> None:
    numbers, most = random.Random(0), 0
    for arch, overrides in (("llama", SMALLEST), ("gemma3", {"sliding_window": 4})):
        model = tiny_causal_lm(arch, dtype=torch.float64, **overrides)
        for case in range(6):
            # A common beginning; prompts that outgrow the kept memory, and shorter ones after them.
            common = list(range(20, 40)) if numbers.random() < 0.5 else []
            lengths = [numbers.choice([1, 2, 7]) for _ in range(numbers.choice([1, 3, 5]))]
            prompts = [common + [numbers.randrange(4, 60) for _ in range(length)] for length in lengths]
            if case in (2, 4):
                prompts = [prompt * 4 for prompt in prompts]
            settings: dict[str, Any] = {
                "max_new_tokens": numbers.choice([1, 9, 14]),
                "num_return_sequences": numbers.choice([1, 3]),
                "do_sample": numbers.random() < 0.8,
                "stop_token_ids": (EOS, 7, 9, 10),
                "truncate_token_ids": tuple(range(20, 25)),
                "truncate_after": 4,
                "step": case,
            }
            found = ask(model, prompts, slots=numbers.choice([1, 2, 4, None]), **settings)
            assert_same(found, ask(model, prompts, backend="decode", **settings), 1e-5 if arch == "gemma3" else 1e-10)
            most = max(most, graphs._kept[model].cache.columns)
            change(model)
    assert most > 48 and tapes.captured > 12


def test_a_kept_memory_follows_the_precision_of_the_model(tapes: Tapes) -> None:
    model = tiny_causal_lm("llama")
    for autocast, dtype, tolerance in (
        (torch.autocast("cpu", torch.bfloat16), torch.float32, None),
        (nullcontext(), torch.float32, 1e-5),
        (nullcontext(), torch.float64, 1e-10),
        (nullcontext(), torch.float32, 1e-5),
    ):
        model.to(dtype)
        with autocast:
            found = ask(model)
            assert found.logprobs.dtype == dtype
            if tolerance is not None:
                assert_same(found, ask(model, backend="decode"), tolerance)
    assert graphs._kept[model].precision == (torch.device("cpu"), {torch.float32}, None)


def test_nothing_of_a_call_with_nan_is_left_for_the_next_one(tapes: Tapes) -> None:
    model = tiny_causal_lm("llama", dtype=torch.float64)
    weight = model.get_input_embeddings().weight
    held = weight.clone()
    ask(model)
    weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="weights have diverged"):
        ask(model)
    assert model in graphs._kept
    weight.copy_(held)
    shorter = [[5], [7]]
    assert_same(ask(model, shorter), ask(model, shorter, backend="decode"))


def test_a_call_in_inference_mode_leaves_tensors_that_any_other_call_may_change(tapes: Tapes) -> None:
    model = tiny_causal_lm("llama", dtype=torch.float64, **SMALLEST)
    with torch.inference_mode():
        first = ask(model)
        assert torch.is_inference_mode_enabled()
    assert not first.logprobs.is_inference() and not first.logprobs.requires_grad
    assert_same(ask(model), first)


def test_a_memory_is_freed_before_a_larger_one_is_allocated_and_after_an_error(tapes: Tapes) -> None:
    model = tiny_causal_lm("llama", dtype=torch.float64)
    ask(model)
    states = [weakref.ref(tensor) for pair in graphs._kept[model].cache._storage.values() for tensor in pair]
    alive = []
    longer = [prompt * 9 for prompt in PROMPTS]
    ask(model, longer, before_token=lambda: alive.append(sum(ref() is not None for ref in states)))
    assert len(states) == 4 and set(alive) == {0}

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("as a GPU's")

    with pytest.raises(torch.OutOfMemoryError, match="as a GPU's"):
        ask(model, before_token=out_of_memory)
    assert model not in graphs._kept
    assert_same(ask(model), ask(model, backend="decode"))


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_capture_that_fails_is_reported_once_and_done_without(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes = installed(Tapes(fails_at), monkeypatch)
    model = tiny_causal_lm("llama", dtype=torch.float64, **SMALLEST)
    settings: dict[str, Any] = {"max_new_tokens": 20}
    with pytest.warns(
        UserWarning, match=r"LlamaForCausalLM .*\(operation not permitted when stream is capturing\); they run"
    ) as warned:
        memories = []
        found = ask(model, before_token=lambda: memories.append(graphs._kept.get(model)), **settings)
    # What the graphs before it took is free for the steps that follow.
    assert not memories[0]._steps
    assert len(warned) == 1 and model not in graphs._kept
    expected = ask(model, backend="decode", **settings)
    assert_same(found, expected)
    assert_same(ask(model, **settings), expected)
    assert tapes.captured == fails_at


def test_steps_without_effect_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # A graph is empty if the kernels were launched on another device than that of the capture.
    monkeypatch.setattr(Tapes, "_capture", lambda self, run: lambda: None)
    installed(Tapes(), monkeypatch)
    model = tiny_causal_lm("llama", dtype=torch.float64, **SMALLEST)
    message = r"LlamaForCausalLM had no effect: the responses \[0, 1\] still run .*set cuda_graphs \(True\)"
    with pytest.raises(RuntimeError, match=message):
        ask(model)
    assert model not in graphs._kept
    assert_same(ask(model, cuda_graphs=False), ask(model, backend="decode"))


def test_a_capture_that_finds_no_memory_is_tried_again_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tapes = installed(Tapes(2, error=torch.OutOfMemoryError("as a GPU's")), monkeypatch)
    model = tiny_causal_lm("llama", dtype=torch.float64, **SMALLEST)
    settings: dict[str, Any] = {"max_new_tokens": 20}
    expected = ask(model, backend="decode", **settings)
    message = "ran out of memory while a decode step of LlamaForCausalLM .*Lower rollout_per_device_batch_size"
    with pytest.warns(UserWarning, match=message) as warned:
        assert_same(ask(model, **settings), expected)
    assert len(warned) == 1 and tapes.captured == 2 and model not in graphs._kept
    assert_same(ask(model, **settings), expected)
    assert tapes.captured == 2 + len(graphs._kept[model]._steps) > 3


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense.default"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: x.clone().index_put_((x > 0,), torch.zeros(())), "aten.index_put_.default"),
        (lambda x: x.to("meta"), "aten._to_copy.default"),
        (lambda x: x[torch.arange(2)] + torch.tensor(1.0).mul(2), None),
    ],
)
def test_operators_that_wait_for_the_device_are_found(read: Any, found: str | None) -> None:
    assert host_read(lambda: read(torch.ones(3))) == found


def test_a_model_that_reads_from_the_device_is_named_once_and_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("mixtral", dtype=torch.float64, experts_implementation="eager")
    assert install_attention(model)
    # Steps of a model on CUDA are captured; here the capture is that of the tests.
    monkeypatch.setattr(graphs, "CudaCapture", Tapes())
    monkeypatch.setattr(graphs, "_on_cuda", lambda model: True)
    params = params_of()
    # On a CPU the first read is that of `one_hot`; on CUDA it is the `nonzero` of the experts that were hit.
    message = r"MixtralForCausalLM .*it reads from the device: aten\._local_scalar_dense"
    with pytest.warns(UserWarning, match=message) as warned, kept(model, params) as memory:
        assert_same(sampled(memory, model, params), plain(model, params))
    assert len(warned) == 1
    with kept(model, params) as memory:
        assert memory.new_capture is None


def kept(model: PreTrainedModel, params: SamplingParams, *, columns: int = 16, rows: int = 4) -> Any:
    return slot_memory(model, params, slots=SLOTS, columns=columns, extra_slots=2, rows=rows)


def test_what_was_captured_is_kept_for_the_next_call_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaCapture", Tapes())
    model, params = tiny_causal_lm("llama", dtype=torch.float64), params_of()
    assert install_attention(model)
    with kept(model, params) as on_cpu:
        assert on_cpu.new_capture is None
    monkeypatch.setattr(graphs, "_on_cuda", lambda model: True)
    with kept(model, params_of(cuda_graphs=False)) as switched_off:
        assert switched_off.new_capture is None
    with kept(model, params) as first:
        assert_same(sampled(first, model, params), plain(model, params))
        with kept(model, params) as inner:
            # A reward function that samples while a rollout is under way.
            assert inner is not first and inner.new_capture is None
    with kept(model, params) as second:
        assert second is first
        assert_same(sampled(second, model, params), plain(model, params))
    with kept(model, params, rows=9) as more_rows:
        assert more_rows is first and len(more_rows.outputs.responses) == 10
        assert more_rows.state.rows.tolist() == [9] * SLOTS
        assert_same(sampled(more_rows, model, params), plain(model, params))
    with kept(model, params, columns=20) as longer:
        assert longer is not first and longer.sizes == (SLOTS, 2, 20)
        assert_same(sampled(longer, model, params), plain(model, params))
    with kept(model, params) as again:
        assert again is longer
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_only_the_latest_settings_keep_their_captured_steps(tapes: Tapes) -> None:
    model = tiny_causal_lm("llama", dtype=torch.float64, **SMALLEST)
    expected = {t: ask(model, temperature=t, backend="decode") for t in (0.5, 0.6, 0.7, 0.8, 0.9)}

    def captures_of(temperature: float) -> int:
        before = tapes.captured
        assert_same(ask(model, temperature=temperature), expected[temperature])
        memory = graphs._kept[model]
        assert {key[0] for key in memory._steps} == memory._buffers.keys()
        assert [params.temperature for params in memory._buffers][-1] == temperature
        return tapes.captured - before

    # As evaluations at 0.5 between rollouts whose temperature rises: 0.6 makes way for 0.9, then 0.7 for 0.6.
    temperatures = (0.5, 0.6, 0.5, 0.7, 0.5, 0.8, 0.5, 0.9, 0.5, 0.8, 0.6, 0.5)
    assert [captures_of(t) for t in temperatures] == [1, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0]
    assert [params.temperature for params in graphs._kept[model]._buffers] == [0.9, 0.8, 0.6, 0.5]


def test_a_kept_cache_is_not_both_as_wide_as_one_call_and_as_long_as_another(tapes: Tapes) -> None:
    model = tiny_causal_lm("llama", dtype=torch.float64, **SMALLEST)

    def sizes_after(rows: int, columns: int) -> tuple[int, int, int]:
        with slot_memory(model, params_of(), slots=rows, extra_slots=0, columns=columns, rows=rows) as memory:
            return memory.sizes

    assert sizes_after(2, 200) == (2, 0, 200)
    # 64 * 200 is more than 1.5 times 64 * 10.
    assert sizes_after(64, 10) == (64, 0, 10)
    # 64 * 15 is 1.5 times 64 * 10: large enough for both calls.
    assert sizes_after(8, 15) == (64, 0, 15)
    assert sizes_after(64, 10) == (64, 0, 15)
    assert sizes_after(8, 16) == (64, 0, 16)
    assert sizes_after(2, 200) == (2, 0, 200)


def test_parameters_that_zero_3_gathers_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_on_cuda", lambda model: True)
    model = tiny_causal_lm("llama")
    assert graphs.captures(model, params_of())
    next(model.parameters()).ds_id = 0
    assert not graphs.captures(model, params_of())
