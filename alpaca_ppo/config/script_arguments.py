"""What the example scripts load: models, rewards, data and adapters."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig

from alpaca_ppo.config.checks import REFERENCES, argument, check_types


@dataclass(frozen=True)
class ScriptArguments:
    """What `examples/train_ppo.py` loads: models, rewards and data.

    Raises:
        ValueError: when a required name is missing, a reward function's has not the form of one, or
            `eval_dataset_config` has no dataset.
    """

    model_name_or_path: str = argument("", "Policy to start from: a hub id or a folder.")
    value_model_name_or_path: str | None = argument(
        None, "Critic to start from (a sequence classifier with one label)."
    )
    reward_model_name_or_path: list[str] | None = argument(None, "Reward models (sequence classifiers with one label).")
    reward_funcs: list[str] | None = argument(None, "Reward functions, module:function or file.py:function.")
    dataset_name: str = argument("", "Prompts: a hub id, a folder, or a jsonl, csv or parquet file.")
    dataset_config: str | None = argument(None, "Configuration of a hub dataset.")
    dataset_train_split: str = argument("train", "Split to train on.")
    eval_dataset_name: str | None = argument(
        None, "Held-out prompts in a dataset of their own; else dataset_test_split of dataset_name."
    )
    eval_dataset_config: str | None = argument(None, "Configuration of eval_dataset_name on the hub.")
    dataset_test_split: str | None = argument(
        None, "Split to evaluate on; null = none, or the only one of eval_dataset_name."
    )
    resume_from_checkpoint: str | None = argument(None, "A checkpoint folder, or true for the newest of output_dir.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("model_name_or_path", "dataset_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        for spec in self.reward_funcs or []:
            if not spec.rpartition(":")[0] or not spec.rpartition(":")[2].isidentifier():
                raise ValueError(
                    f"reward_funcs holds {spec!r}, which names no function: write module:function or file.py:function; "
                    "a model goes to reward_model_name_or_path"
                )
        if self.eval_dataset_config and not self.eval_dataset_name:
            raise ValueError(
                f"eval_dataset_config is {self.eval_dataset_config!r} but eval_dataset_name is not set; name it, or "
                "leave the former out: dataset_test_split is read with dataset_config"
            )

    def check_names(self, args: Any) -> None:
        """Checks that there is a reward, and that each model's name is a folder, or may be a hub id; whether the hub
        has it shows on loading.

        Args:
            args: the run's `PPOConfig`, which names a reference and a reward adapter.

        Raises:
            ValueError: when there is no reward; else naming the field, its value and the folder that relative paths
                count from.
        """
        if not self.reward_model_name_or_path and not self.reward_funcs and not args.reward_adapter:
            raise ValueError(
                "no reward: give --reward_model_name_or_path, --reward_funcs module:function, --reward_adapter, or "
                "several of them"
            )
        _check_model_name("reference", None if args.reference in REFERENCES else args.reference)
        _check_model_name("reward_adapter", args.reward_adapter)
        for name in ("model_name_or_path", "value_model_name_or_path"):
            _check_model_name(name, getattr(self, name))
        for source in self.reward_model_name_or_path or []:
            _check_model_name("reward_model_name_or_path", source)


@dataclass(frozen=True)
class LoraArguments:
    """LoRA instead of training every weight (arXiv:2106.09685), for train_ppo.py and train_reward_model.py.

    Raises:
        ValueError: for a value out of range, or an option of LoRA without use_peft.
    """

    use_peft: bool = argument(False, "Freeze the base and train LoRA adapters on it.")
    lora_r: int = argument(16, "Rank of the adapters.")
    lora_alpha: int = argument(32, "Scale of the adapters, over the rank.")
    lora_target_modules: list[str] | None = argument(None, "Names of the layers; null = every linear layer.")
    lora_modules_to_save: list[str] | None = argument(None, "Layers that are trained whole, beside the adapters.")
    use_rslora: bool = argument(False, "Scale by the rank's square root (arXiv:2312.03732).")
    use_dora: bool = argument(False, "Train magnitudes apart from directions (arXiv:2402.09353).")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("lora_r", "lora_alpha"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for field in dataclasses.fields(self)[1:]:
            if not self.use_peft and (value := getattr(self, field.name)) != field.default:
                raise ValueError(f"{field.name} is {value!r} but use_peft is False; set use_peft, or leave it out")

    def peft_config(self, task_type: str) -> Any:
        """The `peft.LoraConfig` of these arguments for `task_type` (CAUSAL_LM or SEQ_CLS), or None without LoRA.

        Dropout is off, as everywhere in PPO.
        """
        if not self.use_peft:
            return None
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
    if name is not None and not Path(name).is_dir() and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ValueError(
            f"{field} is {name!r}, no folder (seen from {Path.cwd()}) and no hub id (name or owner/name); check it"
        )
