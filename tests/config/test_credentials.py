import pytest

from alpaca_ppo.config import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.config.credentials import REMOVED, without_credential_arguments, without_credentials
from alpaca_ppo.config.fields import options_of

SECRET = "b1946ac92492d2347c6235b4d2611184"
"""As plain as a hash: only the name of its option says what it is."""


@pytest.mark.parametrize(
    "name",
    "api_key OPENAI_API_KEY judge-api-key hf_token token wandb.apiKey password client_secret Authorization".split(),
)
def test_a_value_whose_name_says_so_is_removed(name):
    assert without_credentials({name: SECRET, "seed": 1}) == {name: REMOVED, "seed": 1}
    assert without_credentials({"judge": {name: [SECRET, 5]}}) == {"judge": {name: [REMOVED, REMOVED]}}
    # There is nothing to hide in a key that is not set.
    assert without_credentials({name: None, "x": ""}) == {name: None, "x": ""}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("hf_abcdefghijklmnopqrstuv", REMOVED),
        ("use sk-proj-abcdefghijklmnop1234 here", f"use {REMOVED} here"),
        ("https://me:pass@host/v1?model=a", f"https://{REMOVED}@host/v1?model=a"),
        ("https://me:p@ss@host/v1", f"https://{REMOVED}@host/v1"),
        ("http://host:8000/v1?api_key=abc&n=2", f"http://host:8000/v1?api_key={REMOVED}&n=2"),
        ("Authorization: Bearer abcdefgh12345", f"Authorization: Bearer {REMOVED}"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", REMOVED),
        ("AKIAIOSFODNN7EXAMPLE", REMOVED),
    ],
)
def test_a_value_that_has_the_form_of_a_credential_is_removed_wherever_it_is(text, left):
    assert without_credentials({"note": text, "list": [text]}) == {"note": left, "list": [left]}


@pytest.mark.parametrize(
    "value",
    [
        "gpt2",
        "me/my-model",
        "my_rewards.py:polite",
        "http://host:8000/v1",
        "http://host/v1?to=me@home",
        "{instruction}\n",
        "8ad091e6f3",
        1e-6,
        True,
        0,
    ],
)
def test_other_values_stay(value):
    assert without_credentials({"option": value, "pad_token": value, "truncate_tokens": [value]}) == {
        "option": value,
        "pad_token": value,
        "truncate_tokens": [value],
    }


def test_no_option_of_a_run_is_taken_for_a_credential():
    names = [name for kind in (ScriptArguments, LoraArguments, PPOConfig) for name in options_of(kind)]
    assert len(names) > 100
    assert without_credentials(dict.fromkeys(names, "x")) == dict.fromkeys(names, "x")


def test_a_command_line_keeps_its_words_but_for_credentials():
    words = [
        "train.py",
        "--judge_api_key",
        SECRET,
        "--seed",
        "1",
        f"--token={SECRET}",
        "--url",
        "https://a:b@h",
        "--token",
    ]
    cleaned = [
        "train.py",
        "--judge_api_key",
        REMOVED,
        "--seed",
        "1",
        f"--token={REMOVED}",
        "--url",
        f"https://{REMOVED}@h",
    ]
    assert without_credential_arguments(words) == [*cleaned, "--token"]
    assert without_credential_arguments(["--token", "--seed", "1"]) == ["--token", "--seed", "1"]
