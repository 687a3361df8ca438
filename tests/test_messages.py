"""The sentences of the package's errors stand in one file, whose diff is read."""

from tests.tools.messages import MESSAGES, listing, messages


def test_the_file_of_messages_is_that_of_the_source():
    assert MESSAGES.read_text() == listing(), "run `make messages`, and read the diff"


def test_a_message_is_listed_as_it_stands_in_the_source_and_what_is_raised_again_is_not():
    source = (
        "def f(x):\n    try:\n        raise ValueError(f'x is {x!r}; ' 'take 1')\n"
        "    except OSError:\n        raise\n    y = f'{x} is no y'\n    raise KeyError(f'{y}; take {x}')\n"
    )
    assert list(messages(source)) == ["ValueError: x is {x}; take 1", "KeyError: {x} is no y; take {x}"]
