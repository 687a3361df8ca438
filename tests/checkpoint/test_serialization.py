"""A checkpoint gives a run back to the last bit, and one that is damaged or of another model is refused before anything
changes.
"""

import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import get_scheduler

from alpaca_ppo.checkpoint.serialization import FILES, Checkpoint, check_fits, checkpoint_bytes, read_weights
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.random_states import random_states, seed_random_states
from tests.leftovers import work_folder

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


class Whole(Engine):
    """The part of an engine that a checkpoint needs, of a model that is no policy."""

    def __init__(self, model, optimizer):
        self.actor_critic, self.optimizer = model, optimizer


def save(run, folder, **parts):
    """Writes a checkpoint of `run`, which may hold other `parts`."""
    whole = Whole(run["model"], run["optimizer"])
    held = {"weights": whole.weights(), "optimizer": whole.optimizer_state(), "rng": [random_states()]}
    rest = {"scheduler": run["scheduler"].state_dict(), "components": EXTRA, "best": {}, "identity": {}}
    Checkpoint(**{**held, **rest, **parts}).write(folder)


def load(run, folder):
    """Reads a checkpoint, checks it and restores it, as a manager does; returns its components."""
    whole = Whole(run["model"], run["optimizer"])
    saved = Checkpoint.read(folder)
    check_fits(folder, saved, whole)
    saved.restore(whole, run["scheduler"], 0)
    return saved.components


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
    save(run, tmp_path / "checkpoint-3")
    return tmp_path / "checkpoint-3"


def refuse(run, folder, message):
    before = snapshot(run)
    with pytest.raises(ValueError, match=message):
        load(run, folder)
    assert snapshot(run) == before


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"optimizer": torch.optim.SGD, "momentum": 0.9}])
def test_a_resumed_run_goes_on_to_the_last_bit(tmp_path, options):
    seed_all(1)
    whole = make_run(**options)
    train(whole, 3)
    save(whole, tmp_path / "checkpoint-3")
    expected = train(whole, 4)
    seed_all(2)
    resumed = make_run(seed=7, **options)
    train(resumed, 1)
    assert load(resumed, tmp_path / "checkpoint-3") == EXTRA
    assert train(resumed, 4) == expected
    assert snapshot(resumed) == snapshot(whole)


def test_a_fresh_optimizer_without_state_is_restored_too(tmp_path):
    run = make_run()
    save(run, tmp_path / "checkpoint-0")
    other = make_run(seed=1)
    train(other, 2)
    load(other, tmp_path / "checkpoint-0")
    assert other["optimizer"].state_dict() == run["optimizer"].state_dict()


def test_a_checkpoint_that_a_killed_run_was_about_to_replace_is_read_where_it_is(saved):
    names = set(read_weights(saved))
    saved.rename(work_folder(saved.parent, saved.name) / "old.alpaca_ppo")
    assert Checkpoint.read(saved).components == EXTRA and set(read_weights(saved)) == names


def test_weights_keep_their_place_in_memory_and_stay_tied(saved):
    assert set(load_file(saved / "model.safetensors")) == {"first.weight", "first.bias", "low", "count"}
    run = make_run(seed=7)
    before = {name: parameter.data_ptr() for name, parameter in run["model"].named_parameters()}
    load(run, saved)
    assert {name: parameter.data_ptr() for name, parameter in run["model"].named_parameters()} == before
    assert run["model"].tied.weight is run["model"].first.weight


def test_of_a_tensor_s_memory_only_its_own_part_is_saved(tmp_path):
    memory = torch.arange(1_000_000.0)
    views = {"low": memory[:4], "turned": memory[:8].view(2, 4).t()}
    save(make_run(), tmp_path / "checkpoint-1", components=views)
    components = load(make_run(), tmp_path / "checkpoint-1")
    assert components["low"].tolist() == [0, 1, 2, 3]
    assert components["turned"].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert (tmp_path / "checkpoint-1" / FILES[1]).stat().st_size < 100_000


