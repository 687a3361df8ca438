"""Memory estimates for DDP and DeepSpeed ZeRO, against the live tensors of two real processes."""

import json
from typing import Any

import pytest

from tests.integration.launching import start

pytestmark = pytest.mark.proof
FULL = {"reference": "copy"}
ADAPTERS = {"critic_layout": "adapter", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "stage", "lora", "overrides"),
    [
        ("ddp", 0, False, FULL),
        ("zero1", 1, False, {**FULL, "bf16": True}),
        ("zero2", 2, False, {**FULL, "step_per_device_batch_size": 1}),
        ("zero2", 2, True, {"critic_layout": "adapter", "bf16": True}),
        ("zero3", 3, False, FULL),
        ("zero3", 3, True, ADAPTERS),
        ("fsdp", 0, False, FULL),
        ("fsdp", 0, True, ADAPTERS),
        ("fsdp", 0, False, {**FULL, "bf16": True, "gradient_checkpointing": True}),
        ("fsdp", 0, False, {**FULL, "critic_layout": "cached"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_process_takes_the_estimated_memory(tmp_path, config: str, stage: int, lora: bool, overrides: dict[str, Any]):
    given = (str(tmp_path / "out"), json.dumps(stage), json.dumps(lora), json.dumps({**overrides, "response_len": 16}))
    outcome = start("tests/integration/run_measured.py", *given, config=config)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    line = next(line for line in outcome.stdout.splitlines() if line.startswith("PEAKS "))
    peaks = json.loads(line.removeprefix("PEAKS "))
    ratios = {name: peaks["predicted"][name] / peaks["measured"][name] for name in peaks["measured"]}
    print(config, overrides, ratios)
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), (ratios, peaks)
