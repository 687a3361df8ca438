"""The doctor on real runs: nothing is wrong with the good ones, and the over-optimised ones are found."""

import pytest

from alpaca_ppo.doctor import Doctor, Finding, History
from tests.doctor import measured

RUNS = measured.read()
GOOD = [name for name in RUNS if name not in measured.OVEROPTIMIZED]


def examined(run) -> list[Finding]:
    doctor, found = Doctor(History(run["config"])), []
    for row in run["rows"]:
        doctor.history.add(row["step"], row)
        found += doctor.examine()
    return found


@pytest.mark.parametrize("name", GOOD)
def test_a_run_that_has_learned_has_neither_error_nor_warning(name):
    assert [str(finding) for finding in examined(RUNS[name])] == []


@pytest.mark.parametrize("name", measured.OVEROPTIMIZED)
def test_a_run_that_is_overoptimized_is_found(name):
    found = {finding.rule: finding for finding in examined(RUNS[name])}
    assert found["overoptimization"].severity == "error"
    assert "objective/scores/gold falls" in found["overoptimization"].sentence
    # In all three, the gold score is highest between steps 6 and 20.
    assert 10 <= found["overoptimization"].step <= 25
    assert "kl_runaway" in found
