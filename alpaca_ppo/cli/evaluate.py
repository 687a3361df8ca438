"""`alpaca-ppo evaluate`: the metrics of a trained model on held-out prompts, without training.

It makes the evaluation of a trainer, with the options of the run's own configuration, so that both give the same
numbers. On several processes: `accelerate launch -m alpaca_ppo.cli.evaluate`.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpaca_ppo.cli.train import search_current_folder
from alpaca_ppo.config.fields import argument, options_of
from alpaca_ppo.config.model_names import check_model_name
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.run_file import MEASURED
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments
from alpaca_ppo.evaluation.results import results_text

_GROUPS = ("Evaluation", "Prompts", "Generation", "Rewards", "Devices and memory")
_OTHERS = "seed dtype load_in_4bit trust_remote_code rollout_per_device_batch_size".split()
_OF_CRITICS = ("whiten_rewards",)
PROG = "alpaca-ppo evaluate"


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

    @classmethod
    def needed_objects(cls) -> Collection[str]:
        """The arguments of `PPOTrainer` that it needs of a run."""
        return MEASURED

    def required_names(self) -> tuple[str, ...]:
        """The options that must be set."""
        return ("model",)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates, prints what came out, and writes results.json and answers.jsonl; returns the exit status."""
    search_current_folder()
    words = list(sys.argv[1:] if argv is None else argv)
    script_args, _, args = parse_args([EvaluateArguments, LoraArguments, PPOConfig], words, prog=PROG)
    check_flags(words)
    model = model_folder(script_args.model)
    check_results_dir(script_args)
    # They import torch, for which `--help` and the errors of a configuration need not wait.
    from alpaca_ppo.trainer.evaluate_alone import evaluate_alone

    results = evaluate_alone(model, script_args, lambda **changes: evaluation_config(args, script_args, **changes))
    if results is not None:
        print(results_text(results))
        print(f"results and answers are in {script_args.results_dir}")
    return 0


def model_folder(name: str) -> str:
    """Returns what to load for `name`: the final policy of a run's folder, anything else as it is.

    Raises:
        ValueError: for a checkpoint, which holds more than a model.
    """
    path = Path(name)
    check_model_name("model", name)
    if (path / "final" / "policy").is_dir():
        return str(path / "final" / "policy")
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise ValueError(
            f"model is {name!r}, a folder with neither config.json, adapter_config.json nor final/policy; a checkpoint "
            f"is made into a model, FOLDER/policy, by alpaca-ppo export {name} --to FOLDER"
        )
    return name


def check_flags(words: Sequence[str]) -> None:
    """Checks that `words`, the command line, does not say where results go by the option that a run has for it. In a
    configuration it is the run's folder, and ignored.

    Raises:
        ValueError: for output_dir as a flag.
    """
    given = [word.partition("=")[0].replace("-", "_") for word in words]
    if "__output_dir" in given:
        raise ValueError(f"output_dir is the folder of a training run, which {PROG} ignores; give --results_dir")


def check_results_dir(script_args: EvaluateArguments) -> None:
    """Checks that no earlier results are lost.

    Raises:
        ValueError: if `results_dir` is the folder of a run, or holds results that are not to be overwritten.
    """
    folder = Path(script_args.results_dir)
    if (folder / "final").exists() or any(folder.glob("checkpoint-*")):
        raise ValueError(
            f"results_dir is {str(folder)!r}, the folder of a training run, whose tables would be replaced; choose "
            "another, such as a new folder in it"
        )
    if (folder / "results.json").exists() and not script_args.overwrite:
        raise ValueError(
            f"results_dir is {str(folder)!r}, which holds the results of an earlier evaluation; choose another folder, "
            "or replace them with --overwrite"
        )


def evaluation_config(args: PPOConfig, script_args: EvaluateArguments, **changes: Any) -> PPOConfig:
    """Returns `args` with what an evaluation reads of them, and the defaults of a run without a critic for the rest.

    Args:
        args: as given, of a training run for example.
        script_args: the results folder.
        changes: further options.
    """
    kept = {
        name: getattr(args, name)
        for name, option in options_of(PPOConfig).items()
        if (option.group in _GROUPS and name not in _OF_CRITICS) or name in _OTHERS
    }
    given: dict[str, Any] = {
        **kept,
        "num_return_sequences": 1,
        "output_dir": script_args.results_dir,
        "report_to": ["none"],
        "adv_estimator": "reinforce_plus_plus",
        "kl_coef": 0.0,
        **changes,
    }
    return PPOConfig(**given)


if __name__ == "__main__":
    sys.exit(main())
