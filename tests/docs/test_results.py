"""What is written by hand about the results of an example stands in its RESULTS.md as in its notes.py."""

import pytest

from examples.games.notes import NOTES as GAMES
from examples.long_horizon.notes import NOTES as LONG_HORIZON
from tests.docs.markdown import ROOT


@pytest.mark.parametrize(("example", "notes"), [("games", GAMES), ("long_horizon", LONG_HORIZON)])
def test_the_notes_end_the_results(example, notes):
    results = (ROOT / "examples" / example / "RESULTS.md").read_text("utf-8")
    assert results.endswith(f"\n\n{notes}")
