"""`PPOTrainer.generate`: the policy's answers to any prompts, as text. Nothing is scored or recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

from alpaca_ppo.data import collate_prompts
from alpaca_ppo.data.prompts import tokenize_prompts
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.models.token_checks import check_lengths
from alpaca_ppo.ppo.rollouts import RolloutCollector

Prompt = str | list[dict[str, Any]]


def generate_texts(
    prompts: Prompt | Sequence[Prompt],
    *,
    collector: RolloutCollector,
    engine: Engine,
    processing_class: Any,
    sampling_params: SamplingParams,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[list[str]]:
    """Returns the responses to each prompt, without special tokens: `sampling_params.num_return_sequences` each.

    Args:
        prompts: one, or a list of texts or of conversations; several conversations are a list of lists of messages.
        collector: samples.
        engine: of the policy.
        processing_class: the policy's tokenizer.
        sampling_params: how to sample.
        chat_template_kwargs: further arguments of the chat template.

    Raises:
        ValueError: if there are no prompts, texts and conversations are mixed, a prompt has no tokens, or prompt and
            response are longer than the model's positions.
    """
    given: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
    if not given or any(type(prompt) is not type(given[0]) for prompt in given):
        raise ValueError(
            f"prompts is {given!r:.200}; give at least one, and either texts or conversations (lists of messages)"
        )
    ids = tokenize_prompts(given, processing_class, chat_template_kwargs)
    lengths = {"the prompt": max(map(len, ids)), "max_new_tokens": sampling_params.max_new_tokens}
    check_lengths(engine.actor_critic.policy.model.config, lengths)
    items = [{"input_ids": own, "row": {}} for own in ids]
    batch = collate_prompts(
        items, range(len(ids)), pad_token_id=sampling_params.pad_token_id, query_len=lengths["the prompt"]
    )
    samples = collector.sample(engine, batch, sampling_params)
    rows = zip(samples["responses"], samples["response_mask"], strict=True)
    texts = processing_class.batch_decode(
        [row[mask].tolist() for row, mask in rows], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    n = sampling_params.num_return_sequences
    return [texts[start : start + n] for start in range(0, len(texts), n)]


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
