import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import get_scheduler

from alpaca_ppo.checkpoint.directory import FILES, write_manifest
from alpaca_ppo.checkpoint.serialization import load_checkpoint, save_checkpoint
from alpaca_ppo.distributed.engine import TrainState
from alpaca_ppo.distributed.random_states import random_states, seed_random_states
from tests.leftovers import work_folder
from tests.tiny_models import tiny_causal_lm

EXTRA = {
    "global_step": 3,
    "kl": {"value": 0.1 + 0.2, "limit": math.inf},
    "betas": (0.9, [None, True]),
    "names": {1: "a"},
}


class Model(nn.Module):
    """Two linear layers, one of them used twice, half-precision weights, and a buffer."""

    def __init__(self, seed=0, width=4):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.low = nn.Parameter(torch.randn(width).bfloat16())
        self.register_buffer("count", torch.tensor(0.5))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self, x):
        return self.tied(self.first(x).tanh()) * self.low.float() + torch.rand_like(x) * self.count


def make_run(seed=0, *, width=4, optimizer=torch.optim.AdamW, **options):
    model = Model(seed, width)
    groups = [{"params": [model.first.weight], "weight_decay": 0.1}, {"params": [model.first.bias, model.low]}]
    optimizer = optimizer(groups, lr=0.01, **options)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=20)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def written(run):
    """What a checkpoint saves of `run`."""
    whole = TrainState(run["model"], run["optimizer"])
    parts = {"weights": whole.weights(), "optimizer": whole.optimizer_state(), "rng": [random_states()]}
    return {**parts, "scheduler": run["scheduler"]}


def read(run):
    """Where a checkpoint is restored to."""
    return {"trained": TrainState(run["model"], run["optimizer"]), "scheduler": run["scheduler"]}


def train(run, steps):
    """Losses of `steps` updates on random data, drawn from each of the random number generators."""
    losses = []
    for _ in range(steps):
        x = torch.randn(3, run["model"].low.numel()) + np.random.rand() + random.random()
        loss = run["model"](x).pow(2).mean()
        loss.backward()
        run["optimizer"].step()
        run["scheduler"].step()
        run["optimizer"].zero_grad()
        run["model"].count += 0.25
        losses.append(loss.item())
    return losses


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def snapshot(run):
    rng = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    weights = {name: tensor.tolist() for name, tensor in run["model"].state_dict().items()}
    return str((weights, run["optimizer"].state_dict(), run["scheduler"].state_dict(), rng))


@pytest.fixture
def saved(tmp_path):
    seed_all(1)
    run = make_run()
    train(run, 3)
    folder = tmp_path / "checkpoint-3"
    save_checkpoint(folder, **written(run), extra=EXTRA)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True},
        {"optimizer": torch.optim.SGD, "momentum": 0.9},
        {"optimizer": torch.optim.RAdam},
    ],
)
def test_a_resumed_run_goes_on_to_the_last_bit(tmp_path, options):
    seed_all(1)
    whole = make_run(**options)
    train(whole, 3)
    save_checkpoint(tmp_path / "checkpoint-3", **written(whole), extra=EXTRA)
    expected = train(whole, 4)
    seed_all(2)
    resumed = make_run(seed=7, **options)
    train(resumed, 1)
    assert load_checkpoint(tmp_path / "checkpoint-3", **read(resumed)) == EXTRA
    assert train(resumed, 4) == expected
    assert snapshot(resumed) == snapshot(whole)


def test_what_extra_must_say_is_checked_before_anything_changes(saved):
    run = make_run(seed=7)
    before = snapshot(run)

    def check(extra):
        raise ValueError(f"step {extra['global_step']} will not do")

    with pytest.raises(ValueError, match="step 3 will not do"):
        load_checkpoint(saved, **read(run), check=check)
    assert snapshot(run) == before


def test_a_fresh_optimizer_without_state_is_restored_too(tmp_path):
    run = make_run()
    save_checkpoint(tmp_path / "checkpoint-0", **written(run), extra={})
    other = make_run(seed=1)
    train(other, 2)
    load_checkpoint(tmp_path / "checkpoint-0", **read(other))
    assert other["optimizer"].state_dict() == run["optimizer"].state_dict()


def test_shared_weights_are_saved_once_and_derived_buffers_not_at_all(saved):
    assert set(load_file(saved / "model.safetensors")) == {"first.weight", "first.bias", "low", "count"}


def test_weights_keep_their_place_in_memory_and_stay_tied(saved):
    run = make_run(seed=7)
    before = {name: parameter.data_ptr() for name, parameter in run["model"].named_parameters()}
    load_checkpoint(saved, **read(run))
    assert {name: parameter.data_ptr() for name, parameter in run["model"].named_parameters()} == before
    assert run["model"].tied.weight is run["model"].first.weight


