"""Checks that a run's token ids and sequence lengths fit a model: its embeddings and its positions.

They need the model's configuration, but no forward pass. Options are checked in `config`.
"""

from typing import Any

from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig


def check_positions(config: Any, args: PPOConfig) -> None:
    """Checks that the longest prompt and response together fit the model of the transformers configuration `config`.

    Raises:
        ValueError: if they can exceed its `max_position_embeddings`.
    """
    # Models without learned positions, such as BLOOM, have no such limit.
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and args.query_len + args.response_len > limit:
        raise ValueError(
            f"query_len ({args.query_len}) + response_len ({args.response_len}) is more than the model's "
            f"max_position_embeddings ({limit}); lower one of them"
        )


def check_token_ids(policy: PreTrainedModel, processing_class: Any) -> None:
    """Checks that the policy has an embedding for every token that the tokenizer can produce from text.

    Raises:
        ValueError: with both numbers, and the first token without an embedding.
    """
    if missing := _first_without_embedding(policy, processing_class):
        raise ValueError(
            f"the tokenizer has {len(processing_class)} tokens but the model has {_num_embeddings(policy)} embeddings, "
            f"none for {missing}; use the model's own tokenizer, or call model.resize_token_embeddings first"
        )


def check_reward_token_ids(base: PreTrainedModel, tokenizer: Any, reward_adapter: str) -> None:
    """Checks that `base` has an embedding for every token that the reward adapter's tokenizer can produce from text.

    Raises:
        ValueError: with the adapter's name, both numbers, and the first token without an embedding.
    """
    if missing := _first_without_embedding(base, tokenizer):
        raise ValueError(
            f"reward_adapter {reward_adapter}: its tokenizer has {len(tokenizer)} tokens but the base has "
            f"{_num_embeddings(base)} embeddings, none for {missing}; train it with the base's own tokenizer, or give "
            "a full reward model in reward_funcs (reward_model_name_or_path)"
        )


def _num_embeddings(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def _first_without_embedding(model: PreTrainedModel, tokenizer: Any) -> str | None:
    in_use = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    added, rows = tokenizer.added_tokens_decoder, _num_embeddings(model)
    for token, i in tokenizer.get_vocab().items():
        # The last token of Gemma 3's tokenizer represents an image; its text-only models have no embedding for it.
        unused = i in added and added[i].special and i not in in_use and token not in str(tokenizer.chat_template)
        if i >= rows and not unused:
            return f"{token!r} (id {i})"
    return None
