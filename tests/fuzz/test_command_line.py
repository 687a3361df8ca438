"""Flags with every kind of value: what is accepted has the value that was given, the rest is refused by name."""

import dataclasses
import os
import re
from typing import Any

import yaml
from hypothesis import strategies as st

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.fields import options_of
from tests.fuzz.mutations import TEXTS, texts
from tests.fuzz.oracle import Refused, fuzz, outcome
from tests.option_types import kinds

CLASSES = [ScriptArguments, LoraArguments, PPOConfig]
OPTIONS = {name: option for cls in CLASSES for name, option in options_of(cls).items()}
REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a:b"]
# What import_modules names is run.
FLAGS = sorted(set(OPTIONS) - {"import_modules"})
DEFAULTS = {
    f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
    for cls in CLASSES
    for f in dataclasses.fields(cls)
}
NUMBERS = "0 1 3 0.5 0.1 .25 1e-3 1E2 -1 -0.5 -1e1 -.5e1 -inf inf nan 1e400 1_000 +2 0x10 007 ٣".split()
NUMBERS += [" 3", "9223372036854775807", "9223372036854775808", "9" * 400, "9" * 5000]
WORDS = "true FALSE yes no t 0 null None NONE separate shared gae clip k3 token".split()
given = st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | texts


def parse(arguments: list[str]) -> Any:
    """The options as one dictionary, or `Refused`."""
    parsed = outcome(lambda: parse_args(CLASSES, arguments))
    return parsed if isinstance(parsed, Refused) else {k: v for part in parsed for k, v in vars(part).items()}


def expected(name: str, values: list[str]) -> Any:
    """What `values` after the flag `name` mean, from the type of its field alone."""
    option = OPTIONS[name]
    if option.nullable and len(values) == 1 and values[0].lower() in ("null", "none"):
        return None
    read = [_read(value, kinds(option)) for value in values]
    found = read if option.is_list else read[-1]
    # Normalised when the configuration is made.
    if name == "output_dir":
        return os.path.abspath(found)
    return None if name == "resume_from_checkpoint" and found is False else found


def _read(text: str, kinds: set) -> Any:
    """`text` as YAML 1.1 reads it, with 1e-3 as a number; the text itself where the option takes text and this is no
    other type that it takes.
    """
    if kinds == {str}:
        return text
    try:
        value = yaml.safe_load(text)
        value = float(text) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d._]+[eE][-+]?\d+", text) else value
    except Exception:
        return text
    classes = tuple(kind for kind in (*kinds - {str}, *({int} if float in kinds else ())) if isinstance(kind, type))
    fits = isinstance(value, classes) and isinstance(value, bool) <= (bool in kinds)
    return value if str not in kinds or fits else text


@fuzz(400, name=st.sampled_from(FLAGS), values=st.lists(given, min_size=0, max_size=3), equals=st.booleans())
def test_the_value_of_a_flag_is_what_was_given_or_refused_by_its_name(name, values, equals):
    arguments = [f"--{name}={values[0]}", *values[1:]] if equals and values else [f"--{name}", *values]
    found = parse([*REQUIRED, *arguments])
    if isinstance(found, Refused):
        assert name in found.text, found.text
    elif values:
        wanted = expected(name, values)
        assert found[name] == wanted, (found[name], wanted)


@fuzz(
    300,
    flags=st.lists(
        st.tuples(st.sampled_from([*FLAGS, "lerning_rate", "", "-", "config", "no_bf16"]), given), max_size=4
    ),
    tail=st.lists(st.sampled_from(["--", "-", "x", "-x", "@file", *TEXTS]), max_size=2),
)
def test_any_list_of_arguments_is_read_or_refused(flags, tail):
    found = parse([*REQUIRED, *(part for name, value in flags for part in (f"--{name}", value)), *tail])
    if not isinstance(found, Refused):
        last = {name: value for name, value in flags if name in OPTIONS}
        for name in set(OPTIONS) - set(last) - {"model_name_or_path", "dataset_name", "reward_funcs"}:
            assert found[name] == DEFAULTS[name] or name in ("report_to", "output_dir"), name


@fuzz(100, name=st.sampled_from(FLAGS), first=given, second=given)
def test_the_last_of_two_flags_wins(name, first, second):
    both = parse([*REQUIRED, f"--{name}={first}", f"--{name}={second}"])
    one = parse([*REQUIRED, f"--{name}={second}"])
    if isinstance(one, Refused):
        assert isinstance(both, Refused)
    elif not OPTIONS[name].is_list and not isinstance(both, Refused):
        assert both == one
