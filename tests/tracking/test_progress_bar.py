import io
import sys

import pytest

from alpaca_ppo.tracking.run_log import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "is_main", "shown"), [(io.StringIO(), True, False), (Terminal(), False, False), (Terminal(), True, True)]
)
def test_a_bar_shows_on_a_terminal_of_the_main_process_alone(monkeypatch, stream, is_main, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar(is_main=is_main)
    with bar.steps(8, initial=2) as steps, bar.phase("sampling", 4) as count, bar.phase("sampling") as again:
        count(1)
        again(2)
        again.__self__.refresh()  # tqdm draws at most ten times a second
        steps.update()
    for text in ("3/8", "sampling", "3/4"):
        assert (text in stream.getvalue()) is shown


def test_a_phase_that_fails_is_over(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = ProgressBar(is_main=True)
    with pytest.raises(ValueError, match="of the user"), bar.phase("scoring"):
        raise ValueError("of the user")
    # The line of a phase disappears.
    assert terminal.getvalue().endswith("\r")
    # The next one of its name has a bar of its own.
    with bar.phase("scoring", 7):
        assert "0/7" in terminal.getvalue()
