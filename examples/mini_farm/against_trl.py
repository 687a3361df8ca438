"""Learning compared with TRL's `PPOTrainer`: `python -m examples.mini_farm.against_trl` adds a section to RESULTS.md.

Both programs train on the same models, with several seeds, as many prompts, answers and optimizer steps, and the same
optimizer. TRL does so twice: with its own defaults for what PPO is about (KL coefficient, clip ranges, weight of the
value loss), and with the preset's settings as far as TRL has them. TRL gets a virtual environment of its own and is no
dependency. A killed comparison goes on at the run that it was killed in. `--quick` takes minutes, with small models,
and writes no report.

Settings are to be tuned on other models and seeds than those of the report:

    python -m examples.mini_farm.against_trl --data_seed 1 --root outputs/tuning --seeds 11 12 13 \\
        --ppo_preset my.yaml --report outputs/tuning.md
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from alpaca_ppo.config.parser import parse_args, read_yaml
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.run_options import RunOptions
from examples import trl_virtualenv
from examples.mini_farm.compare import difference, standard_error
from examples.mini_farm.evaluation import Summary
from examples.mini_farm.overopt import WINDOW, over_optimised
from examples.mini_farm.pipeline import Lab, LabArguments
from examples.mini_farm.plots import GOLD, KL, PROXY, Metrics, gold_at, gold_within, plot_frontier, read_metrics
from examples.mini_farm.quickstart import describe, summaries_of
from examples.mini_farm.report import REPORT, SECTIONS, machine, write_section
from examples.mini_farm.stages import run_stage

OWN, TRL = "alpaca_ppo", f"TRL {trl_virtualenv.VERSION}"
RIVALS: Mapping[str, bool] = {f"{TRL}, its defaults": True, f"{TRL}, these settings": False}
"""What TRL is called with each kind of settings, and whether they are its defaults."""
STEPS, SECONDS = "ppo/policy/optimizer_steps", "time/step"
LEVELS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20)
"""Nats at which the gold scores of both programs are compared."""
QUICK: dict[str, Any] = {
    "sft_rows": 2000,
    "preference_rows": 600,
    "held_out_pairs": 100,
    "unlabeled_rows": 512,
    "val_rows": 64,
    "hidden_size": 96,
    "num_layers": 2,
    "best_of": 4,
    "ppo_episodes": 1280,
}
SAME = {
    "learning_rate",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "gamma",
    "lam",
    "cliprange",
    "vf_coef",
    "kl_coef",
    "kl_estimator",
    "temperature",
    "whiten_rewards",
    "total_episodes",
    "use_cpu",
}
"""Options that have the same name and meaning in TRL."""
TRL_DEFAULTS: Mapping[str, Any] = {
    "gamma": 1.0,
    "lam": 0.95,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "whiten_rewards": False,
    "missing_eos_penalty": None,
}
"""What TRL's `PPOConfig` has where its user gives nothing, of all that is neither the optimizer's nor sampling."""
TRL_ALWAYS: Mapping[str, Any] = {"kl_controller": "fixed", "critic_epochs": None}
"""What TRL does and has no option for."""
TRANSLATED = {
    "response_len",
    "ppo_epochs",
    "rollout_batch_size",
    "step_batch_size",
    "rollout_per_device_batch_size",
    "cliprange_value",
    "penalty_reward_value",
    "warmup_steps",
    "init_value_with_reward",
}
"""Options that `trl_settings` or `trl_run` translates."""
NO_MATTER = {"prompt_template", "query_len", "reward_weights", "step_per_device_batch_size"}
"""Options of the data, or that change no number; and so are those of the run (`RunOptions`)."""


@dataclass(frozen=True)
class AgainstTrlArguments:
    """The seeds, TRL's environment, and the report's file.

    Raises:
        ValueError: if a seed occurs twice, or there is none.
    """

    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5], metadata={"help": "Seeds of both programs."})
    quick: bool = field(default=False, metadata={"help": "Small models, two seeds; no report is written."})
    trl_environment: str = field(
        default=str(trl_virtualenv.FOLDER), metadata={"help": "TRL's virtual environment, made if it does not exist."}
    )
    report: str = field(default=str(REPORT), metadata={"help": "File to write."})

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {self.seeds}; give one or several different seeds")


@dataclass(frozen=True)
class Run:
    """One run of a program, with its answers to the held-out instructions."""

    summary: Summary
    metrics: Metrics


def own_options(lab: LabArguments) -> PPOConfig:
    """Returns the options that this package trains with."""
    given = read_yaml(lab.ppo_preset)
    if lab.ppo_episodes is not None:
        given["total_episodes"] = lab.ppo_episodes
    return PPOConfig(**{"output_dir": "none", **given})


def trl_settings(args: PPOConfig, *, prompts: int, seed: int, defaults: bool = False) -> dict[str, Any]:
    """Returns the arguments of TRL's `PPOConfig` for the same prompts, answers and optimizer steps as with `args`.

    TRL steps its optimizer where its gradient accumulation ends, whatever `num_mini_batches` says. With the whole
    rollout as one micro-batch there is none to add up, and TRL makes a step for each mini-batch.

    Args:
        args: this package's options.
        prompts: the number of prompts.
        seed: TRL's seed.
        defaults: whether `TRL_DEFAULTS` take the place of this package's settings.

    Raises:
        ValueError: when TRL could not be given as many prompts or answers.
    """
    rows, episodes = args.rollout_batch_size, args.total_episodes
    if args.num_return_sequences != 1:
        raise ValueError(
            f"num_return_sequences is {args.num_return_sequences}; TRL's PPOTrainer samples one answer to each prompt"
        )
    if episodes is None or episodes % rows or rows % args.step_batch_size:
        raise ValueError(
            f"total_episodes ({episodes}) must be a multiple of rollout_batch_size ({rows}), and that one of "
            f"step_batch_size ({args.step_batch_size}): TRL makes full rollouts and mini-batches only"
        )
    if prompts < rows:
        raise ValueError(f"{prompts} prompts are fewer than rollout_batch_size ({rows}), and TRL drops what is less")
    steps = args.ppo_epochs * rows // args.step_batch_size
    penalty = args.penalty_reward_value
    settings = {name: getattr(args, name) for name in sorted(SAME)} | {
        # TRL subtracts it from the score, which it does not replace.
        "missing_eos_penalty": None if penalty is None else -penalty,
        # TRL always clips.
        "cliprange_value": 1e6 if args.cliprange_value is None else args.cliprange_value,
    }
    if defaults:
        settings |= TRL_DEFAULTS
    sizes = trl_sizes(rollout=rows, step=args.step_batch_size, response_len=args.response_len)
    return {
        **settings,
        **sizes,
        "seed": seed,
        "num_ppo_epochs": args.ppo_epochs,
        # TRL's schedule counts rollouts.
        "warmup_steps": math.ceil(args.warmup_steps / steps),
    }


def trl_sizes(*, rollout: int, step: int, response_len: int) -> dict[str, Any]:
    """Returns the arguments of TRL's `PPOConfig` for optimizer steps of `step` of the `rollout` responses, in float32,
    with nothing saved.
    """
    return {
        "per_device_train_batch_size": rollout,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": rollout // step,
        "local_rollout_forward_batch_size": rollout,
        "response_length": response_len,
        "stop_token": "eos",
        "num_sample_generations": 0,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def trl_optimizer_steps(settings: Mapping[str, Any]) -> int:
    """Returns the optimizer steps that TRL makes with `settings`: one for each `gradient_accumulation_steps`
    micro-batches, which begin anew in each mini-batch.
    """
    micro, added = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    rollout, parts = micro * added, settings["num_mini_batches"]
    updates = math.ceil(settings["total_episodes"] / rollout)
    return updates * settings["num_ppo_epochs"] * parts * math.ceil(rollout // parts / micro) // added


def without_counterpart(args: PPOConfig) -> list[str]:
    """Returns the options of `args` that TRL does not have, but for those at their default or as TRL does it."""
    known = SAME | TRANSLATED | NO_MATTER | {option.name for option in fields(RunOptions)}
    names = [option.name for option in fields(args) if option.name not in known]
    default = {**asdict(PPOConfig(output_dir=args.output_dir)), **TRL_ALWAYS}
    changed = [name for name in names if getattr(args, name) != default[name]]
    return [f"{name}: {getattr(args, name)}" for name in changed]


def trl_run(lab: Lab, python: str, args: PPOConfig, *, seed: int, defaults: bool) -> Path:
    """Returns the folder of a run of TRL in the environment of `python`: metrics.jsonl and final/policy.

    Args:
        lab: the laboratory.
        python: the interpreter of TRL's environment.
        args: this package's options.
        seed: TRL's seed.
        defaults: as for `trl_settings`.
    """
    settings = trl_settings(args, prompts=lab.arguments.unlabeled_rows, seed=seed, defaults=defaults)
    here = Path(__file__)

    def fill(folder: Path) -> None:
        run = {
            "policy": lab.sft,
            "reward_model": lab.reward_model,
            "value_model": lab.reward_model if args.init_value_with_reward else lab.sft,
            "prompts": lab.data / "unlabeled.jsonl",
            "output_dir": folder,
        }
        given = {name: str(path.resolve()) for name, path in run.items()}
        launch_trl(python, "examples.mini_farm.trl_ppo", folder, {**given, "settings": settings})
        made = sum(row[STEPS] for row in read_metrics(folder))
        if made != trl_optimizer_steps(settings):
            raise RuntimeError(f"TRL made {made} optimizer steps instead of {trl_optimizer_steps(settings)}")

    return run_stage(
        lab.root / f"trl_{'defaults' if defaults else 'these_settings'}_seed_{seed}",
        f"TRL, {'its defaults' if defaults else 'these settings'}, seed {seed}",
        fill,
        settings={**settings, "trl": trl_virtualenv.VERSION, "value_model": args.init_value_with_reward},
        parents=[lab.data, lab.sft, lab.reward_model],
        sources=[here.with_name(f"{module}.py") for module in ("trl_ppo", "annotators", "lexicon")],
    )


def launch_trl(python: str, module: str, folder: Path, run: Mapping[str, Any]) -> None:
    """Runs `module` in the environment of `python`, with the name of a file in `folder` that holds `run`."""
    (folder / "run.json").write_text(json.dumps(run, indent=2), encoding="utf-8")
    root = Path(__file__).resolve().parents[2]
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        **os.environ,
        "PYTHONPATH": str(root),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [python, "-m", module, str((folder / "run.json").resolve())]
    subprocess.run(command, check=True, cwd=root, env=environment)


def table(own: Sequence[Run], trl: Sequence[Run]) -> str:
    """Returns the table of both programs: mean ± standard deviation over the runs, and the difference of the means."""
    lines = [f"| | {OWN} | TRL | difference |", "|---|---|---|---|"]

    def add(name: str, of_run: Callable[[Run], float | None], digits: int = 2) -> None:
        one, other = _known(of_run, own), _known(of_run, trl)
        if one and other:
            cells = (_spread(one, len(own), digits), _spread(other, len(trl), digits), difference(one, other, digits))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")

    add("gold score", lambda run: run.summary.gold)
    add("win-rate over SFT (%)", lambda run: 100 * run.summary.win_rate, digits=1)
    add("KL to SFT (nats)", lambda run: run.summary.kl)
    add("proxy reward", lambda run: run.summary.proxy)
    worst = [min(run.summary.gold for run in runs) for runs in (own, trl)]
    lines.append(f"| gold score of the worst seed | {worst[0]:.2f} | {worst[1]:.2f} | {worst[0] - worst[1]:+.2f} |")
    for level in LEVELS:
        add(f"gold score in training at {_nats(level)}", partial(_gold_at, level))
    for level in LEVELS:
        if all(_known(partial(_gold_at, level), runs) for runs in (own, trl)):
            add(f"highest up to {_nats(level)}", partial(_gold_within, level))
    over = [f"{sum(over_optimised(run.metrics) for run in runs)} of {len(runs)}" for runs in (own, trl)]
    lines.append(f"| over-optimised runs | {over[0]} | {over[1]} | |")
    add("optimizer steps", lambda run: sum(row[STEPS] for row in run.metrics), digits=0)
    add("seconds", lambda run: sum(row[SECONDS] for row in run.metrics), digits=0)
    return "\n".join(lines)


def table_of_runs(runs: Sequence[Run]) -> str:
    """Returns a table with a line for each run, its gold score in training at the end among them."""
    lines = [
        "| run | gold score | win-rate over SFT (%) | KL to SFT (nats) | in training: gold score, KL, proxy reward | |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        line, last = run.summary, run.metrics[-WINDOW:]
        end = ", ".join(f"{fmean(row[key] for row in last):.2f}" for key in (GOLD, KL, PROXY))
        lines.append(
            f"| {line.method} | {line.gold:.2f} ± {line.gold_error:.2f} | {100 * line.win_rate:.1f} | "
            f"{line.kl:.2f} | {end} | {'over-optimised' if over_optimised(run.metrics) else ''} |"
        )
    return "\n".join(lines)


def reading(own: Sequence[Run], trl: Sequence[Run]) -> str:
    """Returns what the table says about gold scores at equal KL, in words."""
    reached = [level for level in LEVELS if len(_known(partial(_gold_at, level), [*own, *trl])) == len(own) + len(trl)]
    if not reached:
        return f"Not every run reached a KL of {_nats(LEVELS[0])} in training, so there is none at which all compare."
    level = reached[-1]
    one, other = (_known(partial(_gold_at, level), runs) for runs in (own, trl))
    gap = fmean(one) - fmean(other)
    sentence = f"At {_nats(level)}, the largest of these KLs that every run reached, the gold score of {OWN} is "
    if len(one) < 2 or len(other) < 2:
        return sentence + f"{gap:+.2f} from TRL's; one seed has no standard error."
    clear = abs(gap) > 2 * standard_error(one, other)
    verdict = f"{'higher' if gap > 0 else 'lower'} than TRL's" if clear else "not clearly different from TRL's"
    return sentence + f"{verdict}: {difference(one, other)} (standard error of the difference of the means)."


def _conditions(args: PPOConfig, *, prompts: int, defaults: bool) -> str:
    """Returns what is equal and what is not, for TRL with its `defaults` or with the settings of `args`."""
    if not defaults:
        others = without_counterpart(args)
        return f"Options of the preset that TRL does not have: {', '.join(others) or 'none'}."
    same = {**trl_settings(args, prompts=prompts, seed=0), "cliprange_value": args.cliprange_value}
    others = [f"{name} {value} ({same[name]})" for name, value in TRL_DEFAULTS.items() if value != same[name]]
    return (
        f"TRL's defaults that differ from these settings (in brackets): {', '.join(others) or 'none'}. They were not "
        "tuned for this task, as those of this laboratory were, on other data and reward models."
    )


def _equal(args: PPOConfig, *, prompts: int) -> str:
    """Returns what is equal in any case, and what cannot be."""
    critic = "the reward model" if args.init_value_with_reward else "the supervised model, with a head of zeros"
    return (
        f"Equal: the supervised model as policy and reference, the start of the critic ({critic}), the reward model, "
        f"{args.total_episodes} prompts with one answer each from the same {prompts}, "
        f"{args.ppo_epochs} passes over rollouts of {args.rollout_batch_size} in optimizer steps of "
        f"{args.step_batch_size} answers, learning rate {args.learning_rate:g} ({args.lr_scheduler_type}), AdamW, "
        f"{args.response_len} tokens, temperature {args.temperature:g}. "
        "TRL reads the score at the eos, which this reward model has never seen; here it gets the score of the text, "
        "as this package does. TRL steps once for each gradient accumulation; here it gets the rollout as one "
        "micro-batch, and steps once for each mini-batch.\n\n"
        f"Not equal: TRL clips no gradients ({OWN} clips those of policy and critic at {args.max_grad_norm:g}), puts "
        "the score on the token after the eos, moves its schedule once for each rollout, and draws other random "
        "numbers. It drops the incomplete rollout at the end of a pass over the prompts, so the optimizer steps may "
        "differ by a few."
    )


def _nats(level: float) -> str:
    return f"{level:g} nat{'s' if level > 1 else ''}"


def _gold_at(kl: float, run: Run) -> float | None:
    return gold_at(run.metrics, kl)


def _gold_within(kl: float, run: Run) -> float:
    return gold_within(run.metrics, kl)


def _known(of_run: Callable[[Run], float | None], runs: Sequence[Run]) -> list[float]:
    return [number for run in runs if (number := of_run(run)) is not None]


def _spread(numbers: Sequence[float], runs: int, digits: int) -> str:
    error = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.{digits}f}{error}" + (f" ({len(numbers)} of {runs})" if len(numbers) < runs else "")


def main(argv: Sequence[str] | None = None) -> str:
    """Runs what is missing, writes the report's section and its figure, and returns the section's text."""
    arguments, lab_arguments = parse_args([AgainstTrlArguments, LabArguments], argv)
    seeds = arguments.seeds[:2] if arguments.quick else arguments.seeds
    if arguments.quick:
        lab_arguments = replace(lab_arguments, root=f"{lab_arguments.root}_quick", **QUICK)
    lab, args = Lab(lab_arguments), own_options(lab_arguments)
    prompts = lab_arguments.unlabeled_rows
    trl_settings(args, prompts=prompts, seed=0)
    python = trl_virtualenv.trl_python(Path(arguments.trl_environment))
    if python is None:
        sys.exit(1)
    folders: dict[str, Path] = {}
    for seed in seeds:
        # In turns, so that all meet a machine of the same speed.
        folders[f"{OWN}, seed {seed}"] = lab.ppo(f"ppo_seed_{seed}", seed=seed)
        for name, defaults in RIVALS.items():
            folders[f"{name}, seed {seed}"] = trl_run(lab, python, args, seed=seed, defaults=defaults)
    sft, best, *summaries = summaries_of(lab, folders)
    runs = [Run(line, read_metrics(folders[line.method])) for line in summaries]
    kinds = {name: runs[i :: 1 + len(RIVALS)] for i, name in enumerate((OWN, *RIVALS))}
    figure = lab.root / "against_trl.png"
    programs = {name: [run.metrics for run in of_kind] for name, of_kind in kinds.items()}
    plot_frontier(programs, [sft, best, *summaries], figure)
    comparisons = "\n\n".join(
        f"### {name}\n\n{table(kinds[OWN], kinds[name])}\n\n{reading(kinds[OWN], kinds[name])}\n\n"
        f"{_conditions(args, prompts=prompts, defaults=defaults)}"
        for name, defaults in RIVALS.items()
    )
    text = (
        f"Written by `make against-trl`: PPO by {OWN} and by {TRL}, seeds {', '.join(map(str, seeds))}; mean ± "
        "standard deviation over the seeds, differences ± their standard error. TRL's PPO is run with its defaults, "
        f"and with the settings that this laboratory was tuned to.\n\n{comparisons}\n\n### How it was measured\n\n"
        f"{_equal(args, prompts=prompts)}\n\n"
        "Gold score, win-rate, KL and proxy reward are those of one answer to each held-out instruction. A gold score "
        "in training is that of the answers sampled to train on, where the mean KL of 5 steps first reached so many "
        "nats; below it, the highest mean of 5 steps whose KL was no more. "
        f"Over-optimised: from the {WINDOW} steps of highest gold score to the last {WINDOW}, the proxy reward "
        "rose and the gold score fell by more than 4 standard errors. Seconds: rollouts, scoring and updates, on one "
        f"machine, whose speed varies.\n\n{table_of_runs([run for of_kind in kinds.values() for run in of_kind])}"
        f"\n\nMade on {machine()}."
    )
    print(f"\n{text}\n\n{describe(lab, [sft, best, *summaries])}\n\nFigure: {figure}")
    if not arguments.quick:
        write_section(Path(arguments.report), SECTIONS[4], text, figure)
        print(f"Written: {arguments.report}")
    return text


if __name__ == "__main__":
    main()
