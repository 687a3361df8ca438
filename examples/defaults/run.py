"""One run of a task, as a process of its own, so that runs do not share threads or random states.

`python -m examples.defaults.run ROOT '{"task": "chain", "settings": {}, "data_seed": 0, "seed": 1}'`: the last line on
the screen is what came of it, as JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from alpaca_ppo.cli.commands import main as alpaca_ppo
from examples.defaults.tasks import TASKS, Task
from examples.games.train import main as play
from examples.long_horizon.pipeline import flags_of, metrics_of

EXPLAINED = "ppo/val/explained_variance"
MEASURING: Mapping[str, Any] = {
    "eval_temperature": 1.0,
    "num_logged_rollouts": 0,
    "num_inspected_prompts": 0,
    "report": False,
    "report_to": "none",
    "save_steps": 0,
    "use_cpu": True,
}
"""How all runs are measured, and what they do not write."""


def main(root: Path, *, task: str, settings: Mapping[str, Any], data_seed: int, seed: int) -> dict[str, Any]:
    """Trains, and returns the task's number before and after, the KL in nats per response, processor seconds, the curve
    of all evaluations as (responses, processor seconds, the task's number, the KL), and how much of the returns of new
    answers the critic explains, on average over the second half of the steps.
    """
    chosen = TASKS[task]
    given = chosen.prepare(root / task / f"data_{data_seed}", data_seed)
    # The trainer's timers count processor seconds, whatever else runs on the core.
    timers = mock.patch.object(time, "perf_counter", time.process_time)
    with timers, tempfile.TemporaryDirectory(dir=root) as output:
        options = {**MEASURING, **given, **chosen.options(settings), "seed": seed, "output_dir": output}
        if chosen.plays:
            play(flags_of(options))
        elif status := alpaca_ppo(["train", *flags_of(options)]):
            raise SystemExit(status)
        lines = metrics_of(Path(output))
    curve = _curve(chosen, lines)
    explained = [line[EXPLAINED] for line in lines if EXPLAINED in line]
    return {
        "before": round(chosen.in_points(lines[0][chosen.metric]), 3),
        "after": round(chosen.in_points(lines[-1][chosen.metric]), 3),
        "kl": round(lines[-1]["eval/kl_sum_seq"], 2),
        "processor_seconds": round(curve[-1][1], 1),
        "curve": curve,
        "explained_variance": round(fmean(explained[len(explained) // 2 :]), 3) if explained else None,
    }


def _curve(task: Task, lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float, float]]:
    """Returns the points of the evaluations, whose own time is left out."""
    spent, curve = 0.0, []
    for line in lines:
        spent += line.get("time/step", 0.0)
        if task.metric in line:
            responses = line["step"] * task.sizes["rollout_batch_size"]
            score, kl = round(task.in_points(line[task.metric]), 3), round(line["eval/kl_sum_seq"], 2)
            curve.append((responses, round(spent, 2), score, kl))
    return curve


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve(), **json.loads(sys.argv[2]))))
