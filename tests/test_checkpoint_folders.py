from pathlib import Path

import pytest

from alpaca_ppo.checkpoint_folders import (
    newest_checkpoint,
    refuse_finished_run,
    resolve_checkpoint,
    rotate_checkpoints,
)


def make_folders(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    assert newest_checkpoint(tmp_path / "absent") is None
    make_folders(tmp_path, "checkpoint-9", "checkpoint-10", "checkpoint-best", ".checkpoint-11.incomplete", "final")
    (tmp_path / "checkpoint-12").write_text("a file")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("asked", [True, "true", "True"])
def test_true_resumes_from_the_newest_checkpoint_and_needs_one(tmp_path, asked):
    with pytest.raises(ValueError, match="holds no checkpoint-<step> folder"):
        resolve_checkpoint(asked, tmp_path)
    make_folders(tmp_path, "checkpoint-5")
    assert resolve_checkpoint(asked, tmp_path) == tmp_path / "checkpoint-5"
    assert resolve_checkpoint("some/where", tmp_path) == Path("some/where")


@pytest.mark.parametrize("name", ["checkpoint-5", "final"])
def test_a_new_run_does_not_write_over_an_older_one(tmp_path, name):
    refuse_finished_run(tmp_path)
    make_folders(tmp_path, name)
    with pytest.raises(ValueError, match=f"already holds {name} of another run"):
        refuse_finished_run(tmp_path)


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [(None, None, [2, 9, 10, 30]), (4, None, [2, 9, 10, 30]), (2, None, [10, 30]), (1, 2, [2]), (2, 9, [9, 30])],
)
def test_the_oldest_checkpoints_go_and_the_kept_one_stays(tmp_path, limit, keep, left):
    make_folders(tmp_path, "checkpoint-2", "checkpoint-9", "checkpoint-10", "checkpoint-30", "other")
    rotate_checkpoints(tmp_path, limit, keep=None if keep is None else tmp_path / f"checkpoint-{keep}")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(f"checkpoint-{n}" for n in left), "other"])
