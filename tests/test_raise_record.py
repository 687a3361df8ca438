"""The record of reached `raise` statements: without it, "every raise has a test" would be a wish."""

import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests import raise_record

SOURCE = """\
def check(value):
    if value < 0:
        raise ValueError("negative")
    try:
        return 1 / value
    except ZeroDivisionError as error:
        raise ValueError("zero") from error
"""


def run(value):
    lines = []
    namespace = {"__raise_reached__": lines.append}
    exec(raise_record.compile_recording(SOURCE, "sample.py"), namespace)
    try:
        namespace["check"](value)
    except ValueError as error:
        return lines, traceback.extract_tb(error.__traceback__)[-1].lineno
    return lines, None


@pytest.mark.parametrize(("value", "line"), [(-1, 3), (0, 7)])
def test_a_raise_is_recorded_on_its_own_line_and_the_traceback_is_unchanged(value, line):
    assert run(value) == ([line], line)


def test_nothing_is_recorded_where_nothing_is_raised():
    assert run(1) == ([], None)


def test_every_raise_statement_of_a_source_is_listed():
    assert raise_record.raise_lines(SOURCE) == [3, 7]


def test_the_package_itself_is_recorded():
    from alpaca_ppo.config import PPOConfig
    from alpaca_ppo.data import schedule

    raise_record.reached.discard((schedule.__file__, 0))
    with pytest.raises(ValueError, match="outside the schedule") as caught:
        schedule.PromptSchedule(4, PPOConfig(total_epochs=1)).prompts_of(9)
    assert (schedule.__file__, caught.traceback[-1].lineno + 1) in raise_record.reached


@pytest.fixture
def project(tmp_path):
    """A package with three `raise` statements, tests of two in a file each, a file left to the proof, our conftest."""
    tests, here = tmp_path / "tests", Path(__file__).parent
    tests.mkdir()
    for name in ("conftest.py", "raise_record.py"):
        shutil.copy(here / name, tests)
    package = tmp_path / raise_record.PACKAGE
    package.mkdir()
    (package / "checks.py").write_text(SOURCE + "\n\ndef planted():\n    raise KeyError\n")
    for name, value in (("negative", -1), ("zero", 0)):
        (tests / f"test_{name}.py").write_text(
            f"import pytest\nfrom {raise_record.PACKAGE}.checks import check\n\n"
            f"def test_{name}():\n    with pytest.raises(ValueError, match={name!r}):\n        check({value})\n"
        )
    (tests / "test_long.py").write_text("import pytest\n\n@pytest.mark.proof\ndef test_long():\n    pass\n")
    return tmp_path


def suite(project, *arguments):
    """The end of pytest in `project`, which loads no other plugin than pytest-xdist."""
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "xdist.plugin", "-m", "not proof"]
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([*command, *arguments, "tests"], cwd=project, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_a_complete_run_fails_where_no_test_reaches_a_raise(workers, project):
    ended = suite(project, *workers)
    assert ended.returncode == 1 and "2 passed" in ended.stdout, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if "checks.py" in line]
    assert line == f"{raise_record.PACKAGE}/checks.py:11: raise KeyError"


def test_a_run_of_some_tests_may_leave_any_raise_unreached(project):
    assert suite(project, "-k", "zero").returncode == 0
