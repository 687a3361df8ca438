"""DeepSpeed configurations: what agrees with the run is kept, everything else is refused by the entry's name."""

import json
from typing import Any

import pytest
from hypothesis import strategies as st

from alpaca_ppo.distributed.deepspeed_config import check_stage, read_deepspeed_file, resolve_auto
from tests.fuzz.mutations import mutated_bytes, mutated_tree
from tests.fuzz.oracle import Refused, files_unchanged, fuzz, outcome
from tests.tiny_runs import tiny_config

VALID: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False},
    "steps_per_print": 10,
}
# 16 rows in an optimizer step: 2 micro-batches of 4 on each of 2 processes.
SIZES = {"rollout_batch_size": 16, "step_batch_size": 16, "step_per_device_batch_size": 4, "max_grad_norm": 1.0}
ARGS = tiny_config("unused", **SIZES)
OURS = {
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("deepspeed") / "zero.json"


def resolve(file: Any, content: bytes) -> Any:
    file.write_bytes(content)
    with files_unchanged(file.parent):
        read = outcome(lambda: read_deepspeed_file(str(file)), names=(str(file),))
        if isinstance(read, Refused):
            return read
        return outcome(lambda: resolve_auto(read, ARGS, processes=2, hidden_size=8), names=("DeepSpeed",))


@fuzz(300, config=mutated_tree(VALID))
def test_a_mutated_configuration_is_completed_or_refused(file, config):
    found = resolve(file, json.dumps(config).encode())
    if not isinstance(found, Refused):
        assert {name: found[name] for name in OURS} == OURS
        changed = {*OURS, "zero_optimization", "bf16", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"}
        assert {n: v for n, v in found.items() if n not in changed} == json.loads(
            json.dumps({n: v for n, v in config.items() if n not in changed})
        ) or "nan" in str(found).lower()
        outcome(lambda: check_stage(found["zero_optimization"].get("stage"), "it"), names=("it has ZeRO stage",))


@fuzz(
    200, content=mutated_bytes(json.dumps(VALID).encode()) | st.sampled_from([b"[" * 9000, b"null", b"[]", b'"auto"'])
)
def test_a_damaged_file_is_read_or_refused_by_name(file, content):
    resolve(file, content)
