"""What must hold for any input: it is accepted, or refused by this package in words that say what is wrong.

`fuzz` is the decorator of every test here. It is run by `make proof`, with the same cases each time; `python -m
tests.fuzz` (`make fuzz`) draws many more, new ones.
"""

import contextlib
import hashlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import alpaca_ppo

FACTOR = "ALPACA_PPO_FUZZ_FACTOR"
"""Environment variable: how many times as many cases, and random ones instead of the same in each run."""

_ROOT = Path(alpaca_ppo.__file__).resolve().parents[1]
_OURS = (_ROOT / "alpaca_ppo", _ROOT / "examples")
_SETTINGS = {
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
}
settings.register_profile("fuzz", derandomize=True, **_SETTINGS)
settings.register_profile("fuzz_long", derandomize=False, print_blob=True, **_SETTINGS)


def fuzz(examples: int, **strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on `examples` draws of `strategies`, times the environment's factor."""
    factor = os.environ.get(FACTOR)
    profile = settings.get_profile("fuzz_long" if factor else "fuzz")
    number = round(examples * float(factor or 1))
    return lambda test: pytest.mark.proof(settings(profile, max_examples=number)(given(**strategies)(test)))


class Refused:
    """The error of a call, which has passed `outcome`."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.text = error, str(error)

    def __repr__(self) -> str:
        return f"Refused({type(self.error).__name__}: {self.text[:300]})"


def outcome(
    call: Callable[[], Any],
    *,
    names: tuple[str, ...] = (),
    accept: tuple[type, ...] = (ValueError,),
    may_warn: bool = False,
) -> Any:
    """What `call` returns, or `Refused`.

    A refusal is one of `accept`, raised by a line of this package or of the examples, whose text is not empty and holds
    one of `names`. A warning that a library attributes to anything else than this package fails the test,
    unless libraries `may_warn`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # pandas and pyarrow leave the file of a failed read to the garbage collector, which runs at any time.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            result = call()
        except accept as error:
            result = Refused(error)
            _check_refusal(error, names)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} is not a refusal: {str(error)[:300]}") from error
    leaked = [f"{w.category.__name__} at {w.filename}: {w.message}" for w in caught if not _is_ours(w.filename)]
    assert may_warn or not leaked, leaked
    return result


def _check_refusal(error: BaseException, names: tuple[str, ...]) -> None:
    text, last = str(error), traceback.extract_tb(error.__traceback__)[-1]
    assert _is_ours(last.filename), f"raised inside {last.filename}:{last.lineno}: {type(error).__name__}: {text[:300]}"
    assert not names or any(name in text for name in names), f"names none of {names}: {text[:300]}"
    assert text and len(text) < 100_000, f"a message of {len(text)} characters: {text[:300]}"


def _is_ours(filename: str) -> bool:
    return any(Path(filename).is_relative_to(folder) for folder in _OURS)


def fingerprints(folder: Path) -> dict[str, str]:
    """Every file, folder and link below `folder` with what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[str(path)] = "folder"
        else:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@contextlib.contextmanager
def changed(path: Path, content: bytes | None) -> Iterator[None]:
    """The file `path` has other content in the block; None removes it."""
    before = path.read_bytes()
    # The old file may be mapped into memory by a model that it was loaded into.
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)


@contextlib.contextmanager
def files_unchanged(folder: Path) -> Iterator[None]:
    """Fails if the block changes, removes or adds anything below `folder`."""
    before = fingerprints(folder)
    yield
    after = fingerprints(folder)
    assert after == before, sorted(set(after.items()) ^ set(before.items()))
