"""`ScriptArguments` and `LoraArguments`: the models, rewards, data and adapters that the example scripts load."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.fields import argument, check_fields, check_needs, when
from alpaca_ppo.config.foreign_names import ExplainsUnknownNames
from alpaca_ppo.config.model_names import check_model_name
from alpaca_ppo.config.urls import check_url

_ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class ScriptArguments(ExplainsUnknownNames):
    """What `alpaca-ppo train` loads: models, rewards and data.

    Raises:
        ValueError: when a required name is missing, a reward function is not written as module:function, an address
            cannot be one.
    """

    required: ClassVar[tuple[str, ...]] = ("model_name_or_path", "dataset_name")
    """The options that must be set; environments may make the prompts."""
    needed_objects: ClassVar[Collection[str] | None] = None
    """The arguments of `PPOTrainer` that the command needs of a run that was given objects; None = all."""

    model_name_or_path: str = argument(
        "", "Policy to train: a hub id or a folder. Required.", group="Models, rewards and data"
    )
    value_model_name_or_path: str | None = argument(
        None,
        "Critic to start from: final/value of a run with the same critic_layout, or, with separate, a sequence "
        "classifier with one label or a causal language model with the policy's tokenizer; null = the policy.",
    )
    reward_model_name_or_path: list[str] | None = argument(None, "Reward models: sequence classifiers with one label.")
    reward_funcs: list[str] | None = argument(None, "Reward functions, as module:function or file.py:function.")
    reward_url: list[str] | None = argument(
        None,
        "Addresses of a reward server, which are one reward source; the environment variable REWARD_API_KEY holds its "
        "key.",
    )
    reward_url_timeout: float = argument(
        60.0, "Seconds that a server may take for a request.", above=0, at_most=86400, needs=when("reward_url")
    )
    environments: list[str] | None = argument(
        None,
        "Environments that answer the policy: module:class or file.py:class; several as name=module:class, among "
        "which the dataset's column environment chooses.",
    )
    tools: list[str] | None = argument(
        None, "Functions that the policy can call, as module:function or file.py:function."
    )
    tool_call_parser: str | None = argument(
        None,
        "Function, as module:function or file.py:function, that finds the tool calls in a turn's text; null = the "
        "tokenizer's form, or else JSON between <tool_call> tags.",
        needs=when("environments or tools"),
    )
    dataset_name: str = argument(
        "", "Prompts: a hub id, a folder, or a jsonl, csv or parquet file. Required, unless an environment makes them."
    )
    dataset_config: str | None = argument(None, "Configuration of a hub dataset.", needs=when("dataset_name"))
    dataset_train_split: str = argument("train", "Split to train on.")
    eval_dataset_name: str | None = argument(
        None, "Dataset of held-out prompts; null = dataset_test_split of dataset_name."
    )
    dataset_test_split: str | None = argument(
        None, "Split to evaluate on; null = no evaluation, or the only split of eval_dataset_name."
    )
    eval_datasets: list[str] | None = argument(
        None, "Several eval sets instead of one, each as set=dataset, set=dataset@split or set=dataset:config@split."
    )
    metric_funcs: list[str] | None = argument(
        None, "Functions, as in reward_funcs, and sequence classifiers that only measure the responses of evaluations."
    )
    resume_from_checkpoint: str | bool | None = argument(
        None,
        "Checkpoint folder to resume from, or true for the newest in output_dir; false, no, none or null = a new run.",
    )
    import_modules: list[str] | None = argument(
        None,
        "Python files or modules to import first, for the estimators, losses, critics and backends that they register.",
    )

    def __post_init__(self) -> None:
        if self.resume_from_checkpoint is False:
            object.__setattr__(self, "resume_from_checkpoint", None)
        check_fields(self)
        check_needs(self, environments_or_tools=bool(self.environments or self.tools))
        for name in self.required:
            if not getattr(self, name) and not (name == "dataset_name" and self.environments):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        for spec in self.reward_funcs or []:
            if not spec.rpartition(":")[0] or not spec.rpartition(":")[2].isidentifier():
                raise ValueError(
                    f"reward_funcs holds {spec!r}, which is not a function; write module:function or "
                    "file.py:function, and put models into reward_model_name_or_path"
                )
        for url in self.reward_url or []:
            check_url("reward_url", url)
        if self.eval_datasets and (self.eval_dataset_name or self.dataset_test_split):
            raise ValueError(
                f"eval_datasets is {self.eval_datasets}, but eval_dataset_name ({self.eval_dataset_name!r}) or "
                f"dataset_test_split ({self.dataset_test_split!r}) is set too; name every eval set in eval_datasets"
            )

    def check_names(self, args: Any) -> None:
        """Checks that there is a reward, and that each model's name is a folder or could be a hub id. Whether the hub
        has the model shows when it is loaded.

        Args:
            args: the run's `PPOConfig`, for its reference and its reward adapter.

        Raises:
            ValueError: when there is no reward, or for a name that is neither; names the option, its value and the
                folder from which relative paths count.
        """
        # Whether an environment gives a reward shows once it is there.
        sources = (self.reward_model_name_or_path, self.reward_funcs, self.reward_url, args.reward_adapter)
        if not any((*sources, self.environments)):
            raise ValueError(
                "there is no reward; give at least one of --reward_model_name_or_path, --reward_funcs, --reward_url "
                "and --reward_adapter"
            )
        check_model_name("reference", None if args.reference in REFERENCES else args.reference)
        check_model_name("reward_adapter", args.reward_adapter)
        for name in ("model_name_or_path", "value_model_name_or_path"):
            check_model_name(name, getattr(self, name))
        for source in self.reward_model_name_or_path or []:
            check_model_name("reward_model_name_or_path", source)


@dataclass(frozen=True)
class LoraArguments(ExplainsUnknownNames):
    """LoRA instead of full fine-tuning (arXiv:2106.09685), for `alpaca-ppo train` and `alpaca-ppo reward`.

    Raises:
        ValueError: for a value outside its range, or an option of LoRA without use_peft.
    """

    use_peft: bool = argument(False, "Freeze the base model and train LoRA adapters on it.", group="LoRA")
    lora_r: int = argument(16, "Rank of the adapters.", at_least=1, needs=when("use_peft"))
    lora_alpha: int = argument(
        32, "The adapters' output is multiplied by lora_alpha / lora_r.", at_least=1, needs=when("use_peft")
    )
    lora_target_modules: list[str] | None = argument(
        None,
        "Layers that get adapters; null or all-linear = every linear layer but the output head.",
        needs=when("use_peft"),
    )

    def __post_init__(self) -> None:
        modules: Any = self.lora_target_modules
        # PEFT's word is a string of its own, not an entry of a list.
        if modules == _ALL_LINEAR:
            object.__setattr__(self, "lora_target_modules", [_ALL_LINEAR])
        check_fields(self)
        if _ALL_LINEAR in (named := self.lora_target_modules or []) and len(named) > 1:
            raise ValueError(
                f"lora_target_modules is {named}, but all-linear already stands for every linear layer; give it alone, "
                "or names of layers only"
            )
        check_needs(self)

    def peft_config(self, task_type: str) -> Any:
        """The `peft.LoraConfig` of these arguments for `task_type` (CAUSAL_LM or SEQ_CLS), or None without LoRA.

        Dropout is off, as everywhere in PPO.
        """
        if not self.use_peft:
            return None
        # Importing peft takes seconds, which `--help` and the errors of a configuration need not wait for.
        from peft import LoraConfig

        return LoraConfig(
            task_type=task_type,
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            target_modules=_ALL_LINEAR
            if self.lora_target_modules in (None, [_ALL_LINEAR])
            else self.lora_target_modules,
        )
