"""The speed of a PPO step against TRL and against the bare model compute: `make bench`, an hour on two idle cores;
writes its tables into examples/performance.md. docs/performance.md repeats some rows, by hand.

    python -m tests.tools.benchmarks.step --quick      # two minutes: small sizes, nothing is written

The models have SmolLM2-135M's width, depth and vocabulary. This package takes turns, step by step, with TRL's
PPOTrainer in an environment of its own, then with the bare passes: more of such models at once would not fit into
memory. Ratios of steps of the same round are the result, because a shared machine changes its speed within minutes.
FLOPs and processor time hardly depend on the load; seconds by the clock do.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from examples import trl_virtualenv
from tests.tools.benchmarks import report, workloads
from tests.tools.benchmarks.programs import ROOT, WARM_UP, Step, started, take_turns
from tests.tools.benchmarks.report import BARE, OWN, TRL, Comparison, Growth, Machine

PAGE = ROOT / "examples/performance.md"


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
    """This package and each of the other programs, in turns, on one workload."""
    print(f"{name}: {report.describe(workload)}", flush=True)
    steps: dict[str, list[Step]] = {}
    own: dict[str, list[Step]] = {}
    counted: dict[str, Step] = {}
    versions: dict[str, str] = {}
    for module, python in pythons.items():
        with started([(module, python, workload), (OWN, sys.executable, workload)], threads) as programs:
            # Only this package changes in its first steps.
            for _ in range(WARM_UP - 1):
                programs[1].step()
            steps[module], own[module] = take_turns(programs, rounds, warm_up=1)
            for program, counts in zip((module, OWN), programs, strict=True):
                counted[program] = counts.step(count_flops=True)
                versions |= counts.versions
    for module, answer in counted.items():
        if answer.response_tokens != sum(workload.lengths):
            raise RuntimeError(f"{module} sampled {answer.response_tokens} tokens, not {sum(workload.lengths)}")
    return Comparison(name, workload, counted, steps, own, versions)


def grow(sizes: dict[str, workloads.Workload], module: str, python: str, *, rounds: int, threads: int) -> Growth:
    """One program on all `sizes`, the first of which is the measure of the others."""
    print(f"growth of {module}", flush=True)
    with started([(module, python, workload) for workload in sizes.values()], threads) as programs:
        steps = take_turns(programs, rounds)
    return Growth(module, next(iter(sizes.values())), dict(zip(sizes, steps, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds; nothing is written")
    parser.add_argument("--rounds", type=int, default=None, help="steps of each program; 3, with --quick 2")
    parser.add_argument("--without_growth", action="store_true", help="the two workloads only")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every program")
    parser.add_argument("--trl_environment", type=Path, default=trl_virtualenv.FOLDER, help="made if it does not exist")
    args = parser.parse_args()
    sizes = workloads.QUICK if args.quick else workloads.SMOLLM2
    rounds = args.rounds or (2 if args.quick else 3)
    trl = trl_virtualenv.trl_python(args.trl_environment)
    pythons = ({} if trl is None else {TRL: trl}) | {BARE: sys.executable}
    machine = Machine.begin(args.threads)
    comparisons = [
        compare(workload, pythons, rounds=rounds, threads=args.threads, name=name)
        for name, workload in (
            ("realistic", workloads.realistic(16, **sizes)),
            ("fixed", workloads.fixed(16, 32, **sizes)),
        )
    ]
    growths = []
    if not (args.quick or args.without_growth):
        growths = [
            grow(doublings(), module, python, rounds=5, threads=args.threads)
            for module, python in [*pythons.items(), (OWN, sys.executable)]
        ]
    text = report.text(comparisons, growths, machine.end())
    print(text)
    if not args.quick:
        report.write_between_markers(PAGE, text)


if __name__ == "__main__":
    main()
