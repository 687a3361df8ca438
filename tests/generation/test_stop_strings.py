"""Stop strings: a response ends with the token at which its text, decoded anew each time, first contains one."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from alpaca_ppo import PPOConfig
from alpaca_ppo.generation import Generation, SamplingHooks, SamplingParams, StopStrings, Turns, generate
from alpaca_ppo.generation.slots import SlotLoop
from alpaca_ppo.generation.stopping import token_bytes
from tests.generation.test_generate import padded
from tests.generation.test_slots import BUCKETS
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import tiny_trainer


def byte_level() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are single bytes, then come longer tokens, two of which cut a character in two."""
    letters = sorted(ByteLevel.alphabet())
    # "é" is the bytes C3 A9, written "Ã" and "©"; "Ġ" is a blank and "Ċ" a newline.
    merges = [("a", "b"), ("ab", "c"), ("Ċ", "Ċ"), ("Ã", "©"), ("x", "Ã"), ("Ġ", "a"), ("ĊĊ", "Q"), ("Ċ", "Q")]
    names = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Blanks are "▁" and unknown characters single bytes, as in Llama 2 and Gemma."""
    names = ["<unk>", "a", "b", "c", "▁", "▁a", "ab", "\n\n", "Q", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = BPE({name: i for i, name in enumerate(names)}, [("▁", "a"), ("a", "b")], unk_token="<unk>")
    model.byte_fallback = True
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback(), "words": tiny_tokenizer(["a", "b", "é"])}
STRINGS = {
    "byte_level": ["abc", "\n\nQ", "é", "bab", "<|end|>", " a a"],
    "byte_fallback": ["ab\n", "é", " a a", "aab", "\n\nQ"],
    "words": ["a b", " é a", "b b b"],
}


def end_of(tokenizer: Any, tokens: list[int], strings: list[str]) -> int | None:
    """The position of the first token after which the decoded text holds one of `strings`; None if it never does."""
    prompt = tokenizer("a")["input_ids"]
    start = len(tokenizer.decode(prompt))
    for position in range(len(tokens)):
        text = tokenizer.decode(prompt + tokens[: position + 1], clean_up_tokenization_spaces=False)[start:]
        if any(string in text for string in strings):
            return position
    return None


def matched(stop: StopStrings, tokens: list[int]) -> int | None:
    """The position of the token with which a row of `tokens` is completed."""
    states = torch.zeros(1, dtype=torch.long)
    for position, token in enumerate(tokens):
        states = stop.advance(states, torch.tensor([token]))
        if int(states) == stop.completed:
            return position
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_row_ends_at_the_token_at_which_its_text_first_contains_a_string(name: str) -> None:
    tokenizer, found = TOKENIZERS[name], 0
    texts = ["abc", "\n\nQ", "é", "a a", "b é a", "abab", "bb b"]
    likely = sorted({token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]})
    likely += [token for part, token in tokenizer.get_vocab().items() if part in ("Ã", "©", "<|end|>", "xÃ", "ĊQ")]
    # Of two bytes that are no character, this kind of decoder writes neither the one nor the characters beside it.
    pair = [tokenizer.get_vocab().get(name) for name in ("<0xC3>", "<0xA9>")] if name == "byte_fallback" else []
    draw = random.Random(5)
    for strings in [[string] for string in STRINGS[name]] + [STRINGS[name], STRINGS[name][:2]]:
        stop = StopStrings(strings, tokenizer, vocab_size=len(tokenizer) + 7)
        for _ in range(30):
            tokens = [t for token in draw.choices(likely, k=12) for t in (pair if pair and token % 7 == 0 else [token])]
            expected = end_of(tokenizer, tokens, strings)
            assert matched(stop, tokens) == expected, (strings, tokens)
            found += expected is not None
    assert found > 40


def test_the_bytes_of_tokens_that_are_parts_of_characters_come_from_their_names() -> None:
    vocabulary, texts = byte_level().get_vocab(), token_bytes(byte_level(), 300)
    assert [texts[vocabulary[name]] for name in ("Ã", "xÃ", "Ã©", "Ġa")] == [b"\xc3", b"x\xc3", b"\xc3\xa9", b" a"]
    vocabulary, texts = byte_fallback().get_vocab(), token_bytes(byte_fallback(), 280)
    assert [texts[vocabulary[name]] for name in ("<0xC3>", "<0x0A>", "▁a")] == [b"\xc3", b"\n", b" a"]
    # The model's rows beyond the tokenizer write nothing, so that they change no state.
    assert texts[len(vocabulary) :] == [b""] * (280 - len(vocabulary))


def test_a_part_of_a_character_without_a_known_byte_completes_nothing() -> None:
    # Chinese letters are no byte-level names, and this decoder writes the unknown character for this token.
    words = Tokenizer(WordLevel({"a": 0, "字": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = WhitespaceSplit(), decoders.Replace("字", "\N{REPLACEMENT CHARACTER}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert token_bytes(tokenizer, 3)[1] == b"\xff"


def test_a_tokenizer_whose_tokens_depend_on_the_next_one_is_refused() -> None:
    # The decoder of speech models writes a token that is repeated once.
    letters = Tokenizer(BPE({"a": 0, "b": 1, "c": 2}, []))
    letters.decoder = decoders.CTC()
    with pytest.raises(ValueError, match="stop_strings: .* for the tokens .*; use truncate_tokens"):
        StopStrings(["ab"], PreTrainedTokenizerFast(tokenizer_object=letters), vocab_size=3)


PROMPTS = padded([[5, 6, 7], [8, 9], [10, 11, 12]])
PARAMS = SamplingParams(12, 1.0, 0, (3,), seed=3, step=1, num_return_sequences=3)


def sampled(backend: str, model: Any, slots: int | None = None, turns: Any = None, **changes: Any) -> Generation:
    params = replace(PARAMS, **changes)
    return generate(model, PROMPTS, params, backend=backend, rows_at_once=slots, turns=turns)


@pytest.fixture(scope="module")
def free() -> tuple[Any, Generation, list[str]]:
    """A model of 270 byte-level tokens, responses without stop strings, and strings of several tokens from them."""
    model, tokenizer = tiny_causal_lm("llama", vocab_size=270), byte_level()
    free = sampled("generate", model)
    pieces = [
        b"".join(token_bytes(tokenizer, 270)[token] for token in free.responses[row, start : start + 3].tolist())
        for row, start in ((0, 2), (4, 6), (8, 0))
    ]
    return model, free, [piece.decode("utf-8", "ignore") for piece in pieces]


def cut(free: Generation, tokenizer: Any, strings: list[str]) -> tuple[Tensor, Tensor]:
    """The mask and `stopped` of the responses `free`, cut after the tokens that complete one of `strings`."""
    mask, stopped = free.response_mask.clone(), free.stopped.clone()
    for row, tokens in enumerate(free.responses.tolist()):
        end = end_of(tokenizer, tokens[: int(mask[row].sum())], strings)
        if end is not None:
            mask[row, end + 1 :], stopped[row] = False, True
    return mask, stopped


@pytest.mark.parametrize("backend", ["slots", "generate", "shapes of a GPU"])
def test_every_backend_ends_responses_at_stop_strings_and_keeps_their_tokens(free: Any, backend: str) -> None:
    model, whole, strings = free
    stop = StopStrings(strings, byte_level(), vocab_size=270)
    mask, stopped = cut(whole, byte_level(), strings)
    assert 3 <= int((mask.sum(dim=1) < whole.response_mask.sum(dim=1)).sum())
    for slots in (None, 2):
        if backend == "shapes of a GPU":
            found = in_buckets(model, stop, slots)
        else:
            found = sampled(backend, model, stop_strings=stop, slots=slots)
        assert torch.equal(found.response_mask, mask)
        assert torch.equal(found.stopped, stopped)
        assert torch.equal(found.responses, whole.responses * mask)
        torch.testing.assert_close(found.logprobs, whole.logprobs * mask, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def in_buckets(model: Any, stop: StopStrings, slots: int | None) -> Generation:
    """Sampled in slots that are looked at every third step only, and in which rows move."""
    options: Any = {"rows_at_once": slots, "turns": None, "hooks": SamplingHooks()}
    return SlotLoop(model, PROMPTS, replace(PARAMS, stop_strings=stop), options, BUCKETS).run()


class Once:
    """Lets each response go on once, after one more token."""

    def __init__(self) -> None:
        self.turns: list[Any] = []

    def on_stop(self, turn: Any) -> list[int] | None:
        self.turns.append(turn)
        return [20] if turn.start == 0 else None

    def ready(self, timeout: float) -> list[Any]:
        return []


def test_a_string_that_begins_in_one_turn_is_not_completed_in_the_next(free: Any) -> None:
    model, _, _ = free
    tokenizer, turns = byte_level(), Once()
    text = token_bytes(tokenizer, 270)
    stops = [token for token in range(270) if token % 3]
    sampled("slots", model, stop_token_ids=tuple(stops), turns=Turns(turns), slots=1)
    # The last token before what was appended, and the first one after it; the first 94 tokens are of ASCII.
    around = [(turn.response[turn.start - 2], turn.response[turn.start]) for turn in turns.turns if turn.start > 0]
    before, after = next(pair for pair in around if max(pair) < 94)
    strings = [(text[before] + between + text[after]).decode() for between in (b"", text[20])]
    again = Once()
    stop = StopStrings(strings, tokenizer, vocab_size=270)
    sampled("slots", model, stop_token_ids=tuple(stops), turns=Turns(again), slots=1, stop_strings=stop)
    assert [turn.response for turn in again.turns] == [turn.response for turn in turns.turns]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_strings is \['a', ''\]; .*length 1 or more"):
        PPOConfig(stop_strings=["a", ""])


def test_a_run_ends_its_responses_at_stop_strings(tmp_path: Path) -> None:
    def completions(**options: Any) -> list[list[str]]:
        seen: list[list[str]] = []

        def record(completions: list[str], **_: Any) -> list[float]:
            seen.append(completions)
            return [0.0] * len(completions)

        trainer = tiny_trainer(tmp_path / str(len(options)), trainer_arguments={"reward_funcs": record}, **options)
        trainer.train()
        return seen

    free = completions(total_episodes=10, response_len=8)[0]
    words = next(text.split() for text in free if len(text.split()) > 4)
    string = " ".join(words[1:4])
    ended = completions(total_episodes=10, response_len=8, stop_strings=[string])[0]
    assert ended == [text[: text.index(string) + len(string)] if string in text else text for text in free]
    assert ended != free
