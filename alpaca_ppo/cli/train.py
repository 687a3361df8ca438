"""`alpaca-ppo train`, which runs PPO on one process or several; and `alpaca-ppo sft` and `reward`, which precede it."""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from alpaca_ppo.cli.launch import LaunchArguments, launch, split_flags
from alpaca_ppo.config import TRAINING_ARGUMENTS, LoraArguments
from alpaca_ppo.config.parser import parse_options
from alpaca_ppo.config.run_file import PROVENANCE
from alpaca_ppo.config.supervised_arguments import RewardModelArguments, SFTArguments
from alpaca_ppo.library_output import say_loading

PROG = "alpaca-ppo train"
# The options that `--help` shows.
_COMMON = """
    num_processes model_name_or_path reward_model_name_or_path reward_funcs environments tools dataset_name
    eval_dataset_name resume_from_checkpoint use_peft output_dir report_to save_steps eval_steps query_len prompt_column
    max_steps total_epochs rollout_batch_size num_return_sequences step_batch_size step_per_device_batch_size ppo_epochs
    response_len temperature adv_estimator policy_loss cliprange kl_coef critic_layout learning_rate
    critic_learning_rate
""".split()


def train(argv: Sequence[str]) -> int:
    """Trains with PPO, in this process or in those that it starts."""
    launch_flags, rest = split_flags(argv)
    if {"--help", "-h", "--help-all", "--help_all"} & set(rest):
        # Prints the help and exits.
        parse_options([LaunchArguments, *TRAINING_ARGUMENTS], rest, prog=PROG, common=_COMMON)
    if launch_flags is None:
        run_training(rest)
        return 0
    # Errors of the options are reported here once, before processes start.
    script_args, _, args = parse_options(TRAINING_ARGUMENTS, rest, prog=PROG).instances
    script_args.check_before_loading(args)
    return launch(launch_flags, rest)


def sft(argv: Sequence[str]) -> int:
    """Fine-tunes a causal language model."""
    return _train_supervised(argv, "alpaca-ppo sft", SFTArguments, "sft:train_sft")


def reward(argv: Sequence[str]) -> int:
    """Trains a reward model on preference pairs."""
    return _train_supervised(argv, "alpaca-ppo reward", RewardModelArguments, "reward_model:train_reward_model")


def _train_supervised(argv: Sequence[str], prog: str, arguments: type, function: str) -> int:
    """Calls a function of `supervised`, named as module:function, with `argv`. If that asks for the help, prints it and
    exits, without importing transformers, which takes seconds.
    """
    if {"--help", "-h"} & set(argv):
        epilog = "Every field of transformers.TrainingArguments is an option too; --help-all describes them."
        parse_options([arguments, LoraArguments], ["--help"], prog=prog, epilog=epilog)
    say_loading()
    resolve_name(f"alpaca_ppo.supervised.{function}")(argv)
    return 0


def run_training(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains with the options in `argv` (default: the command line), and returns the last step's metrics."""
    parsed = parse_options(TRAINING_ARGUMENTS, argv, prog=PROG)
    script_args, lora, args = parsed.instances
    record = Path(args.output_dir).resolve() / "run.yaml"
    for name, content in parsed.config_files.items():
        # It may be the record of an earlier run, which is replaced.
        if Path(name).resolve() == record and PROVENANCE not in content:
            raise ValueError(f"--config {name} is where the run writes its record; rename it, or change output_dir")
    script_args.check_before_loading(args)
    say_loading()
    from alpaca_ppo.distributed.launcher import launcher_command
    from alpaca_ppo.tracking.run_record import RunRecord
    from alpaca_ppo.trainer.from_arguments import train_from_arguments

    return train_from_arguments(script_args, lora, args, RunRecord.of_command(parsed, launcher_command()))
