"""`alpaca-ppo export`: the models of a checkpoint, or of a run's newest, as folders for `from_pretrained`."""

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from alpaca_ppo.config.model_names import check_folder
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.run_file import MODELS
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

_DESCRIPTION = (
    "Writes the models of a checkpoint as a run writes its last ones into final: FOLDER/policy (an adapter, if one was "
    "trained), FOLDER/value and, with --merge, FOLDER/merged."
)


@dataclass(frozen=True)
class ExportArguments(ScriptArguments):
    """`ScriptArguments`, of which only the models are used."""

    @classmethod
    def needed_objects(cls) -> Collection[str]:
        """The arguments of `PPOTrainer` that it needs of a run."""
        return MODELS

    def required_names(self) -> tuple[str, ...]:
        """The options that must be set."""
        return ("model_name_or_path",)


def main(argv: Sequence[str]) -> int:
    """Exports one checkpoint; returns the exit status.

    Raises:
        ValueError: when the run or the checkpoint is not there or incomplete, or the target exists.
    """
    parser = argparse.ArgumentParser(prog="alpaca-ppo export", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("checkpoint", help="RUN/checkpoint-40, or RUN for its newest one")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="a new folder, for the models")
    parser.add_argument("--merge", action="store_true", help="also write the model with its adapter merged in")
    parser.add_argument(
        "--config", metavar="FILE", help="options of the run; default: run.yaml in the checkpoint's run"
    )
    given, flags = parser.parse_known_args(argv)
    target, start = Path(given.to), Path(given.checkpoint)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--to is {given.to!r}, which exists already; choose a new folder")
    check_folder("the checkpoint", given.checkpoint)
    run = start.parent if start.name.startswith("checkpoint-") else start
    script, lora, args = parse_args(
        [ExportArguments, LoraArguments, PPOConfig], ["--config", given.config or str(run / "run.yaml"), *flags]
    )
    # They import torch, for which `--help` need not wait.
    from dataclasses import asdict, replace

    from alpaca_ppo.checkpoint.directory import newest_checkpoint
    from alpaca_ppo.checkpoint.export import save_final
    from alpaca_ppo.checkpoint.model_card import TrainedRun
    from alpaca_ppo.checkpoint.serialization import restore_models
    from alpaca_ppo.config.credentials import without_credentials
    from alpaca_ppo.models import factory
    from alpaca_ppo.models.loading import load_processing_class
    from alpaca_ppo.tracking.weights_step import WeightsStep

    checkpoint = newest_checkpoint(run) if start == run else start
    if checkpoint is None:
        raise ValueError(f"{run} holds no checkpoint-<step> folder; name a run that saved one (save_steps above 0)")
    actor_critic = factory.make_actor_critic(
        script.model_name_or_path,
        script.value_model_name_or_path,
        [*(script.reward_model_name_or_path or []), *(script.reward_funcs or [])],
        lora.peft_config("CAUSAL_LM"),
        # Half precision would round away what the adapter adds to its weights.
        replace(args, dtype="float32", load_in_4bit=False) if given.merge else args,
    )
    restore_models(checkpoint, actor_critic)
    # Of a folder that the user renamed, the step is not known.
    step = int(re.sub(r"\D", "", checkpoint.name) or 0)
    save_final(
        target,
        actor_critic,
        load_processing_class(script.model_name_or_path, trust_remote_code=args.trust_remote_code),
        TrainedRun(WeightsStep(step, step), {}, without_credentials(asdict(args))),
        merged=given.merge,
    )
    print(f"wrote {', '.join(sorted(str(path) for path in target.iterdir()))} from {checkpoint}")
    return 0
