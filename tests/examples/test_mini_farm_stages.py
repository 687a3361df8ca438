"""The laboratory's stages: which are kept, which run again, and what the screen shows."""

import subprocess
import sys

import pytest

from examples.mini_farm.stages import _REPOSITORY, LOG, MARKER, SHOWN_ON_FAILURE, run_stage

pytestmark = pytest.mark.proof


@pytest.fixture
def stage(tmp_path):
    """Runs a stage in tmp_path / name, and counts how often it was filled."""
    source = tmp_path / "source.py"
    source.write_text("a = 1")

    def run(name="one", fill=None, **changes):
        def count(folder):
            runs.append(name)
            (folder / "made.txt").write_text("made")
            if fill:
                fill(folder)

        inputs = {"settings": {"seed": 1}, "sources": [source], "parents": []}
        return run_stage(tmp_path / name, f"stage {name}", count, **(inputs | changes))

    runs = run.runs = []
    run.source = source
    return run


def test_a_complete_folder_is_kept_if_nothing_changed(stage, capsys):
    folder = stage()
    assert stage() == folder
    assert stage.runs == ["one"]
    first, second = capsys.readouterr().out.splitlines()
    assert "stage one" in first and first.endswith(" s")
    assert "stage one" in second and second.endswith("kept from an earlier run")


def test_a_changed_parent_fills_its_children_again(stage):
    parent = stage("parent")
    stage("child", parents=[parent])
    stage("parent", settings={"seed": 2})
    stage("child", parents=[parent])
    assert stage.runs == ["parent", "child", "parent", "child"]


def test_the_incomplete_folder_of_a_killed_run_is_removed(stage, tmp_path):
    folder = stage()
    (folder / MARKER).unlink()
    (folder / "half written").write_text("")
    stage()
    assert stage.runs == ["one", "one"]
    assert sorted(path.name for path in folder.iterdir()) == [LOG, "made.txt", MARKER]


# Runs in a separate process, because pytest replaces standard output and error.
CHATTER = """
import logging, subprocess, sys
from pathlib import Path
from examples.mini_farm.stages import run_stage

handler = logging.StreamHandler()  # Keeps the current stream, like the loggers of a library.

def fill(folder):
    handler.emit(logging.makeLogRecord({"msg": "logged"}))
    print("printed")
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('by a child')"], check=True)

run_stage(Path(sys.argv[1]), "one", fill, settings={})
print("after")
"""


def test_everything_a_stage_writes_goes_to_its_log_and_one_line_to_the_screen(tmp_path):
    command = [sys.executable, "-c", CHATTER, str(tmp_path / "one")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=_REPOSITORY, check=True)
    screen = ran.stdout.splitlines()
    assert len(screen) == 2 and screen[0].split() == ["one", "0", "s"] and screen[1] == "after"
    assert ran.stderr == ""
    assert (tmp_path / "one" / LOG).read_text().splitlines() == ["logged", "printed", "by a child"]


def test_a_failing_stage_shows_the_end_of_its_log_and_fills_again(stage, capsys):
    def fail(folder):
        subprocess.run([sys.executable, "-c", "print(*range(100), sep='\\n')"], check=True)
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        stage(fill=fail)
    first, where, *tail = capsys.readouterr().out.splitlines()
    assert first.endswith("failed") and LOG in where
    assert tail == [str(number) for number in range(100 - SHOWN_ON_FAILURE, 100)]
    stage()
    assert stage.runs == ["one", "one"]
