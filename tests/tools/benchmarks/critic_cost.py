"""What a critic costs on SmolLM2-135M's shape: processor time, peak memory and FLOPs of a step, relative to GRPO's on
as many answers with as many passes of the policy. TRL's GRPO and PPO stand beside them.

    python -m tests.tools.benchmarks.critic_cost --quick     # small sizes, a minute; nothing is written

Eight answers to each of four prompts of 40 tokens, 19 tokens each on average, without a reward model. The policy makes
one pass over each rollout, in one optimizer step, for every program. Each takes turns, step by step, with GRPO of this
package: more of such models at once would not fit into memory. It is the second half of `make bench`.
"""

import argparse
import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.trl_virtualenv import FOLDER, GRPO_FOLDER, GRPO_VERSION, trl_python
from tests.tools.benchmarks.programs import ROOT, Step, started, take_turns
from tests.tools.benchmarks.report import OWN, TRL, Machine, cpu, machine_facts, ratios, spread, write_between_markers
from tests.tools.benchmarks.workloads import QUICK, SMOLLM2, Workload

PAGE = ROOT / "examples/performance.md"
BEGIN = "<!-- tests.tools.benchmarks.critic_cost writes this -->"
WARM_UP = 2
TRL_GRPO = "trl_grpo_steps"
ANSWERS = 8
EIGHT: dict[str, Any] = {"num_return_sequences": ANSWERS, "ppo_epochs": 1, "step_batch_size": 32}
CACHED = {**EIGHT, "critic_layout": "cached", "critic_epochs": 8}
SEPARATE = {**EIGHT, "critic_layout": "separate", "critic_epochs": 4}
GRPO = {**EIGHT, "adv_estimator": "grpo", "critic_epochs": "auto"}
RECOMPUTE = {"old_policy": "recompute"}
"""What half precision does at every step; the default takes the sampler's log-probs where they agree."""
PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cached critic": (OWN, CACHED, {}),
    "cached critic, old log-probs recomputed for both": (OWN, CACHED, RECOMPUTE),
    "separate critic, 4 passes": (OWN, SEPARATE, {}),
    "TRL's GRPO, without a reference": (TRL_GRPO, EIGHT, {}),
    "TRL's PPO, with a prompt for each answer and a reward model": (TRL, {}, {}),
}
"""For each row its program, its options, and those of both programs."""


def row(name: str, made: list[Step], grpo: list[Step], counted: list[Step]) -> str:
    """The row of the table for the steps `made`, beside GRPO's in the same rounds; `counted` are a step of each whose
    FLOPs were counted.
    """
    memory = max(step.peak_bytes for step in made) / max(step.peak_bytes for step in grpo)
    flops = (counted[0].flops or 0) / (counted[1].flops or 1)
    seconds = spread([step.cpu for step in made], 1), spread([step.cpu for step in grpo], 1)
    return f"| {name} | {' | '.join(seconds)} | {spread(ratios(made, grpo, cpu))} | {memory:.2f} | {flops:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each program")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every program")
    for option, folder in (("--trl_environment", FOLDER), ("--trl_grpo_environment", GRPO_FOLDER)):
        parser.add_argument(option, type=Path, default=folder, help="made if it does not exist")
    args = parser.parse_args()
    trl, trl_grpo = trl_python(args.trl_environment), trl_python(args.trl_grpo_environment, GRPO_VERSION)
    pythons = {OWN: sys.executable, TRL: trl, TRL_GRPO: trl_grpo}
    shape = QUICK if args.quick else SMOLLM2
    base = Workload((12, 16, 20, 28), 32, (40,) * 4, **shape, step_batch_size=4, has_reward_model=False)
    # TRL's PPO has no groups: each answer comes with a prompt of its own.
    ungrouped = replace(
        base,
        lengths=base.lengths * ANSWERS,
        prompt_lengths=base.prompt_lengths * ANSWERS,
        ppo_epochs=1,
        step_batch_size=32,
    )
    sizes = {"rollout_per_device_batch_size": 32, "step_per_device_batch_size": 32}
    machine, lines, versions = Machine.begin(args.threads), [], defaultdict[str, set[str]](set)
    for name, (module, options, both) in PROGRAMS.items():
        python = pythons[module]
        if python is None:
            continue
        print(name, flush=True)
        workload = replace(ungrouped if module == TRL else base, settings={**sizes, **options, **both})
        pair = (module, python, workload), (OWN, sys.executable, replace(base, settings={**sizes, **GRPO, **both}))
        with started(pair, args.threads) as programs:
            made, grpo = take_turns(programs, args.rounds, warm_up=WARM_UP)
            counted = [program.step(count_flops=True) for program in programs]
            for package, version in (pair for program in programs for pair in program.versions.items()):
                versions[package].add(version)
        if counted[0].response_tokens != counted[1].response_tokens:
            raise RuntimeError(f"{name} sampled {counted[0].response_tokens} tokens, not {counted[1].response_tokens}")
        lines.append(row(name, made, grpo, counted))
    head = ["a step", "processor seconds", "of GRPO here", "ratio", "peak memory, ratio", "FLOPs, ratio"]
    text = f"""{machine_facts(machine.end(), {package: " and ".join(sorted(of)) for package, of in versions.items()})}

Eight answers, 19 tokens each on average, to each of 4 prompts of 40 tokens; one pass of the policy, in one optimizer
step; median, smallest and largest of {args.rounds} rounds.

| {" | ".join(head)} |
{"|---" * len(head)}|
"""
    text += "\n".join(lines) + "\n"
    print(text)
    if not args.quick:
        write_between_markers(PAGE, text, BEGIN)


if __name__ == "__main__":
    main()
