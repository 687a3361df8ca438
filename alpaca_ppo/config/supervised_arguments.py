"""`SFTArguments` and `RewardModelArguments`: models and data of supervised fine-tuning and of reward modelling."""

from dataclasses import dataclass, field
from typing import Any

from alpaca_ppo.config.keyword_checks import check_chat_template_kwargs


@dataclass(frozen=True)
class _SupervisedArguments:
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = field(default=None, metadata={"help": "Split for --eval_strategy."})
    prompt_column: str = field(default="prompt", metadata={"help": "Column of the prompt: text or messages."})
    prompt_template: str | None = field(default=None, metadata={"help": "Named template or format string instead."})
    max_length: int = field(
        default=1024, metadata={"help": "Tokens of prompt and completion; longer rows are dropped."}
    )
    model_name_or_path: str = ""
    dataset_name: str = ""

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "dataset_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        if self.max_length < 2:
            raise ValueError(
                f"max_length is {self.max_length}; it must be at least 2, one token each of prompt and end"
            )


@dataclass(frozen=True)
class SFTArguments(_SupervisedArguments):
    """Which model learns from which demonstrations.

    Raises:
        ValueError: when the model or the dataset is not named, `max_length` leaves no room, or `chat_template_kwargs`
            has an argument that training sets itself.
    """

    model_name_or_path: str = field(default="", metadata={"help": "Causal language model: a hub id or a folder."})
    dataset_name: str = field(default="", metadata={"help": "Demonstrations: a hub id, a folder, or a data file."})
    chat_template_kwargs: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Further arguments of the chat template, such as {enable_thinking: false}, as YAML or JSON."},
    )
    completion_column: str = field(default="completion", metadata={"help": "Column of the text or the turns to learn."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chat_template_kwargs(self.chat_template_kwargs)


@dataclass(frozen=True)
class RewardModelArguments(_SupervisedArguments):
    """Which model learns from which preferences: rows of a prompt and the completions `chosen` and `rejected`.

    Raises:
        ValueError: when the model or the dataset is not named, or `max_length` leaves no room.
    """

    model_name_or_path: str = field(default="", metadata={"help": "Model to start from, most often the SFT model."})
    dataset_name: str = field(default="", metadata={"help": "Preferences: a hub id, a folder, or a data file."})
