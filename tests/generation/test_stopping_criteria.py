"""The tokens that end a response, and how stop and truncate tokens are resolved."""

import pytest
import torch
from transformers import GenerationConfig

from alpaca_ppo.generation import resolve_stop_tokens, resolve_truncate_tokens
from alpaca_ppo.generation.stopping_criteria import StopRule
from tests.tiny_models import EOS, UNK, tiny_tokenizer

CPU = torch.device("cpu")
TOKENS = torch.tensor([2, 7, 9])


def test_stop_tokens_end_a_row_at_any_position() -> None:
    rule = StopRule([7, 2], device=CPU)
    assert [rule(TOKENS, position).tolist() for position in (0, 5)] == [[True, True, False]] * 2


def test_truncate_tokens_end_a_row_only_after_enough_tokens() -> None:
    rule = StopRule([2], truncate_token_ids=[9], truncate_after=3, device=CPU)
    # Two tokens precede position 2, three precede position 3.
    assert rule(TOKENS, 2).tolist() == [True, False, False]
    assert rule(TOKENS, 3).tolist() == [True, False, True]


def test_a_token_that_both_stops_and_truncates_stops_at_any_position() -> None:
    assert StopRule([9], truncate_token_ids=[9], truncate_after=3, device=CPU)(TOKENS, 0).tolist() == [
        False,
        False,
        True,
    ]


def test_without_stop_tokens_no_row_ends() -> None:
    assert StopRule([], device=CPU)(TOKENS, 0).tolist() == [False, False, False]


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, (EOS,)), (EOS, (EOS,)), (9, (EOS, 9)), ([11, EOS, 9], (EOS, 9, 11))]
)
def test_stop_tokens_come_from_tokenizer_and_generation_config(
    configured: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    assert resolve_stop_tokens(tiny_tokenizer(), GenerationConfig(eos_token_id=configured)) == expected


def test_a_model_without_generation_config_stops_at_the_tokenizers_eos() -> None:
    assert resolve_stop_tokens(tiny_tokenizer(), None) == (EOS,)


def test_no_stop_token_anywhere_is_an_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="processing_class.eos_token"):
        resolve_stop_tokens(tokenizer, GenerationConfig())
    assert resolve_stop_tokens(tokenizer, GenerationConfig(eos_token_id=9)) == (9,)


def test_truncate_tokens_may_be_entries_texts_or_ids() -> None:
    tokenizer = tiny_tokenizer(["stop", "now"])
    assert resolve_truncate_tokens(tokenizer, ["now", "<eos>", 4, "stop", " stop "]) == (EOS, 4, 5)
    assert resolve_truncate_tokens(tokenizer, ["<unk>"]) == (UNK,)
    assert resolve_truncate_tokens(tokenizer, []) == ()


def test_a_string_of_two_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'stop now', which the tokenizer splits into 2 tokens \['stop', 'now'\]"):
        resolve_truncate_tokens(tiny_tokenizer(["stop", "now"]), ["stop now"])


def test_an_unknown_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="'halt'"):
        resolve_truncate_tokens(tiny_tokenizer(["stop"]), ["halt"])


@pytest.mark.parametrize("token", [64, -1])
def test_an_id_outside_the_vocabulary_is_an_error(token: int) -> None:
    with pytest.raises(ValueError, match=f"id {token}, which is not in the tokenizer's vocabulary of 64 tokens"):
        resolve_truncate_tokens(tiny_tokenizer(), [token])
