import io
import sys

import pytest

from alpaca_ppo.tracking import progress_bar
from alpaca_ppo.tracking.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only if a test says so."""
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("stream", "is_main", "shown"), [(io.StringIO(), True, False), (Terminal(), False, False), (Terminal(), True, True)]
)
def test_a_bar_shows_on_a_terminal_of_the_main_process_alone(monkeypatch, stream, is_main, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar(is_main=is_main)
    with bar.steps(8, initial=2), bar.phase("sampling", 4) as count, bar.phase("sampling") as again:
        count(1)
        again(2)
        bar.detail("judge")
        bar.advance()
    for text in ("3/8", "sampling", "3/4", "judge"):
        assert (text in stream.getvalue()) is shown


def test_a_phase_that_fails_is_over(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = ProgressBar(is_main=True)
    with pytest.raises(ValueError, match="of the user"), bar.phase("scoring"):
        raise ValueError("of the user")
    before = terminal.getvalue()
    bar.detail("nothing is going on")
    # The line of a phase disappears.
    assert terminal.getvalue() == before and before.endswith("\r")


def test_the_time_left_is_that_of_recent_steps(clock):
    bar = ProgressBar(is_main=False)
    assert bar.seconds_left(0) is None
    with bar.steps(200, initial=40):
        assert bar.seconds_left(40) is None
        clock[0] += 6
        # Step 41 has ended, but its evaluation has not: 159 steps of 6 s.
        assert bar.seconds_left(41) == 159 * 6
        clock[0] += 4
        bar.advance()
        assert bar.seconds_left(41) == 159 * 10
        for _ in range(50):
            clock[0] += 2
            bar.advance()
        # The last 50 steps took 2 s each; 91 of 200 are done.
        assert bar.seconds_left(91) == 109 * 2


def test_a_line_appears_at_once_and_in_any_encoding(monkeypatch):
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(io.BufferedWriter(raw, buffer_size=10_000), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    progress_bar.write("\xb1\u5b57")
    assert raw.getvalue() == b"\xb1\\u5b57\n"
