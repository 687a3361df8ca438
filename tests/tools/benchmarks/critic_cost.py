"""What a critic costs on SmolLM2-135M's shape: processor time and peak memory of a step, relative to GRPO's on as many
answers with as many passes of the policy.

    python -m tests.tools.benchmarks.critic_cost [--rounds 3] [--without_separate]     # ten minutes on one core

Eight answers to each of four prompts of 40 tokens, 19 tokens each on average, without a reward model. The policy makes
one pass over each rollout, in one optimizer step, for every program. `auto` takes the sampler's log-probs where it can,
`recompute` never does, as in half precision.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

from tests.tools.benchmarks.programs import Step, started, take_turns
from tests.tools.benchmarks.report import cpu, ratios, spread
from tests.tools.benchmarks.workloads import Workload

WARM_UP = 2
SHAPE = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30}
EIGHT: dict[str, Any] = {"num_return_sequences": 8, "ppo_epochs": 1, "step_batch_size": 32}
CACHED = {**EIGHT, "critic_layout": "cached", "critic_epochs": 8}
GRPO = {**EIGHT, "adv_estimator": "grpo", "critic_epochs": "auto"}
PROGRAMS = {
    "GRPO, auto": GRPO,
    "cached critic, auto": CACHED,
    "GRPO, recompute": {**GRPO, "old_policy": "recompute"},
    "cached critic, recompute": {**CACHED, "old_policy": "recompute"},
    "separate critic, 4 passes": {**EIGHT, "critic_layout": "separate", "critic_epochs": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each program")
    parser.add_argument("--without_separate", action="store_true", help="GRPO and the cached critic alone")
    args = parser.parse_args()
    base = Workload((12, 16, 20, 28), 32, (40,) * 4, **SHAPE, step_batch_size=4, has_reward_model=False)
    settings = {"rollout_per_device_batch_size": 32, "step_per_device_batch_size": 32}
    chosen = {k: v for k, v in PROGRAMS.items() if not (args.without_separate and k.startswith("separate"))}
    workloads = [replace(base, settings={**settings, **options}) for options in chosen.values()]
    with started([("own_steps", sys.executable, workload) for workload in workloads], threads=1) as programs:
        found = take_turns(programs, args.rounds, warm_up=WARM_UP)
    steps: dict[str, list[Step]] = dict(zip(chosen, found, strict=True))
    print("| | processor seconds | of GRPO's with the same log-probs | peak memory of GRPO's |\n|---|---|---|---|")
    for name, made in steps.items():
        other = steps["GRPO, recompute" if name.endswith("recompute") else "GRPO, auto"]
        memory = max(step.peak_bytes for step in made) / max(step.peak_bytes for step in other)
        print(
            f"| {name} | {spread([step.cpu for step in made], 1)} | {spread(ratios(made, other, cpu))} | {memory:.2f} |"
        )


if __name__ == "__main__":
    main()
