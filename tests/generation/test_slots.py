"""The slot loop gives the tokens of plain passes over whole rows, whatever shares the slots and whoever waits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation import Generation, SamplingHooks, SamplingParams, slot_passes
from alpaca_ppo.generation.slot_passes import visible_columns
from alpaca_ppo.generation.slots import EXACT, SlotLoop, StepShapes, slot_problem
from alpaca_ppo.generation.token_sampling import choose_tokens
from alpaca_ppo.models.packed_attention import is_installed
from tests.generation.test_generate import NAMES, PROMPTS, assert_same, padded, tensors_of
from tests.models.test_packed_sequences import InFloat64
from tests.tiny_models import EOS, PACKED, PAD, tiny_causal_lm

COMMON = [13, *range(30, 50)]
SYSTEM = [COMMON + prompt for prompt in PROMPTS]
"""21 tokens that all prompts begin with."""
BUCKETS = StepShapes(
    slot_unit=lambda rows: 1 << (rows - 1).bit_length(), column_unit=4, check_every=3, admission_cost=1.0
)
"""Shapes as on an accelerator, for short rows."""
TIGHT = StepShapes(slot_unit=lambda rows: 32, column_unit=1, check_every=1, admission_cost=1.0)
"""Every slot takes part in every step, idle ones too."""
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 0.9,
    "pad_token_id": PAD,
    "stop_token_ids": (EOS, 7, 9, 10, 11),
    "truncate_token_ids": tuple(range(20, 30)),
    "truncate_after": 5,
    "num_return_sequences": 3,
    "seed": 3,
    "step": 1,
}


def model_of(arch: str, **overrides: Any) -> PreTrainedModel:
    model = tiny_causal_lm(arch, dtype=torch.float64, **overrides)
    # The fast kernel of experts has no float64.
    model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def in_slots(
    model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, slots: int | None = None, **given: Any
) -> Generation:
    params = SamplingParams(**{**SETTINGS, **{name: given.pop(name) for name in NAMES & given.keys()}})
    hooks = SamplingHooks(**{name: given.pop(name) for name in ("before_token", "on_finished") if name in given})
    # A model with hooks is tried each time, and its passes would be counted.
    assert is_installed(model) or slot_problem(model) is None
    shapes = given.pop("shapes", None)
    options: Any = {"rows_at_once": slots, "turns": None, "hooks": hooks, **given}
    return SlotLoop(model, padded(prompts), params, options, shapes).run()


@torch.no_grad()
def plain(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **changes: Any) -> Generation:
    """The responses by a pass over the whole row for each token."""
    params = SamplingParams(**{**SETTINGS, **changes})
    n, width = params.num_return_sequences, params.max_new_tokens
    keys, shape = params.random_keys(padded(prompts)["prompt_ids"]), (len(prompts) * n, width)
    responses, mask = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.bool)
    logprobs, stopped = torch.zeros(shape, dtype=torch.float64), torch.zeros(len(keys), dtype=torch.bool)
    for row, key in enumerate(keys):
        tokens = list(prompts[row // n])
        for t in range(width):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[:, -1]
            numbers = uniforms(key.view(1), t) if params.do_sample else None
            choice = choose_tokens(logits, numbers, temperature=params.temperature)
            token = int(choice.tokens)
            tokens.append(token)
            responses[row, t], mask[row, t], logprobs[row, t] = token, True, choice.logprobs
            if token in params.stop_token_ids or (token in params.truncate_token_ids and t >= params.truncate_after):
                stopped[row] = True
                break
    return Generation(responses, mask, logprobs, stopped)


@torch.no_grad()
def assert_states(model: PreTrainedModel, prompts: list[list[int]], found: Generation) -> None:
    """The states of `found` are those that a pass over each whole row has before its tokens, in the first layers."""
    n = len(found.responses) // len(prompts)
    assert found.states is not None
    layers = found.states.size(2)
    for row, (response, mask) in enumerate(zip(found.responses, found.response_mask, strict=True)):
        tokens = torch.tensor([prompts[row // n] + response.tolist()])
        # Index 0 has the embeddings.
        hidden = model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states[1 : layers + 1]
        before = torch.stack(hidden, dim=2)[0, len(prompts[row // n]) - 1 : -1]
        assert_close(found.states[row][mask], before[mask], rtol=1e-10, atol=1e-10)


# What `make test` runs; the others are for `make proof`.
KEPT = ("gpt2", "llama", "gemma3_window", "gpt_oss", "mixtral")


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in KEPT else pytest.mark.proof) for arch in PACKED]
)
def test_slots_sample_what_plain_passes_choose_on_every_family_that_packs(arch: str) -> None:
    model = model_of(arch)
    with InFloat64():
        expected = plain(model)
        # Five slots for twelve rows: three prompts share them, and one has a sample that starts later.
        assert_same(in_slots(model, slots=5, shapes=BUCKETS), expected, 1e-10)
        assert_same(in_slots(model, slots=None), expected, 1e-10)
    assert 4 < len({tuple(row) for row in expected.responses.tolist()}) and 0 < expected.stopped.sum()


@pytest.mark.parametrize(("arch", "overrides"), [("gpt2", {}), ("gemma3", {"sliding_window": 4})])
def test_no_number_of_slots_and_no_shape_of_the_steps_changes_a_token(arch: str, overrides: dict[str, Any]) -> None:
    model = model_of(arch, **overrides)
    for prompts in (PROMPTS, SYSTEM):
        expected = plain(model, prompts)
        for slots in (1, 3, 7, None):
            for shapes in (EXACT, BUCKETS):
                assert_same(in_slots(model, prompts, slots=slots, shapes=shapes), expected, 1e-10)
        assert_same(in_slots(model, prompts, slots=12, shapes=TIGHT), expected, 1e-10)
    greedy = {"do_sample": False, "num_return_sequences": 1, "stop_token_ids": (), "truncate_token_ids": ()}
    assert_same(in_slots(model, slots=3, **greedy), plain(model, **greedy), 1e-10)


@pytest.mark.parametrize("arch", KEPT)
def test_states_before_each_token_are_those_of_a_pass_over_the_whole_row(arch: str) -> None:
    model = model_of(arch)
    with InFloat64():
        for prompts in (PROMPTS, SYSTEM):
            for slots, shapes in ((1, EXACT), (5, BUCKETS), (None, EXACT), (12, TIGHT)):
                found = in_slots(model, prompts, slots=slots, shapes=shapes, state_layers=(1,))
                assert_states(model, prompts, found)
    without = in_slots(model, SYSTEM, slots=5)
    assert without.states is None and torch.equal(without.responses, found.responses)


def test_idle_slots_see_something_in_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense = model_of("gemma3", sliding_window=4), slot_passes.dense_attention

    def strict(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *settings: Any) -> Tensor:
        # Some kernels answer NaN here.
        assert (mask if mask.dtype == torch.bool else mask == 0).any(dim=-1).all()
        return dense(query, key, value, mask, *settings)

    monkeypatch.setattr(slot_passes, "dense_attention", strict)
    # The longest row ends after three tokens, the others after up to twelve.
    prompts = [COMMON + SYSTEM[0], *PROMPTS[1:]]
    settings = {"num_return_sequences": 1, "stop_token_ids": tuple(range(2, 64, 9)), "seed": 2}
    assert_same(in_slots(model, prompts, shapes=TIGHT, **settings), plain(model, prompts, **settings), 1e-10)


def test_idle_slots_need_no_position_beyond_those_of_the_rows() -> None:
    # Each prompt has 5 tokens, and the last of 12 new tokens is never read.
    model, prompts = model_of("gpt2", n_positions=16), [[5, 6, 7, 8, 9]] * 4
    settings = {"truncate_token_ids": ()}
    assert_same(in_slots(model, prompts, slots=3, shapes=TIGHT, **settings), plain(model, prompts, **settings), 1e-10)


class Passes:
    """Records the shape of what a model reads in each pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.shapes: list[tuple[int, int]] = []
        model.register_forward_pre_hook(
            lambda _, args, kwargs: self.shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )

    def of(self, call: Any) -> tuple[Generation, list[int], list[int]]:
        """The result of `call`, the tokens of each prefill, and the rows of each step."""
        self.shapes.clear()
        result = call()
        steps = [rows for rows, width in self.shapes if width == 1]
        return result, [width for rows, width in self.shapes if width > 1], steps


