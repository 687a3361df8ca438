"""The record of reached `raise` statements: without it, "every raise has a test" would be a wish."""

import traceback

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
    from alpaca_ppo.data import schedule

    raise_record.reached.discard((schedule.__file__, 0))
    with pytest.raises(ValueError, match="0 rows") as caught:
        schedule.PromptSchedule(0, 1, seed=0, total_epochs=1)
    assert (schedule.__file__, caught.traceback[-1].lineno + 1) in raise_record.reached
