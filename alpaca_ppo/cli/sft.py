"""`alpaca-ppo sft`: supervised fine-tuning of a causal language model."""

from collections.abc import Sequence

from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.supervised_arguments import SFTArguments

ALL = ("--help-all", "--help_all")
EPILOG = (
    "Every field of transformers.TrainingArguments is an option too, such as --output_dir, --learning_rate, "
    f"--num_train_epochs, --per_device_train_batch_size and --eval_strategy; {ALL[0]} describes them."
)


def main(argv: Sequence[str]) -> int:
    """Trains; returns the exit status."""
    if "--help" in argv or "-h" in argv:
        # Importing the others takes seconds.
        parse_args([SFTArguments], ["--help"], prog="alpaca-ppo sft", epilog=EPILOG)
    from alpaca_ppo.supervised.sft import train_sft

    train_sft(["--help" if word in ALL else word for word in argv])
    return 0
