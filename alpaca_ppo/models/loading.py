"""Loading of language models, classifiers and tokenizers, and whether a run's token ids and lengths fit a model.

Models are loaded with an explicit dtype and from safetensors only. What a run loads is decided in `factory`; critics
saved by a run are in `saved_critic`.
"""

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from alpaca_ppo.library_output import has_screen, transformers_bars
from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.models.policy import disable_dropout
from alpaca_ppo.saved_models import loading, remote_code

ModelSource: TypeAlias = str | PreTrainedModel | PeftModel  # a folder, a hub id, or a model in memory
_OPTIONS = "model_name_or_path, reference, value_model_name_or_path, teacher_model_name_or_path"
LOADING_REMEDY = f"check {_OPTIONS}: a folder with safetensors, or a hub id"


def load_causal_lm(
    model: str | PreTrainedModel,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    load_in_4bit: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The causal language model `model`, with dropout off.

    Args:
        model: a folder, a hub id, or a model in memory, which needs no other arguments.
        trust_remote_code: run code that comes with the model.
        dtype: of the weights.
        load_in_4bit: quantize the weights (NF4, arXiv:2305.14314).
        arguments: further ones of `from_pretrained` (`PPOConfig.model_init_kwargs`).

    Raises:
        ValueError: as `load_complete`; for 4 bits without a CUDA device or bitsandbytes.
    """
    if isinstance(model, str):
        given = dict(arguments or {})
        # Not an explicit None: from_pretrained would write it over the configuration of a model stored quantized.
        if load_in_4bit:
            given["quantization_config"] = four_bit()
        model = load_complete(AutoModelForCausalLM, model, trust_remote_code=trust_remote_code, dtype=dtype, **given)
    disable_dropout(model)
    return model


def four_bit(*, without: Collection[str] = ()) -> BitsAndBytesConfig:
    """How weights are quantized, but for modules of the names in `without`; by default the head of a language model."""
    if not torch.cuda.is_available() or not find_spec("bitsandbytes"):
        asked = "4-bit weights are asked for (load_in_4bit or teacher_dtype)"
        raise ValueError(f"{asked}, which need a CUDA device and bitsandbytes; use bfloat16 instead")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=[*without] or None,
    )


def is_causal_lm(model: str | PreTrainedModel, *, trust_remote_code: bool = False) -> bool:
    """Whether `model` (in memory, or what a folder or hub id holds) has a language-model head, and no layer `score`.

    Raises:
        ValueError: if there is no configuration of that name, or it comes with code that may not run.
    """
    if not isinstance(model, str):
        return "score" not in dict(model.named_children()) and model.get_output_embeddings() is not None
    problem = f"no model can be loaded from {model!r}"
    with remote_code(model, trust=trust_remote_code), loading(problem, model, LOADING_REMEDY):
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    # The class of code that comes with the model, as file.Class.
    if remote_class := (vars(config).get("auto_map") or {}).get("AutoModelForCausalLM"):
        known.add(remote_class.rpartition(".")[2])
    return any(name in known for name in config.architectures or [])


def load_sequence_classifier(
    model: str | PreTrainedModel, *, trust_remote_code: bool = False, arguments: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """The sequence classifier `model`, with dropout off; a folder or hub id is loaded in float32, with further
    `arguments` of `from_pretrained`.

    Raises:
        ValueError: as `load_complete`; if its head is not a linear layer named `score` with one label.
    """
    if isinstance(model, str):
        model = load_complete(
            AutoModelForSequenceClassification, model, trust_remote_code=trust_remote_code, **(arguments or {})
        )
    labels, head = model.config.num_labels, dict(model.named_children()).get("score")
    if labels != 1 or not isinstance(head, torch.nn.Linear):
        raise ValueError(
            f"{model.config.name_or_path or type(model).__name__} has num_labels {labels} and the head "
            f"{type(head).__name__}; a critic needs a decoder-only classifier with one linear head `score` of one label"
        )
    disable_dropout(model)
    return model


def load_complete(
    auto_class: Any, name: str, *, trust_remote_code: bool, remedy: str = LOADING_REMEDY, **arguments: Any
) -> PreTrainedModel:
    """The model `name`, from safetensors, in float32 unless the `arguments` of `from_pretrained` say otherwise.
    `remedy` ends the error about a name that cannot be loaded.

    Raises:
        ValueError: if it does not exist, its folder is damaged, or weights are missing, which transformers would
            initialize at random.
    """
    problem = f"no model can be loaded from {name!r}"
    if given := sorted(arguments.keys() - {"dtype", "quantization_config"}):
        remedy += f"; or it refuses an argument of model_init_kwargs ({', '.join(given)})"
    arguments = {"dtype": torch.float32, **arguments}
    bars = transformers_bars(shown=has_screen())
    with remote_code(name, trust=trust_remote_code), loading(problem, name, remedy), bars:
        loaded: tuple[PreTrainedModel, Any] = auto_class.from_pretrained(
            name, trust_remote_code=trust_remote_code, use_safetensors=True, output_loading_info=True, **arguments
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"])[:3]:
        raise ValueError(f"{name} has no weights for {', '.join(missing)}, which would be random; load another model")
    return model


def load_processing_class(
    model: ModelSource | ActorCritic, *, trust_remote_code: bool = False, field: str = "model_name_or_path"
) -> Any:
    """The tokenizer that was saved with `model`, a folder, a hub id, or a model in memory that was loaded from one.
    `field` is the option that names it, for errors.

    Raises:
        ValueError: if a model in memory has no `name_or_path`, or there is no tokenizer, or a damaged one.
    """
    if isinstance(model, ActorCritic):
        model = model.policy.model
    name = model if isinstance(model, str) else model.config.name_or_path
    if not name:
        raise ValueError("processing_class is None and the model has no name_or_path; pass processing_class=tokenizer")
    problem = f"no tokenizer can be loaded from {name!r}"
    remedy = f"check {field}: an existing folder with the tokenizer's files, or a hub id that can be downloaded"
    with remote_code(name, trust=trust_remote_code), loading(problem, name, remedy):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def check_lengths(config: Any, lengths: Mapping[str, int], *, owner: str = "model") -> None:
    """Checks that a row fits the model of `config`, called `owner` in errors. `lengths` has the tokens of each part of
    the row, by the option that sets it.

    With the rope types `longrope` and `dynamic`, frequencies depend on the longest row of the batch (transformers'
    `dynamic_rope_update`). A response starts short, so a longer row would cross the length at which they change.

    Raises:
        ValueError: if the row exceeds `max_position_embeddings`, or the length at which rotary frequencies change.
    """
    total, text = sum(lengths.values()), config.get_text_config()
    # Configurations from outside of transformers may still call them rope_scaling.
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer_type = [rope for rope in parameters.values() if isinstance(rope, Mapping)]
    for rope in by_layer_type or [parameters]:
        switch = _switch_length(rope, text)
        # The model does not read a response's last token.
        if switch is not None and total - 1 > switch:
            problem = f"rows of {total} tokens cross {switch}, where the rotary frequencies of the {owner}"
            raise ValueError(f"{problem} ({config.model_type}) change; lower {' + '.join(lengths)} to {switch + 1}")
    # Models whose attention is biased by distance, such as BLOOM, have no such limit.
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and total > limit:
        parts = " + ".join(f"{name} ({length})" for name, length in lengths.items())
        raise ValueError(f"{parts} is more than the {owner}'s max_position_embeddings ({limit}); lower one of them")


def _switch_length(rope: Mapping[str, Any], text: Any) -> int | None:
    """The length in tokens up to which rows have the same rotary frequencies; None without a limit."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "dynamic":
        return int(text.max_position_embeddings)
    if kind != "longrope":
        return None
    # Phi-3.5-MoE also scales by one of two factors, and calls them mscale.
    pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
    if all(rope.get(short) == rope.get(long) for short, long in pairs):
        return None
    default = getattr(text, "original_max_position_embeddings", text.max_position_embeddings)
    return int(rope.get("original_max_position_embeddings", default))


def check_token_ids(model: PreTrainedModel, tokenizer: Any, owner: str = "the tokenizer") -> None:
    """Raises a `ValueError` if the tokenizer (`owner` in errors) has a token without an embedding in `model`."""
    embeddings = int(model.config.get_text_config().vocab_size)
    added = tokenizer.added_tokens_decoder
    in_use = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    for token, i in tokenizer.get_vocab().items():
        # The last token of Gemma 3's tokenizer represents an image; its text-only models have no embedding for it.
        unused = i in added and added[i].special and i not in in_use and token not in str(tokenizer.chat_template)
        if i >= embeddings and not unused:
            problem = f"{owner} has {token!r} (id {i}), but the model has {embeddings} embeddings"
            raise ValueError(f"{problem}; take the model's tokenizer")


def check_same_tokenizer(
    field: str, model: str, processing_class: Any, *, remedy: str, trust_remote_code: bool = False
) -> None:
    """Checks that the tokenizer of `model`, a folder or hub id that the option `field` names, has the policy's ids.
    Special tokens and those that only one of the two has may differ; a model whose tokenizer does not load passes.

    Raises:
        ValueError: if an id stands for another token.
    """
    try:
        tokenizer = load_processing_class(model, trust_remote_code=trust_remote_code)
    except ValueError:
        return
    special = {*tokenizer.all_special_ids, *processing_class.all_special_ids}
    token_of = {number: token for token, number in tokenizer.get_vocab().items() if number not in special}
    policy_vocabulary = processing_class.get_vocab().items()
    different = [(number, token) for token, number in policy_vocabulary if token_of.get(number, token) != token]
    if different:
        number, token = min(different)
        first = f"{number} for {token_of[number]!r} instead of {token!r}"
        problem = f"has another tokenizer than the policy: {len(different)} ids stand for other tokens, {first}"
        raise ValueError(f"{field} {model!r} {problem}; {remedy}")
