"""The speed of a PPO step against TRL and against the bare model compute: `make bench`, a quarter of an hour on two
idle cores; writes its tables into examples/performance.md. docs/performance.md repeats some rows, by hand.

    python -m tests.tools.benchmarks.step --quick      # two minutes: small sizes, nothing is written

The programs take turns, step by step: TRL's PPOTrainer in an environment of its own, the bare passes (with either of
two activations), and this package. Ratios of steps of the same round are the result, because a shared machine changes
its speed within minutes. FLOPs and processor time hardly depend on the load; seconds by the clock do.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from examples import trl_virtualenv
from tests.tools.benchmarks import report, workloads
from tests.tools.benchmarks.programs import ROOT, started, take_turns
from tests.tools.benchmarks.report import BARE, BARE_TORCH_GELU, OWN, TRL, Comparison, Growth, Machine

PAGE = ROOT / "examples/performance.md"
QUICK = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 2048}


def doublings() -> dict[str, workloads.Workload]:
    """A small realistic workload, and with one of its sizes doubled. Small, so that there is time for five rounds."""
    prompts, mean, sizes = 16, 16, {"num_hidden_layers": 2}
    base = workloads.realistic(prompts, mean, **sizes)
    return {
        "base": base,
        "prompts": workloads.realistic(2 * prompts, mean, **sizes),
        "response length": workloads.realistic(prompts, 2 * mean, **sizes),
        "vocabulary": replace(base, vocab_size=2 * base.vocab_size),
        "layers": replace(base, num_hidden_layers=2 * base.num_hidden_layers),
    }


def compare(
    workload: workloads.Workload, pythons: dict[str, str], *, rounds: int, threads: int, name: str
) -> Comparison:
    """All programs on one workload."""
    print(f"{name}: {report.describe(workload)}", flush=True)
    with started([(module, python, workload) for module, python in pythons.items()], threads) as programs:
        steps = take_turns(programs, rounds)
        counted = [program.step(count_flops=True) for program in programs]
        versions = {k: v for program in programs for k, v in program.versions.items()}
    for module, answer in zip(pythons, counted, strict=True):
        tokens = sum(workload.lengths)
        if answer.response_tokens != tokens:
            raise RuntimeError(f"{module} sampled {answer.response_tokens} tokens instead of {tokens}")
    return Comparison(
        name, workload, dict(zip(pythons, counted, strict=True)), dict(zip(pythons, steps, strict=True)), versions
    )


def grow(sizes: dict[str, workloads.Workload], module: str, python: str, *, rounds: int, threads: int) -> Growth:
    """One program on all `sizes`, the first of which is the measure of the others."""
    print(f"growth of {module}", flush=True)
    with started([(module, python, workload) for workload in sizes.values()], threads) as programs:
        steps = take_turns(programs, rounds)
    return Growth(module, next(iter(sizes.values())), dict(zip(sizes, steps, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds; nothing is written")
    parser.add_argument("--rounds", type=int, default=None, help="steps of each program; 7, with --quick 2")
    parser.add_argument("--without_growth", action="store_true", help="the two workloads only")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every program")
    parser.add_argument("--trl_environment", type=Path, default=trl_virtualenv.FOLDER, help="made if it does not exist")
    args = parser.parse_args()
    sizes = QUICK if args.quick else {}
    rounds = args.rounds or (2 if args.quick else 7)
    trl = trl_virtualenv.trl_python(args.trl_environment)
    pythons = ({} if trl is None else {TRL: trl}) | dict.fromkeys((BARE, BARE_TORCH_GELU, OWN), sys.executable)
    machine = Machine.begin(args.threads)
    comparisons = [
        compare(workload, pythons, rounds=rounds, threads=args.threads, name=name)
        for name, workload in (("realistic", workloads.realistic(**sizes)), ("fixed", workloads.fixed(**sizes)))
    ]
    growths = []
    if not (args.quick or args.without_growth):
        growths = [
            grow(doublings(), module, python, rounds=5, threads=args.threads)
            for module, python in pythons.items()
            if module != BARE_TORCH_GELU
        ]
    text = report.text(comparisons, growths, machine.end())
    print(text)
    if not args.quick:
        report.write_between_markers(PAGE, text)


if __name__ == "__main__":
    main()
