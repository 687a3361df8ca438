"""`alpaca-ppo presets`, `migrate` and `estimate-memory`, which are about configurations before a run."""

import argparse
import json
import re
from collections.abc import Sequence

from alpaca_ppo.config import TRAINING_ARGUMENTS, LoraArguments, PPOConfig
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.parser import parse_args, read_preset
from alpaca_ppo.config.script_arguments import DeviceArguments, EstimateArguments, SupervisedLoraArguments
from alpaca_ppo.config.supervised_arguments import RewardModelArguments, SFTArguments
from alpaca_ppo.library_output import say_loading
from alpaca_ppo.migrate import translate
from alpaca_ppo.presets import preset_names, preset_path


def presets(argv: Sequence[str]) -> int:
    """Prints the list of presets, or one with the defaults beside it."""
    parser = argparse.ArgumentParser(prog="alpaca-ppo presets", description="Options by name, for --preset NAME.")
    parser.add_argument("name", nargs="?", help="show this one, where it differs from the defaults; without: list all")
    if (name := parser.parse_args(argv).name) is not None:
        # Raises if there is no such preset.
        read_preset(name)
        options = {name: option for kind in TRAINING_ARGUMENTS for name, option in options_of(kind).items()}
        for line in preset_path(name).read_text(encoding="utf-8").splitlines():
            setting, _, reason = line.partition("  # ")
            option = options.get(setting.split(":")[0])
            print(f"{setting:<41} # default {json.dumps(option.default)}; {reason}" if option else line)
        return 0
    for name in preset_names():
        comment = " ".join(re.findall("^# +(.*)", preset_path(name).read_text(encoding="utf-8"), flags=re.MULTILINE))
        first_sentence = re.split(r"(?<=[.]) (?=[A-Z])", comment)[0]
        print(f"{name:<14}{first_sentence}")
    return 0


def migrate(argv: Sequence[str]) -> int:
    """Prints another trainer's configuration as options of this package."""
    description = "A TRL script, or a YAML file or command line of verl, as options of alpaca-ppo train."
    parser = argparse.ArgumentParser(prog="alpaca-ppo migrate", description=description, allow_abbrev=False)
    processes = "of the TRL run; it multiplies batch sizes (default: the file's, or 1)"
    parser.add_argument("--num_processes", type=int, default=0, help=processes)
    parser.add_argument("file", help="script.py, config.yaml or run.sh; or verl's overrides alone")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="TRL's flags, or verl's overrides (key=value)")
    given = parser.parse_args(argv)
    print(translate(given.file, given.arguments, processes=given.num_processes).as_yaml(), end="")
    return 0


def estimate_memory(argv: Sequence[str]) -> int:
    """Prints the estimated memory of a run of `train`, or, after their names, of `sft` or `reward`."""
    supervised = {"sft": SFTArguments, "reward": RewardModelArguments}
    prog = "alpaca-ppo estimate-memory"
    if argv and argv[0] in supervised:
        say_loading()
        from transformers import TrainingArguments

        types = [DeviceArguments, supervised[argv[0]], SupervisedLoraArguments, TrainingArguments]
        # Or transformers would refuse bf16 on a machine without a GPU, where nothing runs.
        given = parse_args(types, [*argv[1:], "--use_cpu"], prog=f"{prog} {argv[0]}")
        from alpaca_ppo.estimate_memory.supervised import estimate_training

        result = estimate_training(*given)
    else:
        given = parse_args([EstimateArguments, LoraArguments, PPOConfig], argv, prog=prog)
        say_loading()
        from alpaca_ppo.estimate_memory.estimator import estimate

        result = estimate(*given)
    from alpaca_ppo.estimate_memory.estimator import table

    print(json.dumps(result, indent=2) if given[0].json else table(result))
    return 0
