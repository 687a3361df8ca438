"""Checks that a run's token ids and sequence lengths fit a model: its embeddings, its positions and its rotations.

They need the model's configuration, but no forward pass. Options are checked in `config`.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.models.loading import load_processing_class


def check_positions(config: Any, args: PPOConfig, *, owner: str = "model") -> None:
    """Checks that the longest prompt and response together fit the model of the transformers configuration `config`.

    Args:
        config: of the model.
        args: of the run.
        owner: what the model is, for the error.

    Raises:
        ValueError: if they can exceed its `max_position_embeddings`, or the length beyond which it rotates keys and
            queries by other frequencies.
    """
    check_lengths(config, {"query_len": args.query_len, "response_len": args.response_len}, owner=owner)


def check_model_positions(actor_critic: ActorCritic, args: PPOConfig) -> None:
    """Checks that the longest prompt and response together fit policy and critic.

    Raises:
        ValueError: see `check_positions`.
    """
    policy: Any = actor_critic.policy.model
    check_positions(policy.config, args)
    if actor_critic.critic is not None:
        backbone: Any = actor_critic.critic.backbone
        check_positions((policy if backbone is None else backbone).config, args, owner="critic")


def check_lengths(config: Any, lengths: Mapping[str, int], *, owner: str = "model") -> None:
    """Checks that a row whose parts have `lengths` tokens, by their names, fits the model of the transformers
    configuration `config`.

    Raises:
        ValueError: see `check_positions`.
    """
    _check_rotations(config, lengths, owner)
    # Models without learned positions, such as BLOOM, have no such limit.
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and sum(lengths.values()) > limit:
        parts = " + ".join(f"{name} ({length})" for name, length in lengths.items())
        raise ValueError(f"{parts} is more than the {owner}'s max_position_embeddings ({limit}); lower one of them")


def _check_rotations(config: Any, lengths: Mapping[str, int], owner: str) -> None:
    """Checks that no row, whose parts have at most `lengths` tokens, can be long enough to change the rotary
    frequencies.

    With the rope types `longrope` and `dynamic` they depend on the longest row of the batch at the time of the pass
    (transformers' `modeling_rope_utils.dynamic_rope_update`). Every response starts short, so longer rows cross the
    length at which they change.
    """
    # The model does not read a response's last token.
    longest = sum(lengths.values()) - 1
    text = config.get_text_config()
    # Configurations from outside of transformers may still call them rope_scaling.
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer_type = [rope for rope in parameters.values() if isinstance(rope, Mapping)]
    for rope in by_layer_type or [parameters]:
        switch = _switch_length(rope, text)
        if switch is not None and longest > switch:
            raise ValueError(
                f"rows of {sum(lengths.values())} tokens cross {switch}, where the rotary frequencies of the {owner} "
                f"({config.model_type}) change; lower {' + '.join(lengths)} to {switch + 1}"
            )


def _switch_length(rope: Mapping[str, Any], text: Any) -> int | None:
    """The longest row, in tokens, that is rotated as every shorter one is; None if all rows are rotated alike."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "dynamic":
        return int(text.max_position_embeddings)
    # Phi-3.5-MoE also scales by one of two factors, and calls them mscale.
    sets = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
    if kind != "longrope" or all(rope.get(short) == rope.get(long) for short, long in sets):
        return None
    outside = getattr(text, "original_max_position_embeddings", text.max_position_embeddings)
    return int(rope.get("original_max_position_embeddings", outside))


def check_token_ids(model: PreTrainedModel, tokenizer: Any, owner: str = "the tokenizer") -> None:
    """Checks that `model` has an embedding for every token that the tokenizer (of `owner`) can produce from text.

    Raises:
        ValueError: with both numbers, and the first token without an embedding.
    """
    if missing := _first_without_embedding(model, tokenizer):
        raise ValueError(
            f"{owner} has {len(tokenizer)} tokens but the model has {_num_embeddings(model)} embeddings, none for "
            f"{missing}; use the model's own tokenizer, or call model.resize_token_embeddings first"
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


def check_same_tokenizer(value_model: str, processing_class: Any, *, trust_remote_code: bool = False) -> None:
    """Checks that the critic's model reads the policy's tokens as what they are. A model without a tokenizer passes.

    Special tokens, and tokens that only one of the two has, may differ.

    Args:
        value_model: a folder or a hub id.
        processing_class: the policy's tokenizer.
        trust_remote_code: run code that comes with the tokenizer.

    Raises:
        ValueError: if an id stands for another token in the tokenizer of `value_model`.
    """
    try:
        own = load_processing_class(value_model, trust_remote_code=trust_remote_code)
    except ValueError:
        return
    special = {*own.all_special_ids, *processing_class.all_special_ids}
    tokens = {number: token for token, number in own.get_vocab().items() if number not in special}
    vocabulary = processing_class.get_vocab().items()
    different = [(number, token) for token, number in vocabulary if tokens.get(number, token) != token]
    if different:
        number, token = min(different)
        raise ValueError(
            f"value_model {value_model!r} has another tokenizer than the policy: {len(different)} ids stand for other "
            f"tokens, {number} for {tokens[number]!r} instead of {token!r}; start the critic from another model"
        )
