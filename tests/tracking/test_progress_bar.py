import io
import os
import sys
from contextlib import suppress

import pytest

from alpaca_ppo.tracking import progress_bar
from alpaca_ppo.tracking.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def shown(self):
        """What was drawn so far, each drawing on a line of its own."""
        text = self.getvalue()
        self.truncate(0)
        self.seek(0)
        return [line.strip() for line in text.split("\r") if line.strip()]


def watched(monkeypatch):
    """A terminal in place of stderr. Not a fixture: pytest replaces stderr again when the test itself begins."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only if a test says so."""
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("stream", "is_main"), [(io.StringIO(), True), (Terminal(), False)])
def test_no_bar_shows_without_a_terminal_or_on_another_process(monkeypatch, stream, is_main):
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar(is_main=is_main)
    with bar.steps(8, initial=2), bar.phase("sampling", 4) as count:
        count(1)
        bar.detail("judge")
    bar.advance()
    assert stream.getvalue() == ""


def test_the_bar_shows_steps_and_time_left_and_the_innermost_phase(monkeypatch, clock):
    terminal = watched(monkeypatch)
    bar = ProgressBar(is_main=True)
    with bar.steps(8, initial=2):
        with bar.phase("sampling", 40) as count:
            with bar.phase("sampling"):
                clock[0] += 1
                count(10)
                assert terminal.shown()[-1].endswith(", sampling 10/40")
                # Within a tenth of a second nothing is drawn again.
                count(1)
                assert terminal.shown() == []
            with bar.phase("scoring"):
                bar.detail("judge")
                assert terminal.shown()[-1].endswith(", scoring: judge")
            # There is more to sample.
            assert terminal.shown()[-1].endswith(", sampling 11/40")
            count(29)
            with bar.phase("log-probs"):
                assert terminal.shown()[-1].endswith(", log-probs")
            # Sampling is done, and does not come back.
            assert terminal.shown() == []
        clock[0] += 9
        bar.advance()
        # 10 s for the one step done, 5 to go.
        assert terminal.shown()[-1].startswith("step 3/8 |")
        with bar.phase("evaluating"), bar.phase("sampling", 6):
            assert terminal.shown()[-1].endswith(", 0:50 left, evaluating, sampling 0/6")
        for _ in range(5):
            bar.advance()
    last = terminal.shown()[-1]
    assert last.startswith("step 8/8 |")
    assert "left" not in last


def test_outside_a_run_a_phase_has_a_line_that_disappears(monkeypatch):
    terminal = watched(monkeypatch)
    bar = ProgressBar(is_main=True)
    with bar.phase("evaluating"):
        assert terminal.shown()[-1] == "evaluating"
        with bar.phase("sampling", 6):
            assert terminal.shown()[-1] == "evaluating, sampling 0/6"
    assert terminal.getvalue().endswith("\r")
    assert terminal.shown()[-1:] in ([], ["evaluating"])
    bar.detail("nothing is going on")
    assert terminal.shown() == []


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_bar_of_a_run_stays_unless_the_run_is_interrupted(monkeypatch, clock, interrupted):
    terminal = watched(monkeypatch)
    bar = ProgressBar(is_main=True)
    with suppress(KeyboardInterrupt), bar.steps(8, initial=0):
        bar.advance()
        if interrupted:
            raise KeyboardInterrupt
    drawn = terminal.getvalue()
    # tqdm ends the line of a bar that stays, and overwrites the other with blanks.
    assert drawn.endswith("\n") != interrupted
    assert (drawn.split("\r")[-2].strip() == "") == interrupted


def test_a_phase_that_fails_is_over(monkeypatch):
    terminal = watched(monkeypatch)
    bar = ProgressBar(is_main=True)
    with pytest.raises(ValueError, match="of the user"), bar.steps(2, initial=0), bar.phase("scoring"):
        raise ValueError("of the user")
    terminal.shown()
    with bar.phase("saving"):
        assert terminal.shown()[-1] == "saving"


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


def test_long_lines_are_broken_between_words_on_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(progress_bar.shutil, "get_terminal_size", lambda: os.terminal_size((20, 5)))
    text = "the run was saved to /a/folder/that/is/long; go-on\n  short\n字字字字字字字字字字字"
    for stream, expected in (
        (io.StringIO(), text),
        (Terminal(), "the run was saved to\n/a/folder/that/is/long;\ngo-on\n  short\n字字字字字字字字字字字"),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        progress_bar.write(text)
        assert stream.getvalue() == expected + "\n"


def test_a_line_appears_at_once_and_in_any_encoding(monkeypatch):
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(io.BufferedWriter(raw, buffer_size=10_000), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    progress_bar.write("±字")
    assert raw.getvalue() == b"\xb1\\u5b57\n"
