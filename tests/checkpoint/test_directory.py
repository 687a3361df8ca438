from pathlib import Path

import pytest

from alpaca_ppo.checkpoint.directory import (
    abandon_later_checkpoints,
    check_kinds,
    check_no_earlier_run,
    newest_checkpoint,
    remove_run,
    resolve_checkpoint,
    rotate_checkpoints,
)
from alpaca_ppo.checkpoint.serialization import FILES, verify_files, write_manifest
from tests.leftovers import work_folder


def make_folders(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    assert newest_checkpoint(tmp_path / "absent") is None
    make_folders(tmp_path, "checkpoint-9", "checkpoint-10", "checkpoint-best", "final")
    work_folder(tmp_path, "checkpoint-11", "new")
    (tmp_path / "checkpoint-12").write_text("a file")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("asked", [True, "true", "True"])
def test_true_resumes_from_the_newest_checkpoint_and_needs_one(tmp_path, asked):
    with pytest.raises(ValueError, match="has no checkpoint; name one"):
        resolve_checkpoint(asked, tmp_path, overwrite=False)
    make_folders(tmp_path, "checkpoint-5")
    assert resolve_checkpoint(asked, tmp_path, overwrite=False) == tmp_path / "checkpoint-5"
    assert resolve_checkpoint(str(tmp_path / "checkpoint-4"), tmp_path, overwrite=False) == tmp_path / "checkpoint-4"


def test_a_checkpoint_from_elsewhere_is_not_resumed_among_those_of_another_run(tmp_path):
    make_folders(tmp_path, "here", "there", "there/checkpoint-7")
    named = tmp_path / "there/checkpoint-7"
    assert resolve_checkpoint(str(named), tmp_path / "here", overwrite=False) == named
    make_folders(tmp_path, "here/checkpoint-5")
    # One that a killed run was about to replace counts too.
    work_folder(tmp_path / "there", "checkpoint-8", "old")
    for path in (named, tmp_path / "there/checkpoint-8"):
        with pytest.raises(ValueError, match="holds checkpoint-5 of an earlier run"):
            resolve_checkpoint(str(path), tmp_path / "here", overwrite=False)


def test_sizes_are_checked_before_models_are_loaded_and_contents_when_they_are_read(tmp_path):
    folder = tmp_path / "checkpoint-2"
    make_folders(tmp_path, "checkpoint-1", "checkpoint-2")
    work_folder(tmp_path, "checkpoint-3", "new")
    for name in FILES:
        (folder / name).write_text("content")
    write_manifest(folder)
    verify_files(folder)
    (folder / FILES[0]).write_text("CONTENT")
    verify_files(folder, hashed=FILES[1:])
    with pytest.raises(ValueError, match=f"{FILES[0]} is damaged: .*to another checkpoint"):
        verify_files(folder)
    (folder / FILES[0]).write_text("longer content")
    with pytest.raises(ValueError, match=f"{FILES[0]} is damaged: .* 14 bytes instead of 7;"):
        verify_files(folder, hashed=())
    with pytest.raises(ValueError, match="has no readable manifest.json .*set resume_from_checkpoint to an"):
        verify_files(tmp_path / "checkpoint-1")


UNFINISHED = "holds checkpoint-5 of an earlier run; continue it with --resume_from_checkpoint"
FINISHED = r"holds a finished run \(its models are in final/\); "
EXTEND = "continue it with --resume_from_checkpoint, .*"
ANEW = "choose another output_dir, or let a new trainer delete it with overwrite_output_dir: true$"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["checkpoint-5"], UNFINISHED),
        (["final", "checkpoint-5"], FINISHED + EXTEND + ANEW),
        # Without a checkpoint there is nothing to continue from.
        (["final"], FINISHED + ANEW),
    ],
)
def test_a_new_run_does_not_overwrite_an_earlier_one(tmp_path, names, message):
    check_no_earlier_run(tmp_path)
    make_folders(tmp_path, *names)
    with pytest.raises(ValueError, match=message):
        check_no_earlier_run(tmp_path)


def test_records_of_a_run_without_a_checkpoint_are_not_overwritten_either(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    # An evaluation before the first step, and what a killed process left of a line, are no loss.
    metrics.write_text('{"step": 0, "eval/scores": 1.0}\n{"st')
    check_no_earlier_run(tmp_path)
    metrics.write_text('{"step": 0, "eval/scores": 1.0}\n{"step": 1, "x": 1.0}\n{"step": 2, "x": 1.0}\n')
    with pytest.raises(
        ValueError, match=r"earlier run \(metrics.jsonl has 2 steps\) without .*overwrite_output_dir: true$"
    ):
        check_no_earlier_run(tmp_path)


def test_an_earlier_run_is_deleted_whole_and_nothing_else_is(tmp_path):
    make_folders(tmp_path, "checkpoint-5", "abandoned-checkpoint-7", "abandoned-checkpoint-7-1", "final", "eval")
    # The last two are the user's.
    make_folders(tmp_path, "rollouts", "runs", "checkpoint-best", "notes")
    work_folder(tmp_path, "checkpoint-6", "old", "new")
    kept = ["run.yaml", "run.lock", "checkpoint-list.txt", "notes/metrics.jsonl"]
    for name in ["metrics.jsonl", "skipped_updates.jsonl", "findings.jsonl", "report.html", *kept]:
        (tmp_path / name).write_text("x")
    remove_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-best",
        "checkpoint-list.txt",
        "notes",
        "run.lock",
        "run.yaml",
        "runs",
    ]
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["metrics.jsonl"]
    remove_run(tmp_path / "none")