def test_each_prompt_is_computed_once_and_no_row_after_its_end() -> None:
    model = model_of("llama")
    assert slot_problem(model) is None
    passes = Passes(model)
    for slots in (2, 5, None):
        found, prefills, steps = passes.of(lambda slots=slots: in_slots(model, slots=slots, truncate_token_ids=()))
        assert sum(prefills) <= sum(map(len, PROMPTS))
        # The prompt of one token alone is a pass of shape (1, 1), which counts as a step here.
        lengths = found.response_mask.sum(dim=1)
        assert sum(prefills) + sum(steps) == sum(map(len, PROMPTS)) + int((lengths - 1).sum())
        assert max(steps) <= (slots or 12)
    _, prefills, steps = passes.of(lambda: in_slots(model, SYSTEM, slots=2, stop_token_ids=(), max_new_tokens=1))
    # One token each: nothing is decoded. The common tokens are read once.
    assert prefills[0] == len(COMMON) and sum(prefills) + sum(steps) == len(COMMON) + sum(map(len, PROMPTS))


def test_prompts_of_several_beginnings_share_each_of_them_once() -> None:
    model = model_of("llama")
    assert slot_problem(model) is None
    other = [11, *range(40, 62)]
    # Every second prompt begins with the 21 tokens of COMMON, two with 23 others, and one with neither.
    prompts = [COMMON + [5], other + [6], COMMON + [9, 8], [40, 41], other + [7, 5], COMMON + [33], COMMON + [34]]
    expected = plain(model, prompts)
    passes = Passes(model)
    for slots in (1, 2, 4, 9, None):
        reported: list[int] = []
        found, prefills, steps = passes.of(
            lambda slots=slots, reported=reported: in_slots(
                model, prompts, slots=slots, on_finished=lambda rows, _: reported.extend(rows)
            )
        )
        assert_same(found, expected, 1e-10)
        assert sorted(reported) == list(range(21))
        # 21 tokens of COMMON and 1 + 2 + 1 + 1 after them, 23 others and 1 + 2, and 2.
        lengths = found.response_mask.sum(dim=1)
        assert sum(prefills) + sum(steps) == 21 + 5 + 23 + 3 + 2 + int((lengths - 1).sum())


