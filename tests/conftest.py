"""Settings of every test run: libraries offline, one thread. A complete run reaches every `raise` of the package."""

import functools
import gc
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import raise_record

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# As many workers as there are cores run at once. Read when torch and numpy are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
raise_record.install()
# Looking for garbage would be a quarter of the time of imports and collection. See `pytest_runtestloop`.
gc.disable()

# Folders of tests lie in memory, if there is enough: a tiny run syncs 25 files, and nothing here outlives a power cut.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= 8 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

LONGEST = ("integration", "estimate_memory", "examples")
"""Folders whose files take longest: they come first, so that the workers end at about the same time."""

_deselected: list[pytest.Item] = []
_proof_files: set[Path] = set()
_records: list[dict[str, Any]] = []
"""Of this process or of each worker of pytest-xdist: `reached`, and whether it collected every test (`complete`)."""
_unreached: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """A test may limit how large a file this process writes; pytest's own report must not meet that limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return (yield)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def deadline():
    """Ends a test that waits for another thread in vain."""

    def end(signum, frame):
        raise TimeoutError("the test did not end within 60 seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def pytest_collection_modifyitems(items):
    tests = Path(__file__).parent

    def place(item):
        folder = item.path.relative_to(tests).parts[0]
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_collection_finish():
    """Asks git once about this repository, not for every run: an eighth of the time of a tiny one."""
    run_record: Any = sys.modules.get("alpaca_ppo.tracking.run_record")
    if run_record:
        ask, here = run_record.git_commit, Path.cwd()
        ask_once = functools.cache(ask)
        run_record.git_commit = lambda folder: (ask_once if folder == here else ask)(folder)
        run_record.package_commit = functools.cache(run_record.package_commit)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Looks for garbage from here on, but not among the million objects of libraries and tests, which takes 0.4 s."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each file goes to one worker, as with `--dist loadfile`, but in the order of collection."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_deselected(items):
    """What `make proof` runs is no part of a complete run."""
    for item in items:
        if item.get_closest_marker("proof") is None:
            _deselected.append(item)
        else:
            _proof_files.add(item.path)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Keeps what a worker of pytest-xdist recorded. One that crashed leaves nothing, and its test has failed."""
    _records.append(getattr(node, "workeroutput", {}).get("raises", {"complete": False, "reached": []}))


# First, because pytest-xdist sends a worker's output in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    if not session.config.pluginmanager.has_plugin("dsession"):
        files = set(Path(__file__).parent.rglob("test_*.py"))
        complete = files <= {item.path for item in session.items} | _proof_files and not _deselected
        _records.append({"complete": complete, "reached": sorted(raise_record.reached)})
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["raises"] = _records[0]
        return
    complete = bool(_records) and all(record["complete"] for record in _records)
    if complete and exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
        _unreached.extend(raise_record.unreached({tuple(place) for record in _records for place in record["reached"]}))
    if _unreached:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _unreached:
        terminalreporter.section("raise statements that no test reaches", red=True)
        for line in _unreached:
            terminalreporter.line(line)