@pytest.mark.parametrize(("name", "message"), [("checkpoint-5", UNFINISHED), ("final", FINISHED)])
def test_a_folder_that_a_killed_run_was_about_to_replace_counts(tmp_path, name, message):
    work_folder(tmp_path, name, "old", "new")
    with pytest.raises(ValueError, match=message):
        check_no_earlier_run(tmp_path)
    work_folder(tmp_path / "new", "final", "new")
    work_folder(tmp_path / "new", "checkpoint-5", "new")
    check_no_earlier_run(tmp_path / "new")


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [(None, [], [2, 9, 10, 30]), (2, [], [10, 30]), (3, [2, 30], [2, 10, 30]), (1, [2, 30], [2, 30])],
)
def test_the_oldest_checkpoints_go_and_the_kept_one_stays(tmp_path, limit, keep, left):
    make_folders(tmp_path, "checkpoint-2", "checkpoint-9", "checkpoint-10", "checkpoint-30", "other")
    rotate_checkpoints(tmp_path, limit, keep=[tmp_path / f"checkpoint-{n}" for n in keep])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(f"checkpoint-{n}" for n in left), "other"])


def test_checkpoints_of_an_abandoned_branch_are_renamed_and_not_lost(tmp_path):
    for step in (2, 3, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "abandoned-checkpoint-10").mkdir()
    moved = abandon_later_checkpoints(tmp_path / "checkpoint-2")
    assert [path.name for path in moved] == ["abandoned-checkpoint-3", "abandoned-checkpoint-10-1"]
    assert newest_checkpoint(tmp_path).name == "checkpoint-2" and all(path.is_dir() for path in moved)
    assert (
        abandon_later_checkpoints(tmp_path / "checkpoint-2") == abandon_later_checkpoints(tmp_path / "elsewhere") == []
    )


@pytest.fixture
def linked(tmp_path):
    """A run whose second checkpoint was moved to another place, and is a link to it."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    make_folders(tmp_path, "run", "run/checkpoint-1", "run/checkpoint-3", "elsewhere", "elsewhere/moved")
    (elsewhere / "state.pt").write_text("x")
    (run / "checkpoint-2").symlink_to(elsewhere)
    yield run
    assert [path.name for path in elsewhere.iterdir()] == ["state.pt"]


def test_a_link_is_rotated_abandoned_and_removed_and_what_it_points_to_stays(linked):
    moved = abandon_later_checkpoints(linked / "checkpoint-1")
    assert moved == [linked / "abandoned-checkpoint-2", linked / "abandoned-checkpoint-3"]
    assert moved[0].is_symlink()
    moved[0].rename(linked / "checkpoint-2")
    rotate_checkpoints(linked, 1, keep=[linked / "checkpoint-1"])
    assert sorted(path.name for path in linked.iterdir()) == ["abandoned-checkpoint-3", "checkpoint-1"]
    (linked / "final").symlink_to(linked.parent / "elsewhere" / "moved")
    remove_run(linked)
    assert list(linked.iterdir()) == []


def test_a_link_to_a_checkpoint_is_the_checkpoint_it_names(linked):
    # One that the user made for himself: the later checkpoints are those of the folder that it points to.
    (linked / "mine").symlink_to(linked / "checkpoint-1")
    assert [path.name for path in abandon_later_checkpoints(linked / "mine")] == [
        "abandoned-checkpoint-2",
        "abandoned-checkpoint-3",
    ]


def test_what_the_run_would_write_over_in_vain_is_named_at_the_start(tmp_path):
    make_folders(tmp_path, "checkpoint-3", "notes", "final", "rollouts", "checkpoint-best")
    for name in ("run.lock", "checkpoint-list.txt", "metrics.jsonl"):
        (tmp_path / name).write_text("x")
    check_kinds(tmp_path)
    check_kinds(tmp_path / "none")
    (tmp_path / "target").write_text("x")
    for name in ("checkpoint-4", "abandoned-checkpoint-4", "eval", "runs"):
        for make in (Path.touch, lambda path: path.symlink_to(tmp_path / "gone")):
            make(tmp_path / name)
            with pytest.raises(ValueError, match=rf"output_dir .* holds {name}, which is no folder; move it"):
                check_kinds(tmp_path)
            (tmp_path / name).unlink()
    for name in ("run.lock.txt", "findings.jsonl"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=f"holds {name}, which is no file; "):
            check_kinds(tmp_path)
        (tmp_path / name).rmdir()
