import pytest
import torch
from accelerate.state import AcceleratorState


@pytest.fixture
def as_torchrun_starts_one_process(monkeypatch):
    """The environment of a process that torchrun has started alone; its group ends with the test."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
