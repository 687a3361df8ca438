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
    """The states of this process's random number generators."""
    legacy = np.random.get_state(legacy=False)
    key = legacy["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": legacy | {"state": legacy["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def seed_random_states(seed: int, rank: int) -> None:
    """Seeds the random number generators of this process by a function of `seed` and `rank`.

    Ranks draw different numbers. Only the global generators of Python, NumPy and torch (every device) are seeded; the
    package itself draws from none of them.
    """
    python, legacy, of_torch = np.random.SeedSequence([seed, rank]).generate_state(3).tolist()
    random.seed(python)
    np.random.seed(legacy)
    torch.manual_seed(of_torch)


def set_random_states(state: Mapping[str, Any]) -> None:
    """Restores what `random_states` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # With fewer devices only the first states are used, so that a GPU run can be loaded on a machine without one.
    for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda, device)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """A block that may draw from the generators; afterwards, also after an exception, they are as they were before."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
