"""`ScriptArguments` and `LoraArguments`: the models, rewards, data and adapters that the example scripts load."""

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.fields import argument, check_fields


@dataclass(frozen=True)
class ScriptArguments:
    """What `examples/train_ppo.py` loads: models, rewards and data.

    Raises:
        ValueError: when a required name is missing, a reward function is not written as module:function, or
            `eval_dataset_config` is set without a dataset.
    """

    model_name_or_path: str = argument(
        "", "Policy to train: a hub id or a folder. Required.", group="Models, rewards and data"
    )
    value_model_name_or_path: str | None = argument(
        None,
        "Critic to start from: the final/value folder of a run with the same critic_layout, or, with critic_layout "
        "separate, a sequence classifier with one label or a causal language model of any size with the policy's "
        "tokenizer; null = the policy.",
    )
    reward_model_name_or_path: list[str] | None = argument(None, "Reward models: sequence classifiers with one label.")
    reward_funcs: list[str] | None = argument(None, "Reward functions, as module:function or file.py:function.")
    dataset_name: str = argument(
        "", "Dataset of prompts: a hub id, a folder, or a jsonl, csv or parquet file. Required."
    )
    dataset_config: str | None = argument(None, "Configuration of a hub dataset.")
    dataset_train_split: str = argument("train", "Split to train on.")
    eval_dataset_name: str | None = argument(
        None, "Dataset of held-out prompts; null = dataset_test_split of dataset_name."
    )
    eval_dataset_config: str | None = argument(None, "Configuration of eval_dataset_name on the hub.")
    dataset_test_split: str | None = argument(
        None, "Split to evaluate on; null = no evaluation, or the only split of eval_dataset_name."
    )
    resume_from_checkpoint: str | None = argument(
        None,
        "Checkpoint folder to resume from, or true for the newest in output_dir; false, no, none or null = a new run.",
    )
    import_modules: list[str] | None = argument(
        None,
        "Python files or modules to import before the options are checked, for the estimators, losses, critics and "
        "backends that they register.",
    )

    def __post_init__(self) -> None:
        # YAML reads true, false and null as such, the command line and quotes as text.
        resume: Any = self.resume_from_checkpoint
        # Other types are refused below. Python may refuse to write a number as text: it has 4300 digits at most.
        word = str(resume).lower() if isinstance(resume, str | bool) else ""
        if word in ("true", "false", "no", "none", "null"):
            object.__setattr__(self, "resume_from_checkpoint", word if word == "true" else None)
        check_fields(self)
        for name in ("model_name_or_path", "dataset_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        for spec in self.reward_funcs or []:
            if not spec.rpartition(":")[0] or not spec.rpartition(":")[2].isidentifier():
                raise ValueError(
                    f"reward_funcs holds {spec!r}, which is not a function; write module:function or "
                    "file.py:function, and put models into reward_model_name_or_path"
                )
        if self.eval_dataset_config and not self.eval_dataset_name:
            raise ValueError(
                f"eval_dataset_config is {self.eval_dataset_config!r}, but eval_dataset_name is not set; set it, or "
                "use dataset_config, with which dataset_test_split is loaded"
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
        if not self.reward_model_name_or_path and not self.reward_funcs and not args.reward_adapter:
            raise ValueError(
                "there is no reward; give at least one of --reward_model_name_or_path, --reward_funcs and "
                "--reward_adapter"
            )
        _check_model_name("reference", None if args.reference in REFERENCES else args.reference)
        _check_model_name("reward_adapter", args.reward_adapter)
        for name in ("model_name_or_path", "value_model_name_or_path"):
            _check_model_name(name, getattr(self, name))
        for source in self.reward_model_name_or_path or []:
            _check_model_name("reward_model_name_or_path", source)


@dataclass(frozen=True)
class LoraArguments:
    """LoRA instead of full fine-tuning (arXiv:2106.09685), for train_ppo.py and train_reward_model.py.

    Raises:
        ValueError: for a value outside its range, or an option of LoRA without use_peft.
    """

    use_peft: bool = argument(False, "Freeze the base model and train LoRA adapters on it.", group="LoRA")
    lora_r: int = argument(16, "Rank of the adapters.", at_least=1)
    lora_alpha: int = argument(
        32, "Scale of the adapters: their output is multiplied by lora_alpha / lora_r.", at_least=1
    )
    lora_target_modules: list[str] | None = argument(None, "Layers that get adapters; null = every linear layer.")
    lora_modules_to_save: list[str] | None = argument(None, "Layers that are trained in full beside the adapters.")
    use_rslora: bool = argument(False, "Scale by lora_alpha / sqrt(lora_r) instead (arXiv:2312.03732).")
    use_dora: bool = argument(False, "Train magnitude and direction of the weights separately (arXiv:2402.09353).")

    def __post_init__(self) -> None:
        check_fields(self)
        for field in dataclasses.fields(self)[1:]:
            if not self.use_peft and (value := getattr(self, field.name)) != field.default:
                raise ValueError(
                    f"{field.name} is {value!r}, but use_peft is False; set use_peft: true, or leave {field.name} out"
                )

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
            target_modules=self.lora_target_modules or "all-linear",
            modules_to_save=self.lora_modules_to_save,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
        )


def _check_model_name(field: str, name: str | None) -> None:
    if name is not None and not os.path.isdir(name) and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ValueError(
            f"{field} is {name!r}, which is neither a folder (relative paths count from {Path.cwd()}) nor a hub id "
            "(name or owner/name)"
        )
