"""A run does not resume from what is not its own: an error names the difference, and the folder is unchanged."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from alpaca_ppo import PPOConfig
from alpaca_ppo.checkpoint.compatibility import FREE_TO_CHANGE, check_identity
from alpaca_ppo.checkpoint.serialization import FILES
from tests.docs.markdown import ROOT, table_rows
from tests.leftovers import work_folder
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts, tiny_config, tiny_trainer, weights

RUN = {"save_steps": 1, "total_episodes": 30}


@pytest.mark.parametrize(
    ("entry", "kind"),
    [("train_dataset", "data"), ("weights", "model"), ("rewards", "reward"), ("environments", "reward")],
)
def test_what_may_change_is_named_and_then_allowed(tmp_path, entry, kind):
    saved, here = {entry: {"a": "then"}}, {entry: {"a": "now"}}
    with pytest.raises(ValueError, match=rf"{entry}.a is then .* now here; .*ignore_changes: \[{kind}\]"):
        check_identity(tmp_path, saved, here, tiny_config(tmp_path))
    check_identity(tmp_path, saved, here, tiny_config(tmp_path, ignore_changes=[kind]))


def test_an_entry_that_only_the_checkpoint_has_is_a_difference(tmp_path):
    # As of a run that is resumed with a schedule of the user's.
    saved = {"lr_scheduler_type": {"optimizer_steps": 6}, "metrics": {"lines": 3}}
    with pytest.raises(ValueError, match="run: lr_scheduler_type is present in the checkpoint and absent here"):
        check_identity(tmp_path, saved, {}, tiny_config(tmp_path))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    tiny_trainer(folder, **{**RUN, "total_episodes": 20}, trainer_arguments={"eval_dataset": prompts(3)}).train()
    return folder


@pytest.fixture
def run(first_run, tmp_path):
    """A run that ended after step 2, with checkpoints of steps 1 and 2; a copy for each test."""
    return shutil.copytree(first_run, tmp_path / "run")


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuse(folder, message, *, resume=True, **changes):
    before = files(folder)
    trainer = tiny_trainer(folder, **{**RUN, **changes})
    start = weights(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=resume)
    assert files(folder) == before
    assert all(bool((start[name] == value).all()) for name, value in weights(trainer).items())


@pytest.mark.parametrize("start", ["anew", "from elsewhere"])
def test_a_refused_start_leaves_what_a_live_run_is_writing(run, start, tmp_path):
    resume = None if start == "anew" else str(shutil.copytree(run / "checkpoint-1", tmp_path / "checkpoint-1"))
    (run / "final").rename(work_folder(run, "final", "new") / "old.alpaca_ppo")
    work_folder(run, "checkpoint-3", "new")
    refuse(run, "holds a finished run .*continue it with --resume_from_", resume=resume)
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoint-{step}")
    refuse(run, "holds a finished run .*; choose another output_dir", resume=resume)


def test_a_start_cleans_what_a_killed_run_left(run):
    work_folder(run, "checkpoint-3", "new")
    trainer = tiny_trainer(run, **{**RUN, "total_episodes": 20})
    trainer.train(resume_from_checkpoint=True)
    assert not list(run.glob(".*"))


def test_another_tokenizer_is_refused(run):
    tokenizer = tiny_tokenizer(["first"])
    tokenizer.bos_token, tokenizer.chat_template = "w7", "{{ messages }}"
    message = (
        r"run: tokenizer\.vocabulary.*, tokenizer\.special_tokens.*, tokenizer\.chat_template.* here; change it back"
    )
    refuse(run, message, trainer_arguments={"processing_class": tokenizer})


def test_another_architecture_of_the_same_shapes_is_refused(run):
    other = tiny_causal_lm("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    other.generation_config.eos_token_id = [2, 9]
    message = (
        r"policy\.rope_parameters\.rope_theta is 10000\.0 in the checkpoint and 500\.0 here, "
        r".*policy\.stop_tokens is \[2\]"
    )
    refuse(run, message, model=other)
    model = tiny_trainer(run.parent / "other").actor_critic
    model.critic.backbone.config = tiny_causal_lm("llama", rms_norm_eps=1e-3).config
    refuse(run, r"critic\.rms_norm_eps is 1e-06 in the checkpoint and 0.001 here", model=model)


def changed(how):
    rows = prompts().to_list()
    if how == "edited":
        rows[7]["prompt"] = "w1 w2"
    else:
        rows[0], rows[1] = rows[1], rows[0]
    return Dataset.from_list(rows)


@pytest.mark.parametrize("how", ["edited", "reordered"])
def test_data_that_changed_are_refused_unless_that_is_asked_for(run, how):
    data = {"trainer_arguments": {"train_dataset": changed(how)}}
    refuse(run, r"train_dataset.fingerprint.* here; .* set ignore_changes: \[data\],", **data)
    tiny_trainer(run, **RUN, **data, ignore_changes=["data"]).train(resume_from_checkpoint=True)
    # The checkpoints after that have the new rows, so the option is no longer needed.
    tiny_trainer(run, **{**RUN, "total_episodes": 40}, **data).train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(run)] == [0, 1, 2, 3, 4]


def test_the_same_rows_from_another_place_are_the_same_data(run, tmp_path):
    prompts().to_json(tmp_path / "rows.jsonl")
    data = Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    tiny_trainer(run, **RUN, trainer_arguments={"train_dataset": data}).train(resume_from_checkpoint=True)
    assert metric_lines(run)[-1]["step"] == 3


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_true_stops_at_a_damaged_newest_checkpoint_and_names_the_older_one(run, name):
    shutil.copy(run / "checkpoint-1" / name, run / "checkpoint-2" / name)
    refuse(run, "checkpoint-2.*set resume_from_checkpoint to another checkpoint")


def test_an_older_checkpoint_named_by_hand_repairs_the_damaged_one(run):
    (run / "checkpoint-2/model.safetensors").write_bytes(b"")
    whole = metric_lines(run)
    tiny_trainer(run, **RUN, trainer_arguments={"eval_dataset": prompts(3)}).train(str(run / "checkpoint-1"))
    assert metric_lines(run)[:2] == whole[:2] and metric_lines(run)[-1]["step"] == 3
    tiny_trainer(run, **{**RUN, "total_episodes": 40}).train(str(run / "checkpoint-2"))


def test_records_of_another_run_are_not_mixed_with_the_checkpoint_s(run, tmp_path):
    other = tmp_path / "other"
    tiny_trainer(other, total_episodes=20, seed=1).train()
    shutil.rmtree(other / "final")
    refuse(
        other, r"holds the records of an earlier run \(metrics.jsonl has 2 steps\)", resume=str(run / "checkpoint-2")
    )
    mixed = Path(shutil.copytree(run, tmp_path / "mixed"))
    shutil.copy(other / "metrics.jsonl", mixed)
    refuse(mixed, "metrics.jsonl belongs to another run than the checkpoint", resume=True)
    (other / "metrics.jsonl").unlink()
    tiny_trainer(other, **RUN).train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert [line["step"] for line in metric_lines(other)] == [3]
    # The new folder's own checkpoint matches the new folder's records.
    tiny_trainer(other, **{**RUN, "total_episodes": 40}).train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(other)] == [3, 4]
    refuse(run, "holds a finished run ", resume=str(other / "checkpoint-3"))


def test_the_page_names_every_option_that_may_change():
    rows = table_rows((ROOT / "docs/fault-tolerance.md").read_text("utf-8"), "may change")
    fields = {field.name for field in dataclasses.fields(PPOConfig)}
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row["options"])} & fields
    # The reference is compared by its weights.
    assert named - {"reference"} == set(FREE_TO_CHANGE)
