"""What ends a response: stop tokens, stop strings (`stop_strings`), and truncate tokens, which do so only after some
length.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from alpaca_ppo.generation.sampling_params import SamplingParams


class StopRule:
    """Decides whether a token ends its row's turn, by the stop tokens, truncate tokens and stop strings of `params`."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._stop_ids = torch.tensor(sorted(set(params.stop_token_ids)), dtype=torch.long, device=device)
        self._truncate_ids = torch.tensor(sorted(set(params.truncate_token_ids)), dtype=torch.long, device=device)
        self._truncate_after, self._strings = params.truncate_after, params.stop_strings

    def __call__(self, tokens: Tensor, positions: Tensor, matched: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (N,) bool, True for a token that ends its row, and the next `matched`.

        Args:
            tokens: (N,) int64, one per row.
            positions: (N,) int64, of these tokens in their turns.
            matched: (N,) int64, the states of `StopStrings.advance`; returned as they are without stop strings.
        """
        ends = (tokens.unsqueeze(1) == self._stop_ids).any(dim=1)
        if len(self._truncate_ids):
            cut = (tokens.unsqueeze(1) == self._truncate_ids).any(dim=1)
            ends = ends | (cut & (positions >= self._truncate_after))
        if self._strings is not None:
            matched = self._strings.advance(matched, tokens)
            ends = ends | (matched == self._strings.completed)
        return ends, matched


def configured_stop_tokens(
    processing_class: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> set[int]:
    """Returns the eos of the tokenizer and those of the model's generation config."""
    configured = None if generation_config is None else generation_config.eos_token_id
    found = {configured} if isinstance(configured, int) else set(configured or ())
    return found if processing_class.eos_token_id is None else found | {processing_class.eos_token_id}


def resolve_stop_tokens(
    processing_class: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    extra_ids: Collection[int] = (),
) -> tuple[int, ...]:
    """Returns the ids that end a response, sorted: `configured_stop_tokens` and `extra_ids`.

    Raises:
        ValueError: if there are none.
    """
    found = configured_stop_tokens(processing_class, generation_config) | set(extra_ids)
    if not found:
        raise ValueError(
            "eos_token_id is None in both the tokenizer and the model's generation config, so no response would ever "
            "stop; set processing_class.eos_token to the token that ends a response"
        )
    return tuple(sorted(found))


_ANSWER = "SentinelAnswer"


def resolve_turn_end(
    processing_class: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """Returns the token with which the tokenizer's chat template ends a turn of the assistant, or None.

    That is the first special or added token after a rendered answer: Phi-3's `<|end|>`, before the eos that follows
    it. If the conversation ends with such tokens, the eos among them, it is the first of these, so that a section
    between the answer and the end of the turn does not count. The pad token counts only if no other follows. If the
    template writes none there, it is the token that starts the next turn, unless that is the bos. None for a template
    that cannot render an answer, changes its text, or ends turns with plain text.

    `chat_template_kwargs` are further arguments of the template. A section that a template without an eos writes after
    every answer cannot be told from the end of the turn.
    """
    # Templates of multimodal models take a list of parts, and some render nothing for a string.
    for content in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        user = {"role": "user", "content": content("Question")}
        answer = {"role": "assistant", "content": content(_ANSWER)}
        rest = _text_after_answer(processing_class, [user, answer], chat_template_kwargs)
        if rest is None:
            continue
        token = _end_of_turn(processing_class, rest)
        if token is None:
            longer = _text_after_answer(processing_class, [user, answer, user], chat_template_kwargs)
            token = None if longer is None else _end_of_turn(processing_class, longer)
        starts_text = token == processing_class.bos_token_id != processing_class.eos_token_id
        return None if starts_text else token
    return None


def _text_after_answer(
    processing_class: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> str | None:
    """What the chat template writes after `_ANSWER` in `messages`; None if it cannot render them."""
    try:
        text = str(processing_class.apply_chat_template(messages, tokenize=False, **(chat_template_kwargs or {})))
    except Exception:
        # A template runs methods and operators of Python on the messages, and raises what these raise. Prompts, which
        # may have no answer, are rendered elsewhere, and their errors reported.
        return None
    # A template may change the case of a message.
    rendered = list(re.finditer(_ANSWER, text, re.IGNORECASE))
    return text[rendered[-1].end() :] if rendered else None


def _end_of_turn(processing_class: PreTrainedTokenizerBase, text: str) -> int | None:
    """The special or added token of `text`, which follows an answer, that ends the turn; None if there is none.

    Not every end of a turn is marked as special: some fine-tunes add `<|im_end|>` as an ordinary token.
    """
    names = dict(zip(processing_class.all_special_ids, processing_class.all_special_tokens, strict=True))
    names |= {i: token.content for i, token in processing_class.added_tokens_decoder.items()}
    ids: list[int] = processing_class(text, add_special_tokens=False)["input_ids"]
    # Gemma's tokenizer has runs of blanks as added tokens. The unknown token is no part of the text that it stands for.
    added = [names.get(i, "").strip() != "" and names[i] in text for i in ids]
    words = [n for n, i in enumerate(ids) if not added[n] and str(processing_class.decode([i])).strip()]
    found = [i for i, is_added in zip(ids, added, strict=True) if is_added]
    last = [i for n, i in enumerate(ids) if added[n] and n > max(words, default=-1)]
    # Words after the last token may be the start of the next answer, which Llama 3's first template always writes.
    candidates = last if processing_class.eos_token_id in last else found
    padding = {processing_class.pad_token_id} - {processing_class.eos_token_id}
    return next((i for i in candidates if i not in padding), next(iter(candidates), None))


def resolve_truncate_tokens(
    processing_class: PreTrainedTokenizerBase, truncate_tokens: Sequence[str | int]
) -> tuple[int, ...]:
    """Returns the ids of `truncate_tokens`, sorted; a string is looked up in the vocabulary, then tokenized as text.

    Raises:
        ValueError: if a string is not a single token, or an id is outside the vocabulary.
    """
    return tuple(sorted({_truncate_token(processing_class, token) for token in truncate_tokens}))


def _truncate_token(processing_class: PreTrainedTokenizerBase, token: str | int) -> int:
    vocabulary = processing_class.get_vocab()
    if isinstance(token, int):
        if token not in vocabulary.values():
            raise ValueError(
                f"truncate_tokens holds id {token}, which is not in the tokenizer's vocabulary of "
                f"{len(vocabulary)} tokens; use an id of the vocabulary or the token's text"
            )
        return token
    if token in vocabulary:
        return vocabulary[token]
    ids = processing_class.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == processing_class.unk_token_id:
        raise ValueError(
            f"truncate_tokens holds {token!r}, which the tokenizer splits into {len(ids)} tokens "
            f"{processing_class.convert_ids_to_tokens(ids)}; use a string that is exactly one known token, or its id"
        )
    return int(ids[0])
