"""Starts the processes of `alpaca-ppo train` by Accelerate, with the launch configurations beside this file."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alpaca_ppo.cli.commands import MISTAKE
from alpaca_ppo.config.fields import argument, check_fields, options_of
from alpaca_ppo.config.names import did_you_mean
from alpaca_ppo.config.parser import flag_value, read_yaml
from alpaca_ppo.doctor.examination import ENDED_BY_ERROR
from alpaca_ppo.library_output import say_loading

_CONFIGS = {path.stem: path for path in sorted((Path(__file__).parent / "accelerate_configs").glob("*.yaml"))}


@dataclass(frozen=True)
class LaunchArguments:
    """The flags of `alpaca-ppo train` about processes; all but `accelerate_config` are flags of `accelerate launch`."""

    num_processes: int | None = argument(None, group="Processes", ge=1)
    """Processes, one for each GPU; on several nodes, all together. null = those of accelerate_config, or this alone."""
    accelerate_config: str | None = argument(
        None, f"A file of Accelerate, or one of {', '.join(_CONFIGS)}; null = ddp if num_processes is above 1."
    )
    num_machines: int | None = argument(None, "Nodes.")
    machine_rank: int | None = argument(None, "Which of the nodes this is, from 0.")
    main_process_ip: str | None = argument(None, "Address of the node of rank 0.")
    main_process_port: int | None = argument(None, "Port on the node of rank 0.")
    gpu_ids: str | None = argument(None, "GPUs to use on this node, such as 0,1; null = all.")


def split_flags(argv: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """The flags of `accelerate launch` that stand for the `LaunchArguments` in `argv` (None if the run needs no
    launcher), and the rest of `argv`.

    Raises:
        ValueError: for a value that its flag does not take, a configuration that does not exist, and in a process that
            a launcher has started already.
    """
    parser = argparse.ArgumentParser(prog="alpaca-ppo train", add_help=False, allow_abbrev=False)
    options = options_of(LaunchArguments)
    for name in options:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, nargs="?", const="")
    known, rest = parser.parse_known_args(argv)
    words = {name: [word] if word else [] for name, word in vars(known).items() if word is not None}
    read = {name: flag_value(options[name], value) for name, value in words.items()}
    given = {name: value for name, value in read.items() if value is not None}
    if not given:
        return None, rest
    if "WORLD_SIZE" in os.environ:
        raise ValueError(f"--{', --'.join(given)} starts processes, but a launcher has (WORLD_SIZE is set); drop it")
    check_fields(LaunchArguments(**given))
    if given == {"num_processes": 1}:
        return None, rest
    config = given.pop("accelerate_config", "ddp")
    if config not in _CONFIGS and not os.path.isfile(config):
        raise ValueError(
            f"--accelerate_config is {config!r}, neither a file nor one of {', '.join(_CONFIGS)};"
            f"{did_you_mean(config, _CONFIGS)} check the path"
        )
    file = str(_CONFIGS.get(config, config))
    content = read_yaml(file, option="--accelerate_config")
    flags = ["--config_file", file]
    for flag, value in given.items():
        flags += [f"--{flag}", str(value)]
    deepspeed_file = (content.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if deepspeed_file and not os.path.isfile(deepspeed_file):
        # The configurations here name it by its path in a clone of the repository.
        packaged = Path(__file__).parent / "deepspeed_configs" / Path(deepspeed_file).name
        if packaged.is_file():
            flags += ["--deepspeed_config_file", str(packaged)]
    settings = {**content, **given}
    needs_port = settings.get("main_process_port") is None and settings.get("num_machines", 1) == 1
    if needs_port and content.get("distributed_type") != "NO":
        # 0 is any free port, because another run on this machine may have Accelerate's default.
        flags += ["--main_process_port", "0"]
    return flags, rest


def launch(flags: Sequence[str], words: Sequence[str]) -> int:
    """Runs `alpaca-ppo train` with `words` in the processes that Accelerate starts for `flags`.

    Returns the exit status of the process that failed first, or 0. Prints that process's rank if there are several,
    unless it has reported the error itself or was interrupted.
    """
    say_loading()
    import logging
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # This logger would report each failure twice more.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args([*flags, "--module", "alpaca_ppo.cli", "train", *words]))
        return 0
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        status = failure.exitcode
        if status not in (MISTAKE, ENDED_BY_ERROR, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            end = f"was ended by {failure.signal_name()}" if status < 0 else f"ended with exit status {status}"
            print(f"error: rank {rank} {end}", file=sys.stderr)
    except CalledProcessError as failed:
        status = failed.returncode
    except SignalException as stopped:
        status = -int(stopped.sigval)
    # As in a shell: 128 plus the signal that ended a process, which Python negates.
    return status if status > 0 else 128 - status
