"""The states of a process's global random generators: Python's, NumPy's and torch's, on the CPU and on CUDA devices.

The package itself draws from none of them (`functional.rng`); reward functions, callbacks and subclasses may.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states, as a checkpoint can hold them."""
    legacy = np.random.get_state(legacy=False)
    key = legacy["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": legacy | {"state": legacy["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def seed_random_states(seed: int, rank: int) -> None:
    """Seeds the generators as a function of `seed` and `rank`, so that ranks draw different numbers."""
    python, legacy, of_torch = np.random.SeedSequence([seed, rank]).generate_state(3).tolist()
    random.seed(python)
    np.random.seed(legacy)
    torch.manual_seed(of_torch)


def set_random_states(state: Mapping[str, Any]) -> None:
    """Restores what `random_states` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # Not strict, so that a run can be resumed with fewer devices.
    for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda, device)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores the states at the end of the block, also after an exception."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
