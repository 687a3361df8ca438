"""Options given in Python: any object is accepted as it is, or refused by the field's name."""

import dataclasses
import math
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments
from tests.fuzz.mutations import deep, yaml_values
from tests.fuzz.oracle import Refused, fuzz, outcome

REQUIRED = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"]}
FIELDS = [(cls, field.name) for cls in (ScriptArguments, LoraArguments, PPOConfig) for field in dataclasses.fields(cls)]
CYCLE: list = []
CYCLE.append(CYCLE)
OBJECTS = [Decimal("0.1"), Fraction(1, 3), 1j, object(), int, print, Path("x"), iter([]), range(3), CYCLE, b"x"]
OBJECTS += [np.float32(0.5), np.float64(0.5), np.int64(3), np.bool_(True), np.array([1.0, 2.0]), np.array("x")]
OBJECTS += [np.str_("x"), bytearray(b"x"), torch.tensor(0.5), torch.tensor([1, 2]), torch.float32, deep(900)]
OBJECTS += [deep(900, mapping=True), 2**20000, {1: CYCLE}]


@fuzz(1500, field=st.sampled_from(FIELDS), value=yaml_values | st.sampled_from(OBJECTS) | st.just([0.5, OBJECTS[-3]]))
def test_any_object_is_kept_or_refused_by_the_fields_name(field, value):
    cls, name = field
    given = {**(REQUIRED if cls is ScriptArguments else {}), name: value}
    found = outcome(lambda: cls(**given), names=(name,))
    if isinstance(found, Refused):
        return
    kept = getattr(found, name)
    if name == "report_to" and isinstance(value, str):
        assert kept == [value]
    elif name.endswith("warmup_steps") and isinstance(value, float) and value >= 1:
        # Below 1, as 0.0 is, it is a share.
        assert (type(kept), kept) == (int, value)
    elif name == "resume_from_checkpoint" and value is False:
        assert kept is None
    elif name == "output_dir":
        assert kept == os.path.abspath(value)
    else:
        assert kept is value and not (isinstance(value, float) and math.isnan(value))
