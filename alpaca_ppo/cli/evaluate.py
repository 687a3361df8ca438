"""`alpaca-ppo evaluate`: the metrics of a trained model on held-out prompts, without training.

It makes the evaluation of a trainer, with the options of the run's own configuration, so that both give the same
numbers. On several processes: `accelerate launch -m alpaca_ppo.cli evaluate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alpaca_ppo.config.fields import argument, options_of
from alpaca_ppo.config.names import check_model_name
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import MEASURED, LoraArguments, ScriptArguments
from alpaca_ppo.evaluation.results import results_text

_GROUPS = ("Evaluation", "Prompts", "Generation", "Rewards", "Devices and memory")
_OTHERS = "seed dtype reference load_in_4bit trust_remote_code rollout_per_device_batch_size".split()
_OF_CRITICS = ("whiten_rewards",)
_WITHOUT_TRAINING = {
    "num_return_sequences": 1,
    "report_to": ["none"],
    "adv_estimator": "reinforce_plus_plus",
    "kl_coef": 0.0,
}


@dataclass(frozen=True)
class EvaluateArguments(ScriptArguments):
    """What `alpaca-ppo evaluate` loads; a configuration of a training run is valid here too.

    Raises:
        ValueError: as `ScriptArguments`, and without a model.
    """

    model_name_or_path: str = argument(
        "",
        "Model that the run started from, to which the KL is measured unless `reference` names another.",
        group="Models, rewards and data",
    )
    dataset_name: str = argument(
        "", "Dataset whose dataset_test_split is evaluated on, unless eval_dataset_name or eval_datasets is given."
    )
    model: str = argument(
        "",
        "Model to evaluate: a folder or hub id, of an adapter too, or a run's folder (its final/policy). Required.",
        group="Evaluate",
    )
    results_dir: str = argument("outputs/evaluation", "Folder for results.json, answers.jsonl and the tables.")
    overwrite: bool = argument(False, "Replace the results of an earlier evaluation in results_dir.")

    required = ("model",)
    needed_objects = MEASURED


def evaluate(argv: Sequence[str]) -> int:
    """Evaluates, prints what came out, and writes results.json and answers.jsonl; returns the exit status.

    Raises:
        ValueError: as `model_folder`, and for a `results_dir` whose files must not be lost.
    """
    script_args, _, args = parse_args([EvaluateArguments, LoraArguments, PPOConfig], argv, prog="alpaca-ppo evaluate")
    model, folder = model_folder(script_args.model), Path(script_args.results_dir)
    if (folder / "final").exists() or any(folder.glob("checkpoint-*")):
        raise ValueError(f"results_dir is {str(folder)!r}, the folder of a training run; choose another, or one in it")
    if (folder / "results.json").exists() and not script_args.overwrite:
        raise ValueError(
            f"results_dir is {str(folder)!r}, which holds the results of an earlier evaluation; choose another folder, "
            "or replace them with --overwrite"
        )
    kept = {
        name: getattr(args, name)
        for name, option in options_of(PPOConfig).items()
        if (option.group in _GROUPS and name not in _OF_CRITICS) or name in _OTHERS
    }

    # The defaults of a run without a critic for what an evaluation does not read.
    args = PPOConfig(**{**kept, **_WITHOUT_TRAINING, "output_dir": str(folder)})
    # They import torch, for which `--help` and the errors of a configuration need not wait.
    from alpaca_ppo.trainer.from_arguments import evaluate_from_arguments

    results = evaluate_from_arguments(model, script_args, args)
    if results is not None:
        print(f"{results_text(results)}\nresults and answers are in {folder}")
    return 0


def model_folder(name: str) -> str:
    """Returns what to load for `name`: the final policy of a run's folder, anything else as it is.

    Raises:
        ValueError: as `check_model_name`; for a folder that holds no model, such as a checkpoint.
    """
    path = Path(name)
    check_model_name("model", name)
    if (path / "final" / "policy").is_dir():
        return str(path / "final" / "policy")
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise ValueError(
            f"model is {name!r}, a folder without a model or a run's final/policy; make FOLDER/policy of a checkpoint "
            f"with alpaca-ppo export {name} --to FOLDER"
        )
    return name
