"""`make cut-options`: cuts the wiring of one option after the other, and looks whether its tests fail.

An option that is cut has its default wherever the package reads it, outside `config`; tests and the options' own checks
see what was given. `tests/config/test_every_option.py` says which tests must notice. Each option has a process of its
own. Ends with 1, and names the options, where none did.
"""

import argparse
import dataclasses
import multiprocessing
import os
import sys
from typing import Any

import pytest

IMPORTS = "import_modules"
"""Read from the command line before there is an object that holds it."""


class Cut:
    """A plugin of pytest that cuts the option `name` once all tests are imported, and counts those that fail."""

    def __init__(self, name: str) -> None:
        self.name, self.failed = name, 0

    def pytest_collection_finish(self) -> None:
        """Cuts it."""
        from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments

        for cls in (PPOConfig, ScriptArguments, LoraArguments):
            for field in dataclasses.fields(cls):
                if field.name == self.name:
                    given = field.default is not dataclasses.MISSING
                    cls.__getattribute__ = self._reader(field.default if given else field.default_factory())

    def _reader(self, default: Any) -> Any:
        def read(options: Any, name: str) -> Any:
            if name != self.name:
                return object.__getattribute__(options, name)
            frame = sys._getframe(1)
            # Through the properties of a configuration, to who reads them.
            while frame.f_code is read.__code__ or frame.f_globals["__name__"].startswith("alpaca_ppo.config"):
                frame = frame.f_back
            by_package = frame.f_globals["__name__"].startswith("alpaca_ppo")
            return default if by_package else object.__getattribute__(options, name)

        return read

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Counts."""
        self.failed += report.failed


def fails(name: str, tests: list[str], queue: Any) -> None:
    """Puts the number of `tests` that fail without the option."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    cut = Cut(name)
    pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests], plugins=[cut])
    queue.put(cut.failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="options; none = all")
    names, context = parser.parse_args().names, multiprocessing.get_context("spawn")
    from tests.config.test_every_option import noticed_by

    unnoticed = []
    for name, tests in noticed_by().items():
        if (names and name not in names) or name == IMPORTS:
            continue
        queue = context.Queue()
        process = context.Process(target=fails, args=(name, tests, queue))
        process.start()
        failed = queue.get()
        process.join()
        print(f"{name:32}{'noticed' if failed else 'NOT NOTICED'}", flush=True)
        unnoticed += [] if failed else [name]
    print(f"not noticed: {', '.join(unnoticed) or 'none'}")
    return bool(unnoticed)


if __name__ == "__main__":
    raise SystemExit(main())
