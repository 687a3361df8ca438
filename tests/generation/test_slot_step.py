"""The decode step in slots, as captured: the tokens of the plain loop, static shapes, nothing asked of the device."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from alpaca_ppo.generation import graphs
from alpaca_ppo.generation.decode import decode
from alpaca_ppo.generation.graphs import SlotMemory, precision_of
from alpaca_ppo.generation.responses import Generation, ResponseBuffer
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.slot_step import choose_and_record, read_tokens
from alpaca_ppo.models.packed_attention import install_attention
from tests.generation.tapes import Tapes
from tests.tiny_models import EOS, PACKED, PAD, SMALLEST, tiny_causal_lm

PROMPTS = ([5, 9, 33], [7], [40, 11, 6, 20, 3, 17, 29], [8, 8])
ORDER = (2, 0, 3, 1)
"""The row of each slot."""
SLOTS = len(PROMPTS) + 1


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def params_of(**changes: Any) -> SamplingParams:
    defaults = {"max_new_tokens": 9, "temperature": 0.8, "pad_token_id": PAD, "stop_token_ids": (EOS, 31)}
    return SamplingParams(**{**defaults, "truncate_token_ids": (12, 13, 14), "truncate_after": 3, **changes})


def plain(model: PreTrainedModel, params: SamplingParams) -> Generation:
    """The responses of the plain loop, one prompt at a time."""
    rows = []
    for prompt_id, prompt in enumerate(PROMPTS):
        queries, keys = torch.tensor([prompt]), params.random_keys(torch.tensor([prompt_id]))
        responses = ResponseBuffer(keys, params, logprob_dtype=model.dtype)
        decode(
            model,
            queries,
            torch.ones_like(queries),
            num_return_sequences=1,
            max_new_tokens=params.max_new_tokens,
            responses=responses,
        )
        rows.append(vars(responses.finish()).values())
    return Generation(*map(torch.cat, zip(*rows, strict=True)))


def memory_for(model: PreTrainedModel, **changes: Any) -> SlotMemory:
    return SlotMemory(SLOTS, 2, 16, precision=precision_of(model), **{"new_capture": Tapes(), **changes})


def prefill(memory: SlotMemory, model: PreTrainedModel, params: SamplingParams) -> None:
    """Puts the prompts into slots, which leaves one idle, and chooses their first tokens."""
    memory.begin(params, rows=len(PROMPTS))
    state, rows = memory.state, len(PROMPTS)
    prompts = [*(PROMPTS[row] for row in ORDER), [4]]
    # One token at a time, and the last of a shorter prompt again, which writes the same states.
    for column in range(max(map(len, prompts))):
        at = [min(column, len(prompt) - 1) for prompt in prompts]
        state.tokens.copy_(torch.tensor([prompt[i] for prompt, i in zip(prompts, at, strict=True)]))
        state.lengths.copy_(torch.tensor(at))
        logits = read_tokens(model, memory.cache, state, slots=SLOTS, columns=16)
    state.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts]))
    state.rows[:rows] = torch.tensor(ORDER)
    state.keys[:rows] = params.random_keys(torch.arange(rows))[torch.tensor(ORDER)]
    state.running[:rows], state.limits[:rows] = True, params.max_new_tokens
    choose_and_record(logits[:rows], state, memory.outputs, memory.rules, slots=torch.arange(rows))


def sampled(memory: SlotMemory, model: PreTrainedModel, params: SamplingParams) -> Generation:
    """The responses by steps over 8 columns and then over 16, more of them than the rows need."""
    prefill(memory, model, params)
    for step in range(params.max_new_tokens + 1):
        memory.step(model, slots=SLOTS, columns=8 if step == 0 else 16)
    assert memory.running() == [False] * SLOTS
    out = memory.outputs
    return Generation(*(t[: len(PROMPTS)].clone() for t in (out.responses, out.mask, out.logprobs, out.stopped)))


@cache
def slot_model(arch: str) -> PreTrainedModel:
    windows = {"sliding_window": 4} if arch in ("gemma2", "gemma3", "mistral") else {}
    model = tiny_causal_lm(arch, dtype=torch.float64, **windows)
    if model._can_set_experts_implementation():
        # The default one takes no float64.
        model.set_experts_implementation("batched_mm")
    assert install_attention(model)
    return model


def assert_same(found: Generation, wanted: Generation, tolerance: float = 1e-10) -> None:
    for name in ("responses", "response_mask", "stopped"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("arch", PACKED)
def test_captured_steps_choose_the_tokens_of_the_plain_loop(arch: str) -> None:
    model, params, tapes = slot_model(arch), params_of(), Tapes()
    # The softmax of Gemma 2's own attention and the router of DeepSeek V3 are in float32.
    tolerance = 1e-5 if arch.startswith(("gemma2", "deepseek")) else 1e-10
    assert_same(sampled(memory_for(model, new_capture=tapes), model, params), plain(model, params), tolerance)
    assert tapes.captured == 2  # One for each number of columns.


@pytest.mark.parametrize("changes", [{"do_sample": False}, {"top_k": 5, "top_p": 0.9}, {"max_new_tokens": 1}])
def test_settings_of_the_choice_hold_in_slots(changes: dict[str, Any]) -> None:
    model, params = slot_model("llama"), params_of(**changes)
    assert_same(sampled(memory_for(model), model, params), plain(model, params))


class Operators(TorchDispatchMode):
    """Records the operators that run, with the shapes of their tensors and all other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shown = torch.utils._pytree.tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, (args, kwargs))
        self.calls.append((str(func), str(shown)))
        return func(*args, **(kwargs or {}))


