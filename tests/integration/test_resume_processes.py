"""A run of one to three processes that was stopped and resumed is the run that was never stopped: to the last bit where
it goes on as it began, within rounding where it goes on under another number of processes or ZeRO stage.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from alpaca_ppo.checkpoint.serialization import Checkpoint
from tests.integration.launching import start_tiny
from tests.tiny_runs import metric_lines

pytestmark = pytest.mark.proof

COMMON = (
    "dtype=float32",
    "total_episodes=30",
    "save_steps=1",
    "eval_prompts=3",
    "eval_steps=2",
    "kl_controller=proportional",
    "target_kl=0.1",
    "lr_scheduler_type=cosine",
    "warmup_steps=3",
)
KINDS = {
    "full": (*COMMON, "critic_pretraining_steps=1", "weight_decay=0.1"),
    "cached": (*COMMON, "critic_layout=cached", "critic_width=64", "critic_depth=1", "critic_epochs=2"),
    "lora": (*COMMON, "lora=true", "critic_layout=adapter", "noisy=true", "save_total_limit=2"),
}
# Where each setting resumes runs of settings that come before it.
FROM_OTHERS = {
    "ddp": [],
    "fsdp": ["ddp"],
    "zero3": ["ddp", "fsdp"],
    "zero2": ["ddp"],
    # Three processes.
    "fsdp-3": ["fsdp", "zero3"],
    "ddp-3": ["fsdp-3"],
    "single": ["zero3", "ddp", "fsdp", "fsdp-3"],
    "zero1": ["single"],
}
# Not DDP on three processes: after its first step, also that of a resumed run, it puts gradients into other buckets,
# and the sum of three depends on their place there.
EXACT = [setting for setting in FROM_OTHERS if setting != "ddp-3"]
MOVES = [(before, after) for after, others in FROM_OTHERS.items() for before in others]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with SETTING/KIND/whole, SETTING/KIND/parts and SETTING/from_OTHER."""
    folder = tmp_path_factory.mktemp("resume")
    for setting, others in FROM_OTHERS.items():
        wanted: list[tuple[Any, ...]] = []
        for kind, settings in KINDS.items():
            wanted.append((folder / setting / kind / "whole", *settings))
            if setting in EXACT:
                parts = folder / setting / kind / "parts"
                wanted.append((parts, *settings, "stop_after=2"))
                # The refusal is the same in every setting; one each of DDP and of sharded weights.
                refused = kind == "full" and setting in ("ddp", "zero3")
                wanted.append((parts, *settings, "resume=true", f"refused_first={refused}"))
        for other in others:
            moved = folder / setting / f"from_{other}"
            shutil.copytree(folder / other / "full/whole", moved)
            wanted.append((moved, *KINDS["full"], f"resume={moved / 'checkpoint-2'}"))
        start_tiny(setting, *wanted)
    return folder


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", EXACT)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(setting, kind, runs):
    whole, parts = (runs / setting / kind / name for name in ("whole", "parts"))
    assert [line["step"] for line in metric_lines(whole)] == [0, 1, 2, 3]
    assert metric_lines(parts) == metric_lines(whole)
    ours, theirs = final_weights(parts), final_weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_checkpoint_resumes_under_another_setting(before, after, runs):
    moved, whole = runs / after / f"from_{before}", runs / before / "full/whole"
    for ours, theirs in zip(metric_lines(moved), metric_lines(whole), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if "padding" not in name:
                assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-5), f"step {ours['step']}: {name}"
    weights, tolerance = final_weights(moved), 1e-6 if "fsdp" in before + after else 1e-4
    for name, tensor in final_weights(whole).items():
        assert float((weights[name] - tensor).norm()) <= tolerance * float(tensor.norm()) + 1e-7, name


@pytest.mark.parametrize("setting", EXACT)
def test_the_newest_checkpoints_are_kept(setting, runs):
    kept = sorted(path.name for path in (runs / setting / "lora/parts").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("setting", EXACT)
def test_a_checkpoint_holds_the_same_tensors_whatever_the_setting(setting, runs):
    for kind in KINDS:
        shapes = []
        for name in ("single", setting):
            saved = Checkpoint.read(runs / name / kind / "whole/checkpoint-3")
            assert len(saved.rng) == (1 if name == "single" else 3 if name.endswith("-3") else 2)
            moments = {f"{i} {k}": v for i, state in saved.optimizer["state"].items() for k, v in state.items()}
            shapes.append({name: (t.dtype, t.shape) for name, t in (saved.weights | moments).items()})
        assert shapes[0] == shapes[1]
