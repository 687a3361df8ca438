"""The tokens that end a response: stop tokens, and truncate tokens, which do so only after some length."""

import re
from collections.abc import Collection, Sequence

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase


class StopRule:
    """Decides whether a token ends its response.

    Args:
        stop_token_ids: end a response at any position.
        truncate_token_ids: end a response once at least `truncate_after` of its tokens precede them.
        truncate_after: see `truncate_token_ids`; in tokens.
        device: device of the tokens to check.
    """

    def __init__(
        self,
        stop_token_ids: Sequence[int],
        *,
        truncate_token_ids: Sequence[int] = (),
        truncate_after: int = 0,
        device: torch.device,
    ) -> None:
        stops = sorted(set(stop_token_ids))
        self._stop_ids = torch.tensor(stops, dtype=torch.long, device=device)
        self._stop_or_truncate_ids = torch.tensor(
            sorted({*stops, *truncate_token_ids}), dtype=torch.long, device=device
        )
        self._truncate_after = truncate_after

    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Returns (N,) bool: True if a token of `tokens` (N,), at position `position` (from 0), ends its row."""
        ends = self._stop_or_truncate_ids if position >= self._truncate_after else self._stop_ids
        return (tokens.unsqueeze(1) == ends).any(dim=1)


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


def resolve_turn_end(processing_class: PreTrainedTokenizerBase) -> int | None:
    """Returns the token with which the tokenizer's chat template ends a turn of the assistant, or None.

    That is the first special or added token after a rendered answer: Phi-3's `<|end|>`, before the eos that follows
    it. If the template writes none there, it is the token that starts the next turn, unless that is the bos. None for
    a template that cannot render an answer, changes its text, or ends turns with plain text.
    """
    user, answer = {"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}
    for messages in ([user, answer], [user, answer, user]):
        try:
            text = str(processing_class.apply_chat_template(messages, tokenize=False))
        except TemplateError:
            return None
        # A template may change the case of a message.
        rendered = list(re.finditer(_ANSWER, text, re.IGNORECASE))
        if not rendered:
            return None
        token = _first_added_token(processing_class, text[rendered[-1].end() :])
        if token is not None:
            starts_text = token == processing_class.bos_token_id != processing_class.eos_token_id
            return None if starts_text else token
    return None


def _first_added_token(processing_class: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id of the first special or added token in `text`, blanks aside; None if there is none.

    Not every end of a turn is marked as special: some fine-tunes add `<|im_end|>` as an ordinary token.
    """
    names = dict(zip(processing_class.all_special_ids, processing_class.all_special_tokens, strict=True))
    names |= {i: token.content for i, token in processing_class.added_tokens_decoder.items()}
    ids = processing_class(text, add_special_tokens=False)["input_ids"]
    # Gemma's tokenizer has runs of blanks as added tokens. The unknown token is no part of the text that it stands for.
    return next((int(i) for i in ids if names.get(i, "").strip() and names[i] in text), None)


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
