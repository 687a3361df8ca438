"""`ScriptArguments` and its variants: the models, rewards and data that commands load; and `LoraArguments`."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.fields import CheckedArguments, argument, check_needs, when
from alpaca_ppo.config.names import check_model_name, check_url, is_server

RESERVE_GIB = 1.0
"""GiB of an accelerator's memory that tensors cannot use: CUDA context, kernel workspaces, fragmentation."""


@dataclass(frozen=True)
class ScriptArguments(CheckedArguments):
    """What `alpaca-ppo train` loads: models, rewards and data."""

    required: ClassVar[tuple[tuple[str, ...], ...]] = (("model_name_or_path",), ("dataset_name", "environments"))
    needed_objects: ClassVar[Collection[str] | None] = None
    """The arguments of `PPOTrainer` that the command needs from a run's own file (`check_run_files`); None = all."""

    model_name_or_path: str = argument("", group="Models, rewards and data")
    """Policy to train: a hub id or a folder. Required."""
    value_model_name_or_path: str | None = None
    """Critic to start from: final/value of a run with the same critic_layout, or, for a separate one, a sequence
    classifier with one label or a causal language model with the policy's tokenizer. null = the policy if separate;
    random weights if cached."""
    reward_model_name_or_path: list[str] | None = None
    """Reward models: sequence classifiers with one label."""
    reward_funcs: list[str] | None = None
    """Reward functions, as module:function or file.py:function."""
    reward_url: list[str] | None = None
    """Addresses of a reward server, together one reward source; the variable REWARD_API_KEY holds its key."""
    reward_url_timeout: float = argument(60.0, gt=0, le=86400, needs=when("reward_url"))
    """Seconds that a server may take for a request."""
    environments: list[str] | None = None
    """Environments that answer the policy: module:class or file.py:class; several as name=module:class, of which the
    dataset's column environment names one for each prompt."""
    tools: list[str] | None = None
    """Functions that the policy can call, as module:function or file.py:function."""
    tool_call_parser: str | None = argument(None, needs=when("environments") | when("tools"))
    """Function, as module:function or file.py:function, that finds the tool calls in a turn's text; null = calls in the
    tokenizer's format, or if it has none, JSON between <tool_call> tags."""
    dataset_name: str = ""
    """Prompts: a hub id, a folder, or a jsonl, csv or parquet file. Required, unless an environment makes them."""
    dataset_config: str | None = argument(None, needs=when("dataset_name"))
    """Configuration of a hub dataset."""
    dataset_train_split: str = argument("train", needs=when("dataset_name"))
    """Split to train on."""
    eval_dataset_name: str | None = None
    """Dataset of held-out prompts; null = dataset_test_split of dataset_name."""
    dataset_test_split: str | None = None
    """Split to evaluate on; null = no evaluation, or the only split of eval_dataset_name."""
    eval_datasets: list[str] | None = None
    """Several eval sets instead of one, each as set=dataset, set=dataset@split or set=dataset:config@split."""
    metric_funcs: list[str] | None = None
    """Functions, as in reward_funcs, and sequence classifiers that only measure the responses of evaluations."""
    resume_from_checkpoint: str | bool | None = None
    """Checkpoint folder to resume from, or true for the newest in output_dir; false, no, none or null = a new run."""
    import_modules: list[str] | None = None
    """Python files or modules to import first, for the estimators, losses, critics and backends that they register."""

    def __post_init__(self) -> None:
        if self.resume_from_checkpoint is False:
            object.__setattr__(self, "resume_from_checkpoint", None)
        super().__post_init__()
        for spec in self.reward_funcs or []:
            module, _, function = spec.rpartition(":")
            if not module or not function.isidentifier():
                problem = f"reward_funcs holds {spec!r}, which is not module:function or file.py:function"
                raise ValueError(f"{problem}; put models into reward_model_name_or_path")
        for url in self.reward_url or []:
            check_url("reward_url", url)
        if self.eval_datasets and (self.eval_dataset_name or self.dataset_test_split):
            also = f"eval_dataset_name ({self.eval_dataset_name!r}) or dataset_test_split ({self.dataset_test_split!r})"
            raise ValueError(f"eval_datasets is {self.eval_datasets}, but {also} is set; name all in eval_datasets")

    def check_before_loading(self, args: Any) -> None:
        """Checks that there is a reward, that the options of `args`, a `PPOConfig`, have an effect, and that each
        model's name is a folder or could be a hub id.
        """
        rewards = ("reward_model_name_or_path", "reward_funcs", "reward_url")
        # An environment may give a reward; that shows once it is loaded.
        others = (args.reward_adapter, args.teacher_model_name_or_path, self.environments)
        if not any(getattr(self, name) for name in rewards) and not any(others):
            flags = ", --".join((*rewards, "reward_adapter", "teacher_model_name_or_path"))
            raise ValueError(f"there is no reward; give at least one of --{flags}")
        check_needs(
            args,
            eval_set=bool(self.eval_dataset_name or self.eval_datasets or self.dataset_test_split),
            environments_or_tools=bool(self.environments or self.tools),
        )
        check_model_name("reference", None if args.reference in REFERENCES else args.reference)
        check_model_name("reward_adapter", args.reward_adapter)
        if not is_server(args.teacher_model_name_or_path):
            check_model_name("teacher_model_name_or_path", args.teacher_model_name_or_path)
        for name in ("model_name_or_path", "value_model_name_or_path"):
            check_model_name(name, getattr(self, name))
        for source in self.reward_model_name_or_path or []:
            check_model_name("reward_model_name_or_path", source)


