"""`SFTArguments` and `RewardModelArguments`: models and data of supervised fine-tuning and of reward modelling."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import JsonValue

from alpaca_ppo.config.fields import CheckedArguments, argument, unless
from alpaca_ppo.config.foreign_names import check_keywords


@dataclass(frozen=True)
class SupervisedArguments(CheckedArguments):
    """What both commands load."""

    dataset_config: str | None = None
    """Configuration of a hub dataset."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str | None = None
    """Split for --eval_strategy."""
    prompt_column: str = "prompt"
    """Column of the prompt: text or messages."""
    prompt_template: str | None = None
    """Named template or format string instead, for plain text without the chat template."""
    user_template: str | None = argument(None, needs=unless("prompt_template"))
    """Format string instead, for a user message."""
    system_prompt: str | None = argument(None, needs=unless("prompt_template"))
    """System message before the user's, unless the row has one."""
    max_length: int = argument(1024, ge=2)
    """Tokens of prompt and completion; longer rows are dropped."""
    model_name_or_path: str = ""
    """Model to start from: a hub id or a folder. For a reward model, most often the SFT model."""
    dataset_name: str = ""
    """Demonstrations, or for a reward model preferences: a hub id, a folder, or a data file."""

    required = (("model_name_or_path",), ("dataset_name",))


@dataclass(frozen=True)
class SFTArguments(SupervisedArguments):
    """Model and demonstrations of `alpaca-ppo sft`."""

    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Further arguments of the chat template, such as {enable_thinking: false}, as YAML or JSON."""
    completion_column: str = "completion"
    """Column of what to learn: text, messages or turns; without it, whole conversations in messages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keywords("chat_template_kwargs", self.chat_template_kwargs)


@dataclass(frozen=True)
class RewardModelArguments(SupervisedArguments):
    """Model and preferences of `alpaca-ppo reward`: rows with a prompt and the completions `chosen` and `rejected`, or
    with these as whole conversations.
    """

    chat_template_kwargs: ClassVar[None] = None
    """Not an option: reward models use their chat template without arguments."""
