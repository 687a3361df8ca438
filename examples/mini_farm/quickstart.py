"""AlpacaFarm in miniature: `python -m examples.mini_farm.quickstart` runs all stages and prints the table.

A second run skips the stages whose settings and sources are unchanged. `--help` lists the sizes; `--root` changes the
folder.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alpaca_ppo.atomic_io import write_folder_atomically
from alpaca_ppo.config.parser import parse_args
from examples.mini_farm.evaluation import Summary, summarize, table
from examples.mini_farm.pipeline import Lab, LabArguments
from examples.mini_farm.plots import plot_run, read_metrics
from examples.mini_farm.splits import read_rows


@dataclass(frozen=True)
class QuickstartArguments:
    """The options of a run on the laboratory's models."""

    seed: int = field(default=1, metadata={"help": "Seed of PPO."})


def summaries_of(lab: Lab, runs: dict[str, Path]) -> list[Summary]:
    """Returns the lines of the table: supervised model, best-of-n, then each PPO run."""
    rows, sft = lab.held_out, read_rows(lab.sft_answers / "sft.jsonl")
    answers = {"SFT": sft, f"best-of-{lab.arguments.best_of}": read_rows(lab.sft_answers / "best_of_n.jsonl")}
    answers |= {name: read_rows(lab.ppo_answers(run) / "policy.jsonl") for name, run in runs.items()}
    return [summarize(method, given, sft, rows) for method, given in answers.items()]


def describe(lab: Lab, summaries: Sequence[Summary]) -> str:
    """Returns the table, with an explanation of its columns."""
    agreement = json.loads((lab.reward_model / "agreement.json").read_text())
    return (
        f"{table(summaries)}\n\n"
        f"{len(lab.held_out)} held-out instructions, one answer each, sampled at temperature 1.\n"
        "Proxy reward: the reward model's score. Gold score: the annotators' mean utility ± its standard error.\n"
        "Win-rate: share of their votes, ties count half. Gain / s.e.: mean gold gain over SFT in standard errors.\n"
        "KL of best-of-n: the upper bound log n - (n - 1) / n.\n"
        f"The reward model agrees with the gold score on {agreement['reward_model_agrees_with_gold']:.0%} of "
        f"{agreement['pairs']:.0f} held-out pairs, the noisy labels on {agreement['labels_agree_with_gold']:.0%}."
    )


def main(argv: Sequence[str] | None = None) -> list[Summary]:
    """Runs the missing stages, writes results.png and final/, prints the table, and returns its lines."""
    arguments, lab_arguments = parse_args([QuickstartArguments, LabArguments], argv)
    lab, start = Lab(lab_arguments), time.perf_counter()
    print(f"AlpacaFarm in miniature (folder: {lab.root})", flush=True)
    run = lab.ppo(f"ppo_seed_{arguments.seed}", seed=arguments.seed)
    summaries = summaries_of(lab, {"PPO": run})
    with write_folder_atomically(lab.root / "final") as final:
        shutil.copytree(run / "final", final, dirs_exist_ok=True)
    plot_run({"PPO": read_metrics(run)}, summaries, lab.root / "results.png")
    print(f"\nReport: {run / 'report.html'} (open it in a browser)")
    print(f"Figure: {lab.root / 'results.png'}")
    print(f"\n{describe(lab, summaries)}\n")
    print(f"Policy: {lab.root / 'final' / 'policy'}")
    print(f"Total time: {time.perf_counter() - start:.0f} s")
    return summaries


if __name__ == "__main__":
    main()
