"""torchrun and `accelerate launch` with one process."""

import pytest
import torch

from tests.tiny_runs import tiny_trainer, weights


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