def test_states_of_the_devices_present_are_saved_and_restored(tmp_path, monkeypatch):
    run, restored = make_run(), {}
    states = [torch.tensor([i, 1], dtype=torch.uint8) for i in range(3)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    save(run, tmp_path / "checkpoint-1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state.tolist()}))
    load(run, tmp_path / "checkpoint-1")
    assert restored == {0: [0, 1], 1: [1, 1]}


def test_numbers_of_numpy_are_saved_as_pythons_and_other_objects_are_refused_without_a_folder(tmp_path):
    for held in ({"when": 1j}, {"when": {1j: 1}}):
        with pytest.raises(ValueError, match=r"components/when.* is 1j, which a checkpoint cannot hold"):
            save(make_run(), tmp_path / "checkpoint-1", components=held)
    assert list(tmp_path.iterdir()) == []
    save(make_run(), tmp_path / "checkpoint-1", components={"kl": np.float64(0.1), "by_level": {np.float64(0.5): 1}})
    assert load(make_run(), tmp_path / "checkpoint-1") == {"kl": 0.1, "by_level": {0.5: 1}}


def test_the_generators_are_a_function_of_seed_and_rank():
    def drawn(seed, rank):
        seed_random_states(seed, rank)
        return [random.random(), np.random.rand(), float(torch.rand(()))]

    numbers = [drawn(seed, rank) for seed, rank in [(0, 0), (0, 1), (1, 0), (1, 1), (42, 0)]]
    assert len({number for row in numbers for number in row}) == 15
    assert drawn(0, 1) == numbers[1]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def set_entries(folder, **entries):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


INFINITE = {name: {"bytes": math.inf, "sha256": ""} for name in FILES}
# tests/fuzz damages the files in many more ways.
DAMAGES = [
    *((lambda folder, name=name: flip(folder / name), f"{name} is damaged") for name in FILES),
    *((lambda folder, name=name: (folder / name).unlink(), f"{name} is missing") for name in FILES),
    (lambda folder: (folder / "manifest.json").unlink(), "no readable manifest.json"),
    (lambda folder: (folder / "manifest.json").write_text("[" * 9000), "no readable manifest.json"),
    (lambda folder: set_entries(folder, files=INFINITE), "no readable manifest.json"),
    (lambda folder: set_entries(folder, files={}), "no readable manifest.json"),
    (lambda folder: set_entries(folder, version=99), "'version': 99.* install the version that wrote it"),
    (lambda folder: set_entries(folder, format="another"), "'format': 'another'"),
    (lambda folder: folder.rename(folder.with_name("elsewhere")), "is no folder"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(saved, damage, message):
    damage(saved)
    run = make_run(seed=7)
    train(run, 1)
    refuse(run, saved, message)


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
        (make_run(7, width=5), r"tensor.low is bfloat16 \(4,\) in the checkpoint and bfloat16 \(5,\) here"),
        (with_model(Wider(7)), r"tensor.more.weight is absent in the checkpoint and float32 \(2, 2\) here"),
        (with_model(Model(7).half()), r"tensor.low is bfloat16 \(4,\) in the checkpoint and float16 \(4,\) here"),
        (with_model(Model(7)), r"optimizer group.0.parameters is 1 in the checkpoint and 3 here"),
        (make_run(7, optimizer=torch.optim.SGD), r"optimizer group.0.settings is .*'betas'.*'momentum'"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_anything_changes(saved, run, message):
    refuse(run, saved, message)


def test_a_checkpoint_has_each_weight_and_its_two_moments_in_float32_or_wider():
    float32, bfloat16 = torch.zeros(3, 4), torch.zeros(5, dtype=torch.bfloat16, device="meta")
    # 12 * 4 + 5 * 4 + 2 * 8 = 84 bytes, and three times that with the moments.
    trained = [float32, bfloat16, torch.zeros(2, dtype=torch.float64)]
    assert checkpoint_bytes(trained, adamw=False) == 84
    assert checkpoint_bytes(trained, adamw=True) == 252
