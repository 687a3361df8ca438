"""Whether the tokenizer's ids and the lengths of a run fit a model."""

from typing import Any

from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig


def check_positions(config: Any, args: PPOConfig) -> None:
    """Checks that prompt and response fit the policy that has `config`, of transformers.

    Raises:
        ValueError: when they may be longer than its positions.
    """
    # Models without positions of their own (BLOOM) do not say how many they have.
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and args.query_len + args.response_len > limit:
        raise ValueError(
            f"query_len ({args.query_len}) + response_len ({args.response_len}) is more than the model's "
            f"max_position_embeddings ({limit}); lower one of them"
        )


def check_token_ids(policy: PreTrainedModel, processing_class: Any) -> None:
    """Checks that the model has an embedding for every token of the tokenizer that a text can hold.

    Raises:
        ValueError: with both numbers, and the first token that has none.
    """
    if lost := _first_without_embedding(policy, processing_class):
        raise ValueError(
            f"the tokenizer has {len(processing_class)} tokens but the model has {_embeddings(policy)} embeddings, "
            f"none for {lost}; give the model's own tokenizer, or call model.resize_token_embeddings first"
        )


def check_reward_token_ids(base: PreTrainedModel, tokenizer: Any, reward_adapter: str) -> None:
    """Checks that `base` has an embedding for every token that a text for the reward adapter on it can hold.

    Raises:
        ValueError: with the adapter's name, both numbers, and the first token that has none.
    """
    if lost := _first_without_embedding(base, tokenizer):
        raise ValueError(
            f"reward_adapter {reward_adapter}: its tokenizer has {len(tokenizer)} tokens but the base has "
            f"{_embeddings(base)} embeddings, none for {lost}; train it with the base's own tokenizer, or give a whole "
            "reward model in reward_funcs (reward_model_name_or_path)"
        )


def _embeddings(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def _first_without_embedding(model: PreTrainedModel, tokenizer: Any) -> str | None:
    named = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    added, rows = tokenizer.added_tokens_decoder, _embeddings(model)
    for token, i in tokenizer.get_vocab().items():
        # Gemma 3's tokenizer ends with the token of an image, which its text models have no embedding for.
        idle = i in added and added[i].special and i not in named
        if i >= rows and not (idle and token not in str(tokenizer.chat_template)):
            return f"{token!r} (id {i})"
    return None
