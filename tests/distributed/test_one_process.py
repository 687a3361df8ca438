"""torchrun and `accelerate launch` with one process."""

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.tiny_runs import tiny_trainer, weights


@pytest.fixture
def as_torchrun_starts_one_process(monkeypatch):
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def trained_alone(tmp_path):
    trainer = tiny_trainer(tmp_path / "alone")
    trainer.train()
    return weights(trainer)


def test_one_process_of_torchrun_trains_as_a_plain_one(tmp_path, trained_alone, as_torchrun_starts_one_process):
    trainer = tiny_trainer(tmp_path / "torchrun")
    assert torch.distributed.is_initialized()
    trainer.train()
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, trained_alone[name]), name