@dataclass(frozen=True)
class ModelArguments(ScriptArguments):
    """`ScriptArguments` for commands that load the models only."""

    required = (("model_name_or_path",),)
    # Those on which a run's weights depend.
    needed_objects = frozenset({"model", "value_model", "peft_config"})


@dataclass(frozen=True)
class DeviceArguments(CheckedArguments):
    """For which device the memory of a run is estimated, and how the estimate is printed."""

    device_gib: float | None = argument(None, gt=RESERVE_GIB)
    """Memory of a device in GiB, of which 1 is reserved; the output then shows whether the run fits."""
    json: bool = False
    """Print JSON, in bytes, instead of a table."""


@dataclass(frozen=True)
class EstimateArguments(DeviceArguments, ModelArguments):
    """`ScriptArguments` for an estimate of memory, which reads the models and whether there are environments or tools;
    and the devices to estimate for.
    """

    num_processes: int = argument(1, ge=1)
    """Processes, one per device."""
    zero_stage: int = argument(0, ge=0, le=3)
    """DeepSpeed ZeRO stage, 1 to 3; 0 = none."""
    accelerate_config: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] | None = None
    """Launch configuration of `alpaca-ppo train`, in place of zero_stage."""


@dataclass(frozen=True)
class LoraArguments(CheckedArguments):
    """LoRA instead of full fine-tuning (arXiv:2106.09685), for `alpaca-ppo train`, `sft` and `reward`."""

    use_peft: bool = argument(False, group="LoRA")
    """Freeze the base model and train LoRA adapters on it."""
    lora_r: int = argument(16, ge=1, needs=when("use_peft"))
    """Rank of the adapters."""
    lora_alpha: int = argument(32, ge=1, needs=when("use_peft"))
    """The adapters' output is multiplied by lora_alpha / lora_r."""
    lora_target_modules: list[str] | None = argument(None, needs=when("use_peft"))
    """Layers that get adapters; null or all-linear = every linear layer but the output head."""

    def peft_config(self, task_type: str) -> Any:
        """The `peft.LoraConfig` for `task_type` (CAUSAL_LM or SEQ_CLS), without dropout; None without LoRA."""
        if not self.use_peft:
            return None
        # Imported only now, because it takes seconds.
        from peft import LoraConfig

        modules: Any = self.lora_target_modules
        # PEFT takes "all-linear" as a string only, not in a list.
        target = modules if modules and "all-linear" not in modules else "all-linear"
        return LoraConfig(task_type=task_type, r=self.lora_r, lora_alpha=self.lora_alpha, target_modules=target)


@dataclass(frozen=True)
class SupervisedLoraArguments(LoraArguments):
    """`LoraArguments`, and the precision of the frozen base, for `alpaca-ppo sft` and `reward`."""

    dtype: Literal["float32", "bfloat16"] = argument("float32", needs=when("use_peft"))
    """Data type of the frozen base; adapters and a score head stay in float32."""
    load_in_4bit: bool = argument(False, needs=when("use_peft"))
    """Load the frozen base in 4 bits; needs CUDA and bitsandbytes."""
