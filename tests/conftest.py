"""Settings of every test run: libraries offline, and a complete run reaches every `raise` of the package."""

import os
import resource
from pathlib import Path

import pytest

from tests import raise_record

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
raise_record.install()

_deselected: list[pytest.Item] = []
_unreached: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """A test may limit how large a file this process writes; pytest's own report must not meet that limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return (yield)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def pytest_deselected(items):
    _deselected.extend(items)


def pytest_sessionfinish(session, exitstatus):
    files = set(Path(__file__).parent.rglob("test_*.py"))
    complete = files <= {item.path for item in session.items} and not _deselected
    if complete and exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
        _unreached.extend(raise_record.unreached())
    if _unreached:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _unreached:
        terminalreporter.section("raise statements that no test reaches", red=True)
        for line in _unreached:
            terminalreporter.line(line)
