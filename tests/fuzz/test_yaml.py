"""YAML files of options: what is accepted has the value that was written, everything else is refused by name."""

import dataclasses
import math
import os
import re
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments, parse_args
from tests.fuzz.mutations import mutated_bytes, mutated_tree, yaml_values
from tests.fuzz.oracle import Refused, files_unchanged, fuzz, outcome

CLASSES = [ScriptArguments, LoraArguments, PPOConfig]
FIELDS = {field.name: field for cls in CLASSES for field in dataclasses.fields(cls)}
REQUIRED = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"]}
# A run that sets an option of every type: text, number, list, choice, switch and null.
VALID = REQUIRED | {
    "learning_rate": 3e-6,
    "ppo_epochs": 4,
    "reward_weights": [0.5],
    "truncate_tokens": ["stop", 13],
    "old_policy": "correct",
    "bf16": True,
    "cliprange_value": None,
    "risk_level": "neutral",
    "output_dir": "outputs/naïve 🦙",
    "report_to": ["none"],
}
# Scalars as YAML 1.1 reads them, typed by hand from its specification.
SCALARS: dict[str, Any] = {
    "no": False, "on": True, "Yes": True, "~": None, "": None, "null": None, "Null": None, "none": "none",
    "1": 1, "+2": 2, "-1": -1, "1_000": 1000, "010": 8, "0o7": "0o7", "0x1F": 31, "0b11": 3, "1:30": 90,
    "1.": 1.0, ".5": 0.5, "1e5": 1e5, "1.0e+5": 1e5, "1e400": math.inf, ".inf": math.inf, "-.INF": -math.inf,
    "'1'": "1", '"1e-3"': "1e-3", '"\\ud800"': "\ud800", '"a\\0b"': "a\0b", "x # y": "x", "'x # y'": "x # y",
    "[]": [], "[1, 0.5]": [1, 0.5], "[a, [b]]": ["a", ["b"]], "{}": {}, "{a: 1}": {"a": 1},
    "9223372036854775807": 2**63 - 1, "9223372036854775808": 2**63, "é🦙": "é🦙",
    "|\n  two\n  lines\n": "two\nlines\n", ">-\n  folded\n  line\n": "folded line",
}  # fmt: skip
# Each is refused by PyYAML itself, most of them with an error that is not a YAMLError.
MALFORMED = ["!!bool x", "!!int x", "!!float x", "!!timestamp x", "2020-99-99", "0x_", "9" * 5000, "[" * 400, "*a"]
MALFORMED += ["!!python/object:os.system x", "!!binary é", "{a: 1, a: 2}", "{? [a] : 1}", "{<<: 3}", "[1", "@x", "%x"]
MALFORMED += ["a: b: c"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("yaml") / "run.yaml"


def parse(file, content: bytes | str, *flags: str) -> Any:
    """The options that a file of this content sets, as one dictionary, or `Refused`; the file stays as it is."""
    file.write_bytes(content.encode("utf-8", errors="surrogatepass") if isinstance(content, str) else content)
    with files_unchanged(file.parent):
        parsed = outcome(lambda: parse_args(CLASSES, ["--config", str(file), *flags]), names=(str(file), *FIELDS))
    return parsed if isinstance(parsed, Refused) else {k: v for part in parsed for k, v in vars(part).items()}


def read(name: str, value: Any) -> Any:
    """`value` of a file as the option `name` holds it: text is a number if the option is one, and a single entry a
    list if it is one.
    """
    kind = str(FIELDS[name].type)
    if value is None:
        return None
    if name == "output_dir":
        return os.path.abspath(value)
    # As the option's help says.
    if name == "resume_from_checkpoint":
        return None if value is False else value
    if "list[" in kind:
        return [_number(entry, kind) for entry in (value if isinstance(value, list) else [value])]
    return _number(value, kind)


def _number(value: Any, kind: str) -> Any:
    if not isinstance(value, str) or "str" in kind or value == "adaptive":
        return value
    # Hexadecimal and the like, which `float` does not read.
    read = yaml.safe_load(value)
    return float(read) if "float" in kind else read


def same(a: Any, b: Any) -> bool:
    """Whether the two are of equal type and value; an integer is equal to its float."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def loaded(content: bytes) -> Any:
    """What PyYAML reads; None if it is no YAML."""
    try:
        return yaml.safe_load(content.decode())
    except Exception:
        return None


def says_where(text: str, file: Any, plain: Any, valid: dict[str, Any]) -> bool:
    """Whether a refusal names an option whose value is not the valid one, or, of what is no mapping, the file."""
    if not isinstance(plain, dict) or "cannot be read as YAML" in text:
        return str(file) in text
    changed = [n for n in {**plain, **valid} if n not in plain or n not in valid or not same(plain[n], valid[n])]
    said, _, _ = text.partition("; --help-all lists the valid ones")
    words = set(re.findall(r"\w+", said))
    # A key such as "" or "x" is part of any message; only the list of unknown keys shows it.
    unknown = said.startswith("unknown keys in the --config file")
    # YAML 1.2, which reads files here, has the number 1e5, which YAML 1.1 has as text.
    return any(
        n in words if n in FIELDS else unknown and ("1e" in str(n) or str(n) in said) or repr(n) in said
        for n in changed
    )


@fuzz(450, name=st.sampled_from(sorted(FIELDS)), scalar=st.sampled_from(sorted(SCALARS)))
def test_every_scalar_is_read_as_yaml_defines_it_or_refused_by_the_options_name(file, name, scalar):
    lines = [f"{key}: {value}" for key, value in REQUIRED.items() if key != name]
    found = parse(file, "\n".join([*lines, f"{name}: {scalar}"]))
    if isinstance(found, Refused):
        assert name in found.text
    else:
        assert same(found[name], read(name, SCALARS[scalar])), (found[name], SCALARS[scalar])


@fuzz(120, name=st.sampled_from(sorted(FIELDS)), text=st.sampled_from(MALFORMED), first=st.booleans())
def test_what_is_no_yaml_is_refused_with_the_files_name(file, name, text, first):
    found = parse(file, f"seed: 1\n{name}: {text}\n" if first else f"{name}: {text}\nseed: 1\n")
    assert isinstance(found, Refused) and str(file) in found.text and "cannot be read as YAML" in found.text


@fuzz(300, settings=mutated_tree(VALID, values=yaml_values), style=st.sampled_from([True, False, None]))
def test_mutated_options_are_what_the_file_says_or_refused(file, settings, style):
    try:
        text = yaml.safe_dump(settings, default_flow_style=style, allow_unicode=True)
        plain = yaml.safe_load(text)
    # What PyYAML itself cannot write or read back.
    except Exception:
        text, plain = str(settings), None
    found = parse(file, text)
    if isinstance(found, Refused):
        assert says_where(found.text, file, plain, VALID)
    else:
        assert {name: found[name] for name in plain} == {name: read(name, value) for name, value in plain.items()}


@fuzz(250, content=mutated_bytes(yaml.safe_dump(VALID, allow_unicode=True).encode()))
def test_a_mutated_file_is_what_it_says_or_refused(file, content):
    found = parse(file, content)
    if isinstance(found, Refused):
        assert says_where(found.text, file, loaded(content), VALID)
    else:
        plain = yaml.safe_load(content.decode())
        wrong = {n: (found[n], value) for n, value in plain.items() if not same(found[n], read(n, value))}
        assert not wrong