VIEWS = (
    "slice",
    "select",
    "squeeze",
    "unsqueeze",
    "expand",
    "view",
    "_unsafe_view",
    "alias",
    "transpose",
    "t",
    "split",
)


def kernels(operators: Operators) -> int:
    """How many operators compute something."""
    return sum(name.split(".")[1] not in VIEWS for name, _ in operators.calls)


def test_a_step_asks_nothing_of_the_device_and_repeats_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    params, asking = params_of(), ("_local_scalar_dense", "nonzero", "lift_fresh", "unique", "masked_select", "equal")
    for arch in ("llama", "gemma3", "gpt2", "mixtral"):
        model = slot_model(arch)
        memory, recorded = memory_for(model, new_capture=None), []
        prefill(memory, model, params)
        with monkeypatch.context() as patch:
            for name in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__"):
                patch.setattr(Tensor, name, lambda *_: pytest.fail("a step reads from the device"))
            for _ in range(3):
                with Operators() as operators:
                    memory.step(model, slots=SLOTS, columns=16)
                recorded.append(operators.calls)
        assert recorded[0] == recorded[1] == recorded[2]
        assert not {name.split(".")[1] for name, _ in recorded[0]} & set(asking)


def test_a_step_runs_few_operators_beside_those_of_the_model() -> None:
    model, params = slot_model("llama"), params_of()
    memory = memory_for(model, new_capture=None)
    prefill(memory, model, params)
    with Operators() as step:
        memory.step(model, slots=SLOTS, columns=16)
    with Operators() as reading:
        read_tokens(model, memory.cache, memory.state, slots=SLOTS, columns=16)
    tokens = torch.zeros(SLOTS, 4, dtype=torch.long)
    past = model(tokens).past_key_values
    with Operators() as own:
        model(tokens[:, :1], past_key_values=past, position_ids=tokens[:, :1] + 4)
    # Two layers store two tensors each, as the model's own cache does. Six operators find the columns to write, five
    # make the mask.
    assert kernels(reading) - kernels(own) <= 11
    # The random numbers take 19, the choice 34 (where the vocabulary is a multiple of 256, fewer), the log-prob 4, the
    # end of rows 8, the position ids 3, recording and advancing 18.
    assert kernels(step) - kernels(reading) <= 86


def test_compiled_steps_are_one_graph_for_each_number_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params, traced = tiny_causal_lm("llama", dtype=torch.float64, **SMALLEST), params_of(), []
    assert install_attention(model)

    def counting(module: Any, inputs: Any) -> Any:
        traced.append(module)
        return aot_eager(module, inputs)

    monkeypatch.setattr(graphs, "_compiled", partial(graphs._compiled, counting))
    memory = memory_for(model, new_capture=None)
    found = sampled(memory, model, params_of(compile_decoding=True))
    assert len(traced) == 2
    assert_same(found, plain(model, params))


def test_a_model_that_cannot_be_compiled_is_named_with_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its experts are those that were hit, whose number depends on the data.
    model = tiny_causal_lm("mixtral", dtype=torch.float64, experts_implementation="eager", **SMALLEST)
    assert install_attention(model)
    monkeypatch.setattr(graphs, "_compiled", partial(graphs._compiled, "eager"))
    memory = memory_for(model, new_capture=None)
    with pytest.raises(
        ValueError, match=r"compile_decoding \(True\).*MixtralForCausalLM .*set compile_decoding: false"
    ):
        sampled(memory, model, params_of(compile_decoding=True))
