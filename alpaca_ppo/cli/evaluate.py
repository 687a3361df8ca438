"""`alpaca-ppo evaluate`: the metrics of a trained model on held-out prompts, the same as in the trainer's evaluations.

On several processes: `accelerate launch -m alpaca_ppo.cli evaluate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpaca_ppo.config import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.fields import argument, options_of
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.evaluation.results import results_text
from alpaca_ppo.library_output import say_loading

# Options that act on training alone: groups, but for a few, and some of other groups.
_TRAINING_GROUPS = (
    *("Run and tracking", "Checkpoints", "Batch sizes and epochs", "Optimizer"),
    *("Advantages", "Policy loss", "KL to the reference policy", "Critic"),
)
_ACT_NEVERTHELESS = ("seed", "rollout_per_device_batch_size", "max_tokens_per_micro_batch")
_TRAINING_OPTIONS = ("whiten_rewards", "total_epochs", "total_episodes", "max_steps")


@dataclass(frozen=True)
class EvaluateArguments(ScriptArguments):
    """What `alpaca-ppo evaluate` loads, which may be the configuration of a training run."""

    model_name_or_path: str = argument("", group="Models, rewards and data")
    """Model that the run started from, to which the KL is measured unless `reference` names another."""
    dataset_name: str = ""
    """Dataset whose dataset_test_split is evaluated on, unless eval_dataset_name or eval_datasets is given."""
    model: str = argument("", group="Evaluate")
    """Model to evaluate: a folder or hub id, of an adapter too, or a run's folder (its final/policy); by default
    model_name_or_path, which model stands for in a file. One of them is required."""
    results_dir: str = "outputs/evaluation"
    """Folder for results.json, answers.jsonl and the tables."""
    overwrite: bool = False
    """Replace the results of an earlier evaluation in results_dir."""

    required = (("model", "model_name_or_path"),)
    # Those on which the evaluation of a given model depends.
    needed_objects = frozenset({
        "trainer_class", "eval_dataset", "reward_funcs", "metric_funcs", "reward_processing_classes",
        "metric_processing_classes", "ref_model", "reference", "tools", "environment_factory", "tool_call_parser",
    })  # fmt: skip


def evaluation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` of a run, by name, that act in an evaluation, with learning options that need no critic."""
    groups = {name: option.group for name, option in options_of(PPOConfig).items()}
    acting = {
        name: value
        for name, value in options.items()
        if name in _ACT_NEVERTHELESS or (groups[name] not in _TRAINING_GROUPS and name not in _TRAINING_OPTIONS)
    }
    return acting | {"adv_estimator": "reinforce_plus_plus", "kl_coef": 0.0, "report_to": ["none"]}


class _Acting(PPOConfig):
    """Keeps and checks only the options that act in an evaluation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**evaluation_options(options))


def evaluate(argv: Sequence[str]) -> int:
    """Evaluates, prints the metrics, and writes results.json and answers.jsonl."""
    script_args, _, args = parse_args([EvaluateArguments, LoraArguments, _Acting], argv, prog="alpaca-ppo evaluate")
    model = model_folder("model", script_args.model or script_args.model_name_or_path)
    folder = Path(script_args.results_dir)
    if (folder / "final").exists() or any(folder.glob("checkpoint-*")):
        raise ValueError(f"results_dir is {str(folder)!r}, the folder of a training run; choose another, or one in it")
    if (folder / "results.json").exists() and not script_args.overwrite:
        raise ValueError(f"results_dir is {str(folder)!r}, which holds results; choose another, or give --overwrite")
    args = PPOConfig(**evaluation_options(vars(args)), output_dir=str(folder))
    say_loading()
    from alpaca_ppo.trainer.from_arguments import evaluate_from_arguments

    results = evaluate_from_arguments(model, script_args, args)
    if results is not None:
        print(f"{results_text(results)}\nresults and answers are in {folder}")
    return 0
