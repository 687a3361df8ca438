"""Options that are arguments of other libraries, `chat_template_kwargs` and `model_init_kwargs`: which of them are
refused, and what to do instead.
"""

import json
from typing import Any

_NOT_IN_CHAT_TEMPLATE_KWARGS = dict.fromkeys(
    """conversation messages tokenize add_generation_prompt continue_final_message return_dict return_tensors padding
    truncation max_length tokenizer_kwargs return_assistant_tokens_mask""".split(),
    "the run sets it itself",
) | {"chat_template": "set processing_class.chat_template"}
NOT_IN_MODEL_INIT_KWARGS = (
    {name: f"set the option {name}" for name in ("dtype", "trust_remote_code", "load_in_4bit")}
    | {"torch_dtype": "set the option dtype"}
    | dict.fromkeys(("quantization_config", "load_in_8bit"), "set the option load_in_4bit")
    | dict.fromkeys(
        ("device_map", "max_memory", "offload_folder", "device_mesh", "tp_plan", "tp_size"),
        "Accelerate places the weights (accelerate launch, deepspeed)",
    )
    | dict.fromkeys(
        ("revision", "code_revision", "subfolder"),
        "the tokenizer and the other models would not follow it: download it (hf download) and name the folder",
    )
    | dict.fromkeys(
        ("token", "cache_dir", "local_files_only", "proxies"),
        "everything that a run loads needs it: set HF_TOKEN, HF_HOME, HF_HUB_OFFLINE or HTTPS_PROXY",
    )
    | dict.fromkeys(
        ("config", "state_dict", "num_labels", "use_safetensors", "output_loading_info"), "the run sets it itself"
    )
)
"""Arguments that may not be given there, each with what to do instead."""


def check_keywords(config: Any) -> None:
    """Checks the names of the arguments in a `PPOConfig`, and that a checkpoint can hold their values.

    Raises:
        ValueError: naming the option, the argument and the remedy.
    """
    check_chat_template_kwargs(config.chat_template_kwargs)
    _check_keywords("model_init_kwargs", config.model_init_kwargs, NOT_IN_MODEL_INIT_KWARGS)


def check_chat_template_kwargs(given: dict[str, Any] | None) -> None:
    """Checks the option `chat_template_kwargs`.

    Raises:
        ValueError: as `check_keywords`.
    """
    _check_keywords("chat_template_kwargs", given, _NOT_IN_CHAT_TEMPLATE_KWARGS)


def _check_keywords(field: str, given: dict[str, Any] | None, refused: dict[str, str]) -> None:
    for name, value in (given or {}).items():
        if not isinstance(name, str) or name in refused:
            # Without the value, which may be a token.
            raise ValueError(f"{field} has {name!r}; {refused.get(name, 'its keys must be names of arguments')}")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{field} has {name!r}, a {type(value).__name__} ({error}); give text, numbers, lists and mappings only"
            ) from error
