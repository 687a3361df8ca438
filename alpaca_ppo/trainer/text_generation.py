"""`PPOTrainer.generate`: the policy's answers to any prompts, as text. Nothing is scored or recorded."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alpaca_ppo.data import collate_prompts
from alpaca_ppo.data.prompts import tokenize_prompts
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.models.loading import check_lengths

if TYPE_CHECKING:
    from alpaca_ppo.trainer.rollout_trainer import RolloutTrainer

Prompt = str | list[dict[str, Any]]


def generate_texts(
    trainer: "RolloutTrainer", prompts: Prompt | Sequence[Prompt], params: SamplingParams
) -> list[list[str]]:
    """Returns the responses to each prompt, without special tokens: `params.num_return_sequences` each.

    Args:
        trainer: whose policy answers.
        prompts: one, or a list of texts or of conversations; several conversations are a list of lists of messages.
        params: how to sample.

    Raises:
        ValueError: if there are no prompts, texts and conversations are mixed, a prompt has no tokens, or prompt and
            response are longer than the model's positions.
    """
    one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
    given: list[Any] = [prompts] if one else list(prompts)
    if not given or any(type(prompt) is not type(given[0]) for prompt in given):
        raise ValueError(
            f"prompts is {given!r:.200}; give at least one, and either texts or conversations (lists of messages)"
        )
    tokenizer, engine = trainer.processing_class, trainer.updater.engine
    ids = tokenize_prompts(given, tokenizer, trainer.args.chat_template_kwargs)
    query_len = max(map(len, ids))
    lengths = {"the prompt": query_len, "max_new_tokens": params.max_new_tokens}
    check_lengths(engine.actor_critic.policy.model.config, lengths)
    items = [{"input_ids": own, "row": {}} for own in ids]
    batch = collate_prompts(items, range(len(ids)), pad_token_id=params.pad_token_id, query_len=query_len)
    samples = trainer.collector.sample(engine, batch, params)
    rows = zip(samples["responses"], samples["response_mask"], strict=True)
    texts = tokenizer.batch_decode(
        [row[mask].tolist() for row, mask in rows], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    n = params.num_return_sequences
    return [texts[start : start + n] for start in range(0, len(texts), n)]
