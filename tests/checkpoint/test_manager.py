"""The best checkpoint stays, and is known to a resumed run."""

import math
import shutil

import pytest
from transformers import TrainerState

from alpaca_ppo.checkpoint.manager import BestCheckpoint
from tests.checkpoint.test_best_at_end import NAME, scripted
from tests.tiny_runs import metric_lines, prompts, tiny_config, tiny_trainer


def run(folder, values, *, limit=1, resume=None, total=50, **overrides):
    settings = {"save_steps": 1, "eval_steps": 1, "save_total_limit": limit, "metric_for_best_model": NAME, **overrides}
    arguments = {"eval_dataset": prompts(1)}
    trainer = tiny_trainer(
        folder, trainer_class=scripted(*values), trainer_arguments=arguments, total_episodes=total, **settings
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("limit", "values", "greater", "left", "best"),
    [
        (1, [1, 3, 2, 2, 2], True, [2, 5], 2),
        (3, [1, 3, 2, 2, 2], True, [2, 4, 5], 2),
        (1, [1, 3, 2, 2, 0], False, [5], 5),
        (1, [1, 3, 2, 2, 3], True, [2, 5], 2),
        (1, [math.nan, math.inf, -1, -2, math.nan], True, [3, 5], 3),
    ],
)
def test_the_newest_and_the_best_stay(tmp_path, limit, values, greater, left, best):
    trainer = run(tmp_path, values, limit=limit, greater_is_better=greater)
    assert steps(tmp_path) == left
    assert trainer.state.best_global_step == best
    assert trainer.state.best_metric == values[best - 1]
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")


def test_without_a_metric_none_is_the_best(tmp_path):
    trainer = run(tmp_path, [1, 3, 2, 2, 2], metric_for_best_model=None)
    assert steps(tmp_path) == [5]
    assert trainer.state.best_metric is None and trainer.state.best_model_checkpoint is None


def test_another_metric_or_a_best_that_is_gone_is_sought_anew(tmp_path):
    run(tmp_path / "run", [1, 3, 2, 2, 2], total=30)
    shutil.copytree(tmp_path / "run", tmp_path / "gone")
    shutil.copytree(tmp_path / "run", tmp_path / "turned")
    turned = run(tmp_path / "turned", [1, 3, 2, 4, 5], resume=True, greater_is_better=False)
    assert steps(tmp_path / "turned") == [4, 5] and turned.state.best_global_step == 4
    shutil.rmtree(tmp_path / "gone/checkpoint-2")
    with pytest.warns(UserWarning, match=r"checkpoint-2, the best checkpoint so far \(eval/scripted = 3.*is gone"):
        gone = run(tmp_path / "gone", [1, 3, 2, 1, 0], resume=True)
    assert steps(tmp_path / "gone") == [4, 5] and gone.state.best_global_step == 4


def test_a_best_of_later_steps_is_forgotten_where_training_goes_on_from_before(tmp_path):
    state = TrainerState()
    best = BestCheckpoint(state, tiny_config(tmp_path, eval_steps=1, save_steps=1, metric_for_best_model=NAME))
    before = best.state_dict()
    best.set({NAME: 3.0}, 2, tmp_path / "checkpoint-2")
    best.load_state_dict(before, tmp_path)
    assert best.state_dict() == before and best.folder is None and best.improves({NAME: 1.0})
    assert state.best_metric is None and state.best_model_checkpoint is None


def evaluated(folder, metric, **overrides):
    settings = {"save_steps": 1, "eval_steps": 1, "metric_for_best_model": metric, "ppo_epochs": 2}
    return tiny_trainer(folder, **settings, trainer_arguments={"eval_dataset": prompts(5)}, **overrides)


def test_an_unknown_metric_is_an_error_at_once_that_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'eval/reward'; choose .*eval/rewards.* or null"):
        evaluated(tmp_path / "a", "eval/reward").train()
    assert not (tmp_path / "a/metrics.jsonl").exists()


def test_a_run_that_is_overwritten_leaves_nothing_behind_and_a_trainer_does_not_overwrite_its_own(tmp_path):
    run(tmp_path / "twice", [5, 3, 2], total=30, limit=None, seed=1)
    shutil.copytree(tmp_path / "twice", tmp_path / "resumed")
    (tmp_path / "twice/notes.txt").write_text("kept")
    again = run(tmp_path / "twice", [1, 2], total=20, overwrite_output_dir=True)
    run(tmp_path / "once", [1, 2], total=20)
    assert metric_lines(tmp_path / "twice") == metric_lines(tmp_path / "once")
    left, whole = ({path.name for path in (tmp_path / name).iterdir()} for name in ("twice", "once"))
    assert left == whole | {"notes.txt"}
    # Its state is at the end, so it would delete what it has trained, and train nothing.
    with pytest.raises(ValueError, match=r"output_dir \(.*twice\) holds a finished run"):
        again.train()
    assert steps(tmp_path / "twice") == [2]
    # A run that goes on in its own folder deletes nothing, and one from another folder what that folder held.
    settings = {"limit": None, "seed": 1, "overwrite_output_dir": True}
    longer = run(tmp_path / "resumed", [5, 3, 2, 9], total=40, resume=True, **settings)
    assert steps(tmp_path / "resumed") == [1, 2, 3, 4] and longer.state.best_global_step == 4
    other = str(tmp_path / "resumed/checkpoint-2")
    run(tmp_path / "twice", [5, 3, 2], total=30, resume=other, **settings)
    assert steps(tmp_path / "twice") == [3] and [line["step"] for line in metric_lines(tmp_path / "twice")] == [3]
    # The later checkpoints of that folder stay its own.
    assert steps(tmp_path / "resumed") == [1, 2, 3, 4]
