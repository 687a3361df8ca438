"""The tokens that end a response, and how stop and truncate tokens are resolved."""

import pytest
import torch
from transformers import GenerationConfig

from alpaca_ppo.generation import SamplingParams, resolve_stop_tokens, resolve_truncate_tokens, resolve_turn_end
from alpaca_ppo.generation.responses import StopRule
from tests.data.tokenizers import CHATML, GEMMA, LLAMA_3, MISTRAL, PHI_3, spaced_tokenizer, turn_tokenizer
from tests.tiny_models import EOS, UNK, tiny_tokenizer


def ends(stop: list[int], truncate: list[int], tokens: list[int], positions: list[int]) -> list[bool]:
    params = SamplingParams(4, 1.0, 0, tuple(stop), truncate_token_ids=tuple(truncate), truncate_after=3)
    rule, zeros = StopRule(params, torch.device("cpu")), torch.zeros(len(tokens), dtype=torch.long)
    found, matched = rule(torch.tensor(tokens), torch.tensor(positions), zeros)
    assert matched is zeros
    return found.tolist()


def test_stop_tokens_end_a_row_at_any_position_and_truncate_tokens_after_enough_tokens() -> None:
    assert ends([7, 2], [], [2, 7, 9], [0, 5, 5]) == [True, True, False]
    # Two tokens precede position 2, three precede position 3.
    assert ends([2], [9], [9, 9, 2], [2, 3, 0]) == [False, True, True]
    assert ends([9], [9], [9, 2], [0, 0]) == [True, False]
    assert ends([], [], [2], [0]) == [False]


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
    # A text that is no entry of the vocabulary is looked for within a response, not at the start of a text.
    assert resolve_truncate_tokens(spaced_tokenizer("prepend"), [" "]) == (3,)


def test_a_string_of_two_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'stop now', which splits into 2 tokens \['stop', 'now'\]"):
        resolve_truncate_tokens(tiny_tokenizer(["stop", "now"]), ["stop now"])


def test_an_unknown_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="'halt'"):
        resolve_truncate_tokens(tiny_tokenizer(["stop"]), ["halt"])


@pytest.mark.parametrize("token", [64, -1])
def test_an_id_outside_the_vocabulary_is_an_error(token: int) -> None:
    with pytest.raises(ValueError, match=f"truncate_tokens holds {token}, no id in the vocabulary of 64"):
        resolve_truncate_tokens(tiny_tokenizer(), [token])


def test_extra_ids_end_a_response_beside_the_eos() -> None:
    assert resolve_stop_tokens(tiny_tokenizer(), GenerationConfig(eos_token_id=9), [4]) == (EOS, 4, 9)


# A user's message, an answer, and what follows: the tokens 4, 5, ... are those of `special`, then those of `plain`.
TURNS = {
    "ChatML": (CHATML, {"special": ["<|im_start|>", "<|im_end|>"]}, 5),
    "ChatML, not marked as special": (CHATML + "<eos>", {"plain": ["<|im_start|>", "<|im_end|>"]}, 5),
    "Llama 3": (LLAMA_3, {"special": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}, 6),
    # The eos follows <|end|> here, as in Phi-3's own template.
    "Phi-3": (PHI_3, {"special": ["<|user|>", "<|assistant|>", "<|end|>"]}, 6),
    "Gemma, a line break as token": (GEMMA, {"special": ["<start_of_turn>", "<end_of_turn>"], "plain": ["\n"]}, 5),
    "Mistral": (MISTRAL, {"special": ["[INST]", "[/INST]"]}, EOS),
    "a line before the end": (CHATML.replace("<|im_end|>", "\n<|im_end|>"), {"special": ["<|im_end|>"]}, 4),
    "a generation prompt at any time": (CHATML.replace("if add", "if not add"), {"special": ["<|im_end|>"]}, 4),
    "the case of the answer": (CHATML.replace("m.content", "m.content | upper"), {"special": ["<|im_end|>"]}, 4),
    # GLM-4 marks only where a turn begins; its generation config names <|user|> as an eos.
    "the next turn": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}",
        {"special": ["<|user|>"]},
        4,
    ),
    "the next text": (MISTRAL.replace("<eos>", "").replace("[INST]", "<bos>[INST]"), {"special": ["[INST]"]}, None),
    "words alone": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {}, None),
    "an answer left out": ("{% for m in messages if m.role == 'user' %}{{ m.content }}<eos>{% endfor %}", {}, None),
    "what templates raise themselves": (CHATML + "{{ messages[1].get('tool_calls') + [] }}", {"special": []}, None),
    "content searched": ("{{ messages[1].content.index('<think>') }}", {"special": []}, None),
    "content in parts": (
        CHATML.replace("{{ m.content }}", "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"),
        {"special": ["<|im_start|>", "<|im_end|>"]},
        5,
    ),
    "a section before the eos": (
        MISTRAL.replace("<eos>", "<tool> none <end><eos>"),
        {"special": ["<tool>", "<end>"]},
        5,
    ),
    # Llama 3's first template wrote the start of an answer after every conversation.
    "words after the end of a turn": (
        MISTRAL.replace("<eos>", "<end><start> assistant <tail>"),
        {"special": ["<end>", "<start>", "<tail>"]},
        4,
    ),
    "padding before the end": (MISTRAL.replace("<eos>", "<pad><end>"), {"special": ["<end>"]}, 4),
    "padding is the end": (MISTRAL.replace("<eos>", "<pad>"), {"special": []}, 0),
    "an answer refused": ("{{ raise_exception('no answers') if messages[1] else '<eos>' }}", {}, None),
}


@pytest.mark.parametrize(("template", "tokens", "expected"), TURNS.values(), ids=TURNS.keys())
def test_a_turn_ends_with_the_first_token_that_the_template_puts_after_an_answer(
    template: str, tokens: dict[str, list[str]], expected: int | None
) -> None:
    assert resolve_turn_end(turn_tokenizer(template, **tokens)) == expected