def test_a_language_model_with_tied_embeddings_round_trips(tmp_path):
    model, other = tiny_causal_lm("gpt2", seed=0), tiny_causal_lm("gpt2", seed=1)
    assert model.lm_head.weight is model.transformer.wte.weight
    runs = []
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters())
        runs.append({"model": each, "optimizer": optimizer, "scheduler": get_scheduler("constant", optimizer)})
    save_checkpoint(tmp_path / "checkpoint-1", **written(runs[0]), extra={})
    load_checkpoint(tmp_path / "checkpoint-1", **read(runs[1]))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_two_views_of_one_memory_are_both_saved(tmp_path):
    run = make_run()
    memory = torch.arange(8.0)
    save_checkpoint(
        tmp_path / "checkpoint-1", **written(run), extra={"low": memory[:4], "both": [memory, memory.view(2, 4).t()]}
    )
    extra = load_checkpoint(tmp_path / "checkpoint-1", **read(run))
    assert extra["low"].tolist() == [0, 1, 2, 3]
    assert extra["both"][1].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_states_of_the_devices_present_are_saved_and_restored(tmp_path, monkeypatch):
    run, restored = make_run(), {}
    states = [torch.tensor([i, 1], dtype=torch.uint8) for i in range(3)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    save_checkpoint(tmp_path / "checkpoint-1", **written(run), extra={})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state.tolist()}))
    load_checkpoint(tmp_path / "checkpoint-1", **read(run))
    assert restored == {0: [0, 1], 1: [1, 1]}


def test_nothing_in_a_checkpoint_is_pickled(saved):
    assert sorted(path.name for path in saved.iterdir()) == sorted([*FILES, "manifest.json"])
    assert all(path.suffix in {".json", ".safetensors"} for path in saved.iterdir())


def test_a_value_that_is_neither_plain_nor_a_tensor_is_refused_and_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"cannot hold .*when = .*a complex; use plain values"):
        save_checkpoint(tmp_path / "checkpoint-1", **written(make_run()), extra={"when": 1j})
    assert list(tmp_path.iterdir()) == []


def rewritten(folder, change):
    """Puts what `change` makes of the decoded state.json in its place, in a checkpoint that is otherwise whole."""
    path = folder / FILES[1]
    state = {name: value for name, value in json.loads(path.read_text())["__dict__"]}
    changed = change(state)
    path.write_text(changed if isinstance(changed, str) else json.dumps({"__dict__": list(changed.items())}))
    write_manifest(folder)


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def put(name, value):
    return lambda state: {**state, name: value}


def rng_with(name, value):
    """The only rank's random states with another entry `name`; None leaves it out."""

    def change(state):
        states = [pair for pair in state["rng"][0]["__dict__"] if pair[0] != name]
        return {**state, "rng": [{"__dict__": [*states, *([] if value is None else [[name, value]])]}]}

    return change


RNG = "its entry rng has no random states of rank 0"
STATES = [
    (without("rng"), "its entry rng is missing"),
    (put("rng", {"__dict__": []}), "its entry rng is a dict instead of a list"),
    (put("rng", []), "its entry rng is empty"),
    (put("rng", [3]), RNG),
    (rng_with("python", None), rf"{RNG} \(KeyError: 'python'\)"),
    (rng_with("python", {"__tuple__": [3, {"__tuple__": [1, 2]}, None]}), RNG),
    (rng_with("numpy", None), rf"{RNG} \(KeyError: 'numpy'\)"),
    (rng_with("numpy", {"__dict__": [["bit_generator", "MT19937"]]}), RNG),
    (rng_with("torch", None), rf"{RNG} \(KeyError: 'torch'\)"),
    (rng_with("torch", [1, 2]), rf"{RNG} \(TypeError"),
    (rng_with("cuda", ["state"]), "state of a CUDA device is str, not a tensor of bytes"),
    (without("extra"), "its entry extra is missing"),
    (put("scheduler", 1), "its entry scheduler is a int instead of a dict"),
    (put("optimizer", {"__dict__": [["state", {"__dict__": []}]]}), "its entry optimizer has no param_groups"),
    (put("extra", {"__tensor__": "no such tensor"}), "KeyError: 'no such tensor'"),
    (put("extra", {"__dict__": [], "__tuple__": []}), "ValueError: too many values"),
    (lambda state: "[1, 2]", "it holds a list instead of a dictionary"),
    (lambda state: "{", "JSONDecodeError"),
    (lambda state: "[" * 100_000 + "]" * 100_000, "its JSON is nested too deeply"),
    # The parser reads it, but it nests what it means.
    (put("extra", json.loads('{"__dict__": [["a", ' * 250 + "1" + "]]}" * 250)), "its JSON is nested too deeply"),
]


@pytest.mark.parametrize(("change", "message"), STATES)
def test_a_state_of_another_shape_is_refused_by_name_before_anything_changes(saved, change, message):
    rewritten(saved, change)
    run = make_run(seed=7)
    before = snapshot(run)
    with pytest.raises(ValueError, match=rf"{saved / FILES[1]} is not the state of a run: .*{message}"):
        load_checkpoint(saved, **read(run))
    assert snapshot(run) == before