def test_free_slots_are_given_away_in_groups() -> None:
    # Sixteen rows at a time, sixty-four prompts of two tokens, none of which stops before its 4 tokens.
    model = model_of("llama")
    assert slot_problem(model) is None
    settings = {"stop_token_ids": (), "max_new_tokens": 4, "num_return_sequences": 1}
    prompts = (torch.arange(128).view(64, 2) % 60 + 4).tolist()
    _, prefills, steps = Passes(model).of(lambda: in_slots(model, prompts, slots=16, **settings))
    assert prefills == [32] * 4 and steps == [16] * 12


@pytest.mark.parametrize("slots", [3, None])
def test_rows_are_reported_once_and_as_they_end(slots: int | None) -> None:
    model = model_of("llama")
    reported: dict[int, tuple[Tensor, ...]] = {}
    polls: list[int] = []
    at: dict[int, int] = {}

    def on_finished(rows: list[int], finished: Generation) -> None:
        for i, row in enumerate(rows):
            assert row not in reported
            reported[row] = tuple(tensor[i].clone() for tensor in tensors_of(finished))
            at[row] = len(polls)

    found = in_slots(model, slots=slots, on_finished=on_finished, before_token=lambda: polls.append(0))
    for row in range(12):
        for mine, whole in zip(reported[row], tensors_of(found), strict=True):
            assert torch.equal(mine, whole[row])
    lengths = found.response_mask.sum(dim=1).tolist()
    # Rows that start together and wait for no other prompt have ended after as many passes as they have tokens.
    together = range(12) if slots is None else [min(range(3), key=lambda row: lengths[row])]
    assert [at[row] for row in together] == [lengths[row] for row in together]
    assert max(at.values()) == len(polls) and (slots is None) == (max(lengths) == len(polls))


def test_an_exception_between_tokens_leaves_a_model_that_samples_the_same_again() -> None:
    model = model_of("llama")
    expected = in_slots(model, slots=3)
    for stop_at in (1, 2, 5, 11):
        calls: list[int] = []

        def poll(stop_at: int = stop_at, calls: list[int] = calls) -> None:
            calls.append(0)
            if len(calls) == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            in_slots(model, slots=3, before_token=poll)
        assert len(calls) == stop_at
        found = in_slots(model, slots=3)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), tensors_of(expected), strict=True))


def test_a_token_sees_the_columns_up_to_its_own_and_within_its_window() -> None:
    def shown(window: int | None) -> list[str]:
        mask = visible_columns(torch.tensor([[0, 3], [4, 9]]), 5, sliding_window=window)
        return ["".join("x" if visible else "." for visible in row) for row in mask.flatten(0, 1).tolist()]

    assert shown(None) == ["x....", "xxxx.", "xxxxx", "xxxxx"]
    # Column 9 is beyond the five that are read: the slot is idle, and sees what a token in column 4 sees.
    assert shown(2) == ["x....", "..xx.", "...xx", "...xx"]
    assert shown(1) == ["x....", "...x.", "....x", "....x"]
