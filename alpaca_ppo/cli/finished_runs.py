"""`alpaca-ppo report` and `export`: the page about a run, and the models of its checkpoints."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from alpaca_ppo.config import LoraArguments, PPOConfig, parse_args
from alpaca_ppo.config.credentials import without_credentials
from alpaca_ppo.config.names import check_folder
from alpaca_ppo.config.script_arguments import ModelArguments
from alpaca_ppo.library_output import say_loading


def report(argv: Sequence[str]) -> int:
    """Writes the report of runs, or prints the doctor's findings."""
    description = "Writes the report of one or several runs: one HTML file that opens from disk."
    parser = argparse.ArgumentParser(prog="alpaca-ppo report", description=description)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the output_dir of a run; several are overlaid")
    add("--output", type=Path, help="the HTML file (default: report.html in the run, or, of several, in this folder)")
    add("--token_mb", type=float, default=20.0, help="megabytes of per-token numbers at most (default: %(default)s)")
    add("--check", action="store_true", help="write nothing; print the doctor's findings; 1 if one is an error")
    args = parser.parse_args(argv)
    from alpaca_ppo.report.page import write_report
    from alpaca_ppo.report.runs import read_runs

    runs = read_runs([check_folder("the run", name) for name in args.runs])
    if not args.check:
        default = (runs[0].path if len(runs) == 1 else Path.cwd()) / "report.html"
        path = write_report(runs, args.output or default, token_mb=args.token_mb)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
        return 0
    for run in runs:
        print(f"{run.path}: findings up to step {run.last_step}: {len(run.findings)}", *run.findings, sep="\n")
    return int(any(finding.severity == "error" for run in runs for finding in run.findings))


def export(argv: Sequence[str]) -> int:
    """Writes the models of a checkpoint, or of a run's newest one, as folders."""
    description = "Writes the models of a checkpoint into FOLDER, which then looks like a run's final."
    parser = argparse.ArgumentParser(prog="alpaca-ppo export", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", help="RUN/checkpoint-40, or RUN for its newest one")
    add("--to", required=True, metavar="FOLDER", help="a new folder, for the models")
    add("--merge", action="store_true", help="also write the model with its adapter merged in")
    add("--config", metavar="FILE", help="options of the run; default: run.yaml in the checkpoint's run")
    given, flags = parser.parse_known_args(argv)
    target = Path(given.to)
    start = check_folder("the checkpoint", given.checkpoint)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--to is {given.to!r}, which exists already; choose a new folder")
    names_run = not start.name.startswith("checkpoint-")
    run = start if names_run else start.parent
    options = ["--config", given.config or str(run / "run.yaml"), *flags]
    script, lora, args = parse_args([ModelArguments, LoraArguments, PPOConfig], options)
    say_loading()
    from alpaca_ppo.checkpoint.directory import newest_checkpoint
    from alpaca_ppo.checkpoint.export import save_final
    from alpaca_ppo.checkpoint.model_card import TrainedRun
    from alpaca_ppo.checkpoint.serialization import restore_models
    from alpaca_ppo.models import factory
    from alpaca_ppo.models.loading import load_processing_class
    from alpaca_ppo.tracking.results import WeightsStep

    checkpoint = newest_checkpoint(run) if names_run else start
    if checkpoint is None:
        raise ValueError(f"{run} holds no checkpoint-<step> folder; name a run that saved one (save_steps above 0)")
    rewards = [*(script.reward_model_name_or_path or []), *(script.reward_funcs or [])]
    # In half precision, merging would round away part of what the adapter adds to the weights.
    config = replace(args, dtype="float32", load_in_4bit=False) if given.merge else args
    actor_critic = factory.make_actor_critic(
        script.model_name_or_path, script.value_model_name_or_path, rewards, lora.peft_config("CAUSAL_LM"), config
    )
    restore_models(checkpoint, actor_critic)
    # Of a renamed folder, such as checkpoint-best, the step is not known.
    number = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    step = int(number[1]) if number else 0
    tokenizer = load_processing_class(script.model_name_or_path, trust_remote_code=args.trust_remote_code)
    options_of_run = without_credentials(asdict(factory.with_chosen_layout(args, actor_critic)))
    about = TrainedRun(run, WeightsStep(step, step), {}, options_of_run)
    save_final(target, actor_critic, tokenizer, about, merged=given.merge)
    print(f"wrote {', '.join(sorted(str(path) for path in target.iterdir()))} from {checkpoint}")
    return 0