def test_tensors_that_cannot_be_read_are_refused_by_name(saved):
    """Of a file that its manifest confirms, as a program that writes another format would leave it."""
    for name in ("model.safetensors", "state.safetensors"):
        before = (saved / name).read_bytes()
        (saved / name).write_bytes(b"\0" * 8)
        write_manifest(saved)
        with pytest.raises(ValueError, match=f"{name} is not the state of a run: .*resume from another checkpoint"):
            load_checkpoint(saved, **read(make_run(7)))
        (saved / name).write_bytes(before)


def draws():
    return [random.random(), np.random.rand(), float(torch.rand(()))]


def test_the_generators_are_a_function_of_seed_and_rank():
    def drawn(seed, rank):
        seed_random_states(seed, rank)
        return draws()

    numbers = [drawn(seed, rank) for seed, rank in [(0, 0), (0, 1), (1, 0), (1, 1), (42, 0)]]
    assert len({number for row in numbers for number in row}) == 15
    assert drawn(0, 1) == numbers[1]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def set_version(folder, **entries):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def replace_with_another_run_s(path):
    seed_all(3)
    run = make_run(seed=5)
    train(run, 3)
    other = path.parents[1] / "other" / "checkpoint-3"
    save_checkpoint(other, **written(run), extra=EXTRA)
    path.write_bytes((other / path.name).read_bytes())


def damages():
    for name in FILES:
        yield lambda folder, name=name: (folder / name).write_text(""), f"{name} is damaged: it has 0 bytes"
        yield lambda folder, name=name: replace_with_another_run_s(folder / name), f"{name} is damaged"
        yield lambda folder, name=name: truncate(folder / name), rf"{name} is damaged: it has \d+ bytes"
        yield lambda folder, name=name: flip(folder / name), f"{name} is damaged"
        yield lambda folder, name=name: (folder / name).unlink(), f"{name} is missing"
    yield lambda folder: truncate(folder / "manifest.json"), "no readable manifest.json"
    yield lambda folder: (folder / "manifest.json").write_text(""), "no readable manifest.json"
    yield lambda folder: replace_with_another_run_s(folder / "manifest.json"), "is damaged"
    yield lambda folder: (folder / "manifest.json").unlink(), "no readable manifest.json"
    yield lambda folder: (folder / "manifest.json").write_text("[]"), "no readable manifest.json"
    yield lambda folder: (folder / "manifest.json").write_text("[" * 9000), "no readable manifest.json"
    infinite = {name: {"bytes": math.inf, "sha256": ""} for name in FILES}
    yield lambda folder: set_version(folder, files=infinite), "no readable manifest.json"
    yield lambda folder: set_version(folder, files={}), "no readable manifest.json"
    yield lambda folder: set_version(folder, version=99), "this version of alpaca_ppo reads"
    yield lambda folder: folder.rename(folder.with_name("elsewhere")), "does not exist or is not a folder"


@pytest.mark.parametrize(("damage", "message"), list(damages()))
def test_a_damaged_checkpoint_is_refused_before_anything_changes(saved, damage, message):
    damage(saved)
    run = make_run(seed=7)
    train(run, 1)
    before = snapshot(run)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(saved, **read(run))
    assert snapshot(run) == before


def test_a_manifest_with_any_byte_changed_is_refused_or_says_the_same(saved):
    path, whole = saved / "manifest.json", (saved / "manifest.json").read_bytes()
    refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert load_checkpoint(saved, **read(make_run(7))) == EXTRA
        except ValueError as error:
            assert str(saved) in str(error)
            refused += 1
    # Only spaces between the entries are left.
    assert refused > 0.75 * len(whole)


class Wider(Model):
    def __init__(self, seed):
        super().__init__(seed)
        self.more = nn.Linear(2, 2)


def with_model(model):
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": get_scheduler("constant", optimizer)}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (make_run(7, width=5), r"tensor low is bfloat16 \(4,\) in the checkpoint and bfloat16 \(5,\) here"),
        (with_model(Wider(7)), r"tensor more.weight is absent in the checkpoint and float32 \(2, 2\) here"),
        (with_model(nn.Linear(4, 4)), r"tensor weight is absent in the checkpoint"),
        (
            with_model(Model(7).half()),
            r"tensor low is bfloat16 \(4,\) in the checkpoint and float16 \(4,\) here",
        ),
        (with_model(Model(7)), r"optimizer group 0 is {'parameters': 1, .* in the checkpoint and {'parameters': 3,"),
        (
            make_run(7, optimizer=torch.optim.SGD),
            r"optimizer group 0 is .*'betas'.* in the checkpoint .*'momentum'",
        ),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_anything_changes(saved, run, message):
    before = snapshot(run)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(saved, **read(run))
    assert snapshot(run) == before


def test_saving_keeps_the_new_checkpoint_and_as_many_as_allowed(tmp_path):
    work_folder(tmp_path, "checkpoint-7", "new")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / f"checkpoint-{step}", **written(make_run()), extra={}, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
