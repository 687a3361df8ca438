"""Fingerprints agree where models and functions are the same, wherever they are, and differ where these differ."""

import asyncio
import dataclasses
import enum
import functools
import hashlib
import operator
import re
import struct
import sys

import numpy as np
import pytest
import torch
from torch import nn

from alpaca_ppo.checkpoint.fingerprints import SAMPLED_WEIGHTS, callable_identity, model_state, tensors_fingerprint
from alpaca_ppo.config.modules import load_module
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_config


def model_fingerprint(model):
    return tensors_fingerprint(model_state(model))


FUNCTION = """
import functools

def reward(prompts, completions, scale=1.0, **columns):
    return [scale * len(text) for text in completions]

class Judge:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, completions, **columns):
        return reward([], completions)

    @classmethod
    def of_class(cls, completions, **columns):
        return reward([], completions)

class Strict(Judge):
    limit = 3

def traced(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        return function(*arguments, **named)
    return call

wrapped, cached = traced(reward), functools.lru_cache(reward)
short = lambda completions, **columns: [len(text) for text in completions]
"""


def test_a_fingerprint_hashes_names_types_shapes_and_values():
    tensors = {"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor([7, 8], dtype=torch.uint8)}
    # Names in order, each with what follows from it: little-endian float32 is `<f`.
    text = b"a torch.uint8 (2,)\n" + bytes([7, 8]) + b"b torch.float32 (1, 2)\n" + struct.pack("<2f", 1.0, -2.0)
    assert tensors_fingerprint(tensors) == hashlib.sha256(text).hexdigest()[:16]
    assert tensors_fingerprint(dict(reversed(tensors.items()))) == tensors_fingerprint(tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_every_dtype_has_a_fingerprint_that_its_strides_do_not_change(dtype):
    tensor = torch.arange(12.0).reshape(3, 4).to(dtype)
    transposed = tensor.t().contiguous().t()
    assert transposed.stride() != tensor.stride()
    assert tensors_fingerprint({"a": transposed}) == tensors_fingerprint({"a": tensor})


def test_every_weight_of_a_small_tensor_and_every_column_of_a_large_one_counts():
    small = torch.zeros(2 * SAMPLED_WEIGHTS - 1)
    before = tensors_fingerprint({"a": small})
    for place in (0, 1, SAMPLED_WEIGHTS, small.numel() - 1):
        one = small.clone()
        one[place] = 1.0
        assert tensors_fingerprint({"a": one}) != before
    # A stride of 64 would stay in the same 16 of these 1024 columns.
    large = torch.zeros(1024, 1024)
    before = tensors_fingerprint({"a": large})
    for column in (0, 1, 63, 511, 1023):
        changed = large.clone()
        changed[:, column] = 1.0
        assert tensors_fingerprint({"a": changed}) != before


def test_a_tied_head_follows_its_embedding_and_a_saved_model_keeps_its_fingerprint(tmp_path):
    model = tiny_causal_lm("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    before = model_fingerprint(model)
    model.save_pretrained(tmp_path)
    assert model_fingerprint(type(model).from_pretrained(tmp_path)) == before
    with torch.no_grad():
        model.transformer.wte.weight[5, 5] += 1
    assert model_fingerprint(model) != before


class FourBit(nn.Module):
    """A layer as bitsandbytes quantizes it: packed bytes, with the scales beside them in the state dictionary only."""

    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(32, dtype=torch.uint8).reshape(32, 1), requires_grad=False)
        self.scale = torch.tensor([scale])
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale

    def get_extra_state(self):
        return {"no": "tensor"}


def test_quantized_weights_count_with_their_scales_and_unsaved_buffers_do_not():
    model = nn.Sequential(FourBit(1.0), FourBit(2.0))
    assert sorted(model_state(model)) == ["0.weight", "0.weight.absmax", "1.weight", "1.weight.absmax"]
    before = model_fingerprint(model)
    model[0].cache += 1
    assert model_fingerprint(model) == before
    assert model_fingerprint(nn.Sequential(FourBit(1.0), FourBit(3.0))) != before


def written(folder, text=FUNCTION, name="rewards.py"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return load_module(str(folder / name), what="a reward")


def test_a_moved_file_and_a_script_have_the_same_functions(tmp_path, monkeypatch):
    one, moved = written(tmp_path / "one"), written(tmp_path / "two")
    package = written(tmp_path / "rewards", name="__init__.py")
    monkeypatch.syspath_prepend(tmp_path / "one")
    by_name = load_module("rewards", what="a reward")
    identities = {callable_identity(module.reward) for module in (one, moved, package, by_name)}
    # As `python rewards.py` has it.
    monkeypatch.setitem(sys.modules, "__main__", one)
    one.reward.__module__ = "__main__"
    identities.add(callable_identity(one.reward))
    assert len(identities) == 1 and identities.pop().startswith("rewards.reward (source ")
    for other in (
        written(tmp_path / "one", name="others.py"),
        written(tmp_path / "new", FUNCTION.replace("len", "sum")),
    ):
        assert callable_identity(other.reward) != callable_identity(moved.reward)


def test_each_kind_of_callable_is_named_by_what_defines_it(tmp_path):
    module = written(tmp_path)
    source = r" \(source [0-9a-f]{16}\)"
    reward, judge = f"rewards.reward{source} made with scale=1.0", f"rewards.Judge{source}"
    kinds = {
        reward: [module.reward, module.wrapped, module.cached],
        r"rewards.<lambda> \(code [0-9a-f]{16}\)": [module.short],
        f"rewards.Judge.__call__{source} of {judge}": [module.Judge(), module.Judge(2.0)],
        f"rewards.Judge.__call__{source} of rewards.Strict{source}": [module.Strict()],
        f"rewards.Judge.of_class{source} of {judge}": [module.Judge.of_class, module.Judge().of_class],
        judge: [module.Judge],
        r"builtins\.len": [len],
        r"builtins\.str\.lower": [str.lower],
        r"operator\.itemgetter.*": [operator.itemgetter(1)],
        rf"tasks\.sleep{source} made with result=None": [asyncio.sleep],
        rf"{reward} with nothing": [functools.partial(module.reward)],
    }
    for pattern, callables in kinds.items():
        for function in callables:
            assert re.fullmatch(pattern, callable_identity(function)), (pattern, callable_identity(function))


class Plain:
    pass


def test_the_arguments_of_a_partial_are_compared(tmp_path):
    module = written(tmp_path)
    arguments = [
        {"scale": 2.0},
        {"texts": ["a", b"b"]},
        {"texts": ["a", b"c"]},
        {"table": {"a": (1, True)}},
        {"table": {"a": (1, False)}},
        {"table": {"b", "a"}},
        {"table": np.array([1.0, 2.0])},
        {"table": np.array([1, "a"], dtype=object)},
        {"table": np.float32(1.5)},
        {"table": torch.tensor([1.0, 2.0])},
        {"table": torch.zeros(2, device="meta")},
        {"table": torch.zeros(2).to_sparse()},
        {"model": nn.Linear(2, 2)},
        {"model": nn.Linear(2, 2)},
        {"judge": module.Judge()},
        {"judge": Plain()},
        {"path": tmp_path},
    ]
    identities = [callable_identity(functools.partial(module.reward, **given)) for given in arguments]
    assert len(set(identities)) == len(identities)
    assert identities[0].endswith(" made with scale=1.0 with scale=2.0")
    same = [{"table": {"a", "b"}}, {"judge": Plain()}]
    again = [callable_identity(functools.partial(module.reward, **given)) for given in same]
    assert again == [identities[5], identities[15]]
    positional = {callable_identity(functools.partial(module.reward, [number])) for number in (1, 2)}
    assert len(positional) == 2
    secret = callable_identity(functools.partial(module.reward, api_key="sk-secret"))
    assert "secret" not in secret and "api_key=" in secret


@dataclasses.dataclass
class Rubric:
    target: int
    words: tuple = ()
    calls: list = dataclasses.field(default_factory=list, compare=False)

    def __call__(self, completions, **columns):
        return [float(self.target)] * len(completions)


def test_a_dataclass_counts_with_the_fields_that_make_it_equal():
    def identity(**fields):
        return callable_identity(Rubric(**fields))

    assert identity(target=1).endswith(" with target=1, words=[]")
    assert identity(target=1, calls=["a"]) == identity(target=1)
    assert len({identity(target=1), identity(target=2), identity(target=1, words=("a",))}) == 3
    assert callable_identity(Rubric(1).__call__) != callable_identity(Rubric(2).__call__)
    # What is not declared is not compared, and an option of the run is compared, or free, by itself.
    configs = [functools.partial(len, tiny_config("run", **change)) for change in ({}, {"save_steps": 7})]
    assert callable_identity(configs[0]) == callable_identity(configs[1])


def make_reward(target=1, *, table=None):
    def reward(completions, scale=target, *, offset=target, **columns):
        return [scale * target + offset for _ in completions] if table is None else table

    return reward


class Mode(enum.Enum):
    STRICT = 1
    LAX = 2


def test_closures_and_defaults_are_compared():
    made = [{}, {"target": 100}, {"table": [1]}, {"table": nn.Linear(2, 2)}, {"table": nn.Linear(2, 2)}]
    made += [{"table": Mode.STRICT}, {"table": Mode.LAX}, {"table": make_reward(3)}, {"table": make_reward(4)}]
    identities = [callable_identity(make_reward(**how)) for how in made]
    assert len(set(identities)) == len(identities)
    assert identities[1].endswith(" made with offset=100, scale=100, table=None, target=100")
    assert callable_identity(make_reward(table={"a": 1, "b": 2})) == callable_identity(
        make_reward(table={"b": 2, "a": 1})
    )


def test_what_refers_to_itself_has_an_identity():
    def countdown(n):
        return countdown(n - 1) if n else unset

    identity = callable_identity(countdown)
    unset = [countdown]
    unset.append(unset)
    assert identity.endswith("made with countdown=itself")
    assert callable_identity(countdown).endswith("made with countdown=itself, unset=[itself, itself]")


def test_lambdas_on_one_line_differ_and_what_else_is_there_does_not_matter(tmp_path):
    pairs = written(
        tmp_path, "a, b = lambda x: [x, 1], lambda x: [x, 2]\nc = lambda: (lambda x: [x, 1])\nd = lambda: 1\n"
    )
    other = written(tmp_path / "other", "def f(): pass\n\na = (3, lambda x: [x, 1], 4)[1]\n")
    identity = {name: callable_identity(getattr(pairs, name)) for name in "abcd"}
    assert len(set(identity.values())) == 4 and identity["a"] == callable_identity(other.a)
    assert callable_identity(pairs.c()) == identity["a"].replace("<lambda>", "<lambda>.<locals>.<lambda>")


@pytest.mark.parametrize("long", [list(range(50_000)), np.zeros(50_000)])
def test_long_arguments_have_a_short_identity(long):
    other = long.copy()
    other[7] = -1
    identities = {callable_identity(functools.partial(len, table=[value])) for value in (long, other)}
    assert len(identities) == 2 and max(map(len, identities)) < 300


def test_a_function_without_source_is_named():
    scope = {"__name__": "typed"}
    exec("def reward(completions): return completions", scope)
    assert callable_identity(scope["reward"]) == "typed.reward"
