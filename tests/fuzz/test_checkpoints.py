"""Files of a checkpoint and of the run beside it: a damaged one is refused by name, before anything has changed."""

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from alpaca_ppo import PPOTrainer
from alpaca_ppo.checkpoint.serialization import FILES
from tests.fuzz.mutations import mutated_bytes, mutated_tree
from tests.fuzz.oracle import Refused, changed, files_unchanged, fuzz, outcome
from tests.tiny_models import SMALLEST, tiny_causal_lm
from tests.tiny_runs import tiny_trainer

NAMES = ("checkpoint", "manifest.json", *FILES)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output folder of a run of two steps with the first checkpoint (the second is beside it), and a trainer
    that could resume it.
    """
    output_dir = tmp_path_factory.mktemp("checkpoints") / "run"
    torch.set_num_threads(1)
    model = tiny_causal_lm("llama", **SMALLEST)
    tiny_trainer(output_dir, model=model, save_steps=1).train()
    shutil.rmtree(output_dir / "final")
    shutil.move(output_dir / "checkpoint-2", output_dir.parent)
    trainer = tiny_trainer(output_dir, model=tiny_causal_lm("llama", **SMALLEST), save_steps=1)
    return output_dir, trainer


def state_of(trainer: PPOTrainer) -> str:
    """A hash of what a load may change: weights, optimizer, schedule, progress and random states."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.numpy().tobytes())
        elif isinstance(value, dict | list | tuple):
            for part in value.items() if isinstance(value, dict) else value:
                add(part)
        else:
            digest.update(repr(value).encode())

    add({name: parameter.detach() for name, parameter in trainer.actor_critic.named_parameters()})
    add([trainer.updater.engine.optimizer.state_dict(), trainer.updater.schedules.state_dict()])
    add([trainer.kl_controller.state_dict(), trainer.state.global_step, trainer.progress.step])
    add([hash(random.getstate()), np.random.get_state()[1].tobytes(), torch.get_rng_state()])
    return digest.hexdigest()


def load(run: Any) -> Any:
    """What loading the first checkpoint gives; a refusal leaves trainer and files as they were."""
    output_dir, trainer = run
    before = state_of(trainer)
    with files_unchanged(output_dir):
        found = outcome(lambda: trainer.checkpoints.load(output_dir / "checkpoint-1"), names=NAMES)
    if isinstance(found, Refused):
        assert state_of(trainer) == before, f"changed, although refused: {found}"
    return found


@fuzz(80, name=st.sampled_from(["manifest.json", *FILES]), data=st.data())
def test_a_checkpoint_with_a_damaged_file_is_refused(run, name, data):
    path = run[0] / "checkpoint-1" / name
    other = (run[0].parent / "checkpoint-2" / name).read_bytes()
    content = data.draw(mutated_bytes(path.read_bytes()) | st.sampled_from([None, b"", b"{}", other]))
    unchanged = content == path.read_bytes()
    same = name == "manifest.json" and not unchanged and content is not None and _same_manifest(content, path)
    with changed(path, content):
        assert isinstance(load(run), Refused) == (not unchanged and not same)


def _same_manifest(content: bytes, path: Path) -> bool:
    """Whether a changed manifest still says the same of the files."""
    try:
        read, written = (json.loads(text.decode()) for text in (content, path.read_bytes()))
        said = [{n: (int(m["files"][n]["bytes"]), m["files"][n]["sha256"]) for n in FILES} for m in (read, written)]
        return said[0] == said[1] and all(read[key] == written[key] for key in ("format", "version"))
    except Exception:
        return False


@fuzz(80, data=st.data())
def test_a_manifest_with_other_entries_is_refused(run, data):
    path = run[0] / "checkpoint-1" / "manifest.json"
    content = json.dumps(data.draw(mutated_tree(json.loads(path.read_text())))).encode()
    same = _same_manifest(content, path)
    with changed(path, content):
        assert isinstance(load(run), Refused) == (not same)
