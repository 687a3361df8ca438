"""Loading of language models, classifiers and tokenizers.

Models are loaded with an explicit dtype and from safetensors only. What a run loads is decided in `factory`; critics
saved by a run are in `saved_critic`.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

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
from alpaca_ppo.models.modules import disable_dropout
from alpaca_ppo.saved_models import loading, remote_code

LOADING_REMEDY = (
    "check model_name_or_path, reference and value_model_name_or_path: each is an existing folder with safetensors "
    "weights, or a hub id that can be downloaded"
)


def load_causal_lm(
    model: str | PreTrainedModel,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    load_in_4bit: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Returns the causal language model `model`, with dropout off.

    Args:
        model: a folder, a hub id, or a model in memory, which keeps its dtype.
        trust_remote_code: run code that comes with the model.
        dtype: of the weights, if the model is loaded.
        load_in_4bit: quantize the weights, if the model is loaded (NF4, arXiv:2305.14314).
        arguments: further ones of `from_pretrained` (`PPOConfig.loading_arguments`), if the model is loaded.

    Raises:
        ValueError: if the model does not exist, its folder is damaged or lacks weights, such as the language-model
            head; for 4 bits without a CUDA device or bitsandbytes.
    """
    if isinstance(model, str):
        # Not an explicit None: from_pretrained would write it over the configuration of a model stored quantized.
        quantization = {"quantization_config": _four_bit()} if load_in_4bit else {}
        own = {**(arguments or {}), **quantization}
        model = load_complete(AutoModelForCausalLM, model, trust_remote_code=trust_remote_code, dtype=dtype, **own)
    disable_dropout(model)
    return model


def _four_bit() -> BitsAndBytesConfig:
    if not torch.cuda.is_available() or not find_spec("bitsandbytes"):
        raise ValueError(
            "load_in_4bit is True, but needs a CUDA device and the package bitsandbytes; use dtype: bfloat16 instead"
        )
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def is_causal_lm(model: str | PreTrainedModel, *, trust_remote_code: bool = False) -> bool:
    """Whether `model` (in memory, or what a folder or hub id holds) has a language-model head, and not one linear layer
    named `score`.

    Raises:
        ValueError: if there is no configuration of that name, or it comes with code that it may not run.
    """
    if not isinstance(model, str):
        return "score" not in dict(model.named_children()) and model.get_output_embeddings() is not None
    with (
        remote_code(model, trust=trust_remote_code),
        loading(f"no model can be loaded from {model!r}", model, LOADING_REMEDY),
    ):
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return names_causal_lm(config)


def names_causal_lm(config: Any) -> bool:
    """Whether the model that was saved with the transformers configuration `config` is a causal language model."""
    own_class = (vars(config).get("auto_map") or {}).get("AutoModelForCausalLM")
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *([own_class.rpartition(".")[2]] if own_class else [])}
    return any(name in known for name in config.architectures or [])


def load_sequence_classifier(
    model: str | PreTrainedModel, *, trust_remote_code: bool = False, arguments: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Returns the sequence classifier `model`, with dropout off; a folder or hub id is loaded in float32, with further
    `arguments` of `from_pretrained`.

    Raises:
        ValueError: if it does not exist, its folder is damaged or lacks weights, it does not have exactly one label, or
            its head is not a linear layer named `score`.
    """
    classifier: PreTrainedModel = model  # type: ignore[assignment]
    if isinstance(model, str):
        classifier = load_complete(
            AutoModelForSequenceClassification, model, trust_remote_code=trust_remote_code, **(arguments or {})
        )
    if classifier.config.num_labels != 1:
        raise ValueError(
            f"{classifier.config.name_or_path or type(classifier).__name__} has num_labels "
            f"{classifier.config.num_labels}; a critic needs a sequence classifier with num_labels=1"
        )
    if not isinstance(dict(classifier.named_children()).get("score"), torch.nn.Linear):
        raise ValueError(
            f"the head of {type(classifier).__name__} is not a linear layer named `score`; use a decoder-only "
            "AutoModelForSequenceClassification"
        )
    disable_dropout(classifier)
    return classifier


def load_complete(
    auto_class: Any,
    name: str,
    *,
    trust_remote_code: bool,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> PreTrainedModel:
    """The model `name`, from safetensors; `arguments` are further ones of `from_pretrained`.

    Raises:
        ValueError: if it does not exist, its folder is damaged, or weights are missing, which transformers would
            initialize at random.
    """
    problem, remedy = f"no model can be loaded from {name!r}", LOADING_REMEDY
    if own := sorted(arguments.keys() - {"quantization_config"}):
        remedy += f"; or it refuses an argument of model_init_kwargs ({', '.join(own)})"
    bars = transformers_bars(shown=has_screen())
    with remote_code(name, trust=trust_remote_code), loading(problem, name, remedy), bars:
        model, info = auto_class.from_pretrained(
            name,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **arguments,
        )
    if info["missing_keys"]:
        raise ValueError(
            f"{name} has no weights for {', '.join(sorted(info['missing_keys'])[:3])}, which would be random; use a "
            f"checkpoint that was saved as {type(model).__name__}"
        )
    loaded: PreTrainedModel = model
    return loaded


def load_processing_class(
    model: str | PreTrainedModel | PeftModel | ActorCritic,
    *,
    trust_remote_code: bool = False,
    field: str = "model_name_or_path",
) -> Any:
    """Returns the tokenizer that was saved with `model`.

    Args:
        model: a folder, a hub id, or a model in memory that was loaded from one.
        trust_remote_code: run code that comes with the tokenizer.
        field: the option that names the model, for the error.

    Raises:
        ValueError: if a model in memory has no `name_or_path`, or there is no tokenizer, or a damaged one.
    """
    if isinstance(model, ActorCritic):
        model = model.policy.model
    name = model if isinstance(model, str) else model.config.name_or_path
    if not name:
        raise ValueError(
            "processing_class is None and the model has no name_or_path to load a tokenizer from; pass "
            "processing_class=tokenizer"
        )
    problem = f"no tokenizer can be loaded from {name!r}"
    remedy = f"check {field}: an existing folder with the tokenizer's files, or a hub id that can be downloaded"
    with remote_code(name, trust=trust_remote_code), loading(problem, name, remedy):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
