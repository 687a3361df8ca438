"""Reads the golden cases: inputs and expected values that independent programs computed, one file a function."""

import json
from pathlib import Path

import torch

GOLDEN = Path(__file__).parent / "golden"


def golden_cases(function):
    """The (inputs, expected) pairs of `golden/<function>.json`; lists become float64, int64 or bool tensors."""
    cases = json.loads((GOLDEN / f"{function}.json").read_text())["cases"]
    assert cases, f"{function}.json holds no case"
    return [(_tensors(case["inputs"]), _tensors(case["expected"])) for case in cases]


def _tensors(values):
    return {name: _tensor(value) if isinstance(value, list) else value for name, value in values.items()}


def _tensor(value):
    # Read as float64 at once: through float32, the values would lose half their digits.
    tensor = torch.tensor(value, dtype=torch.float64)
    kind = type(_first(value))
    return tensor if kind is float else tensor.to({bool: torch.bool, int: torch.int64}[kind])


def _first(value):
    return _first(value[0]) if isinstance(value, list) else value
