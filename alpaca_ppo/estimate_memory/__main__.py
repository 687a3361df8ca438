"""The command `python -m alpaca_ppo.estimate_memory`: flags in, a table or JSON out."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.estimate_memory.estimator import GIB, EstimateArguments, plan
from alpaca_ppo.estimate_memory.phases import CAUSES


def table(result: dict[str, Any]) -> str:
    """`plan`'s result as text, in GiB."""
    heads = [cause.replace("kv_cache", "KV cache") for cause in CAUSES]
    lines = [f"{result['model']}: the most on one device in each phase of a PPO step, in GiB", ""]
    lines.append(f"{'phase':<15}" + "".join(f"{head:>13}" for head in (*heads, "total")))
    for phase in result["phases"]:
        numbers = "".join(f"{phase[cause] / GIB:>13.2f}" for cause in (*CAUSES, "total"))
        lines.append(f"{phase['phase']:<15}{numbers}")
    lines += ["", f"peak: {result['peak'] / GIB:.2f} GiB ({result['peak_phase']})"]
    if "peak_by_zero_stage" in result:
        peaks = [f"{value / GIB:.2f} ({f'ZeRO {s}' if s != '0' else 'DDP'})" for s, value in _stages(result)]
        lines.append(f"on {result['processes']} processes: {', '.join(peaks)}")
    if "offloaded" in result:
        lines.append(f"in host memory: {result['offloaded'] / GIB:.2f} GiB of each process, beside that")
    return "\n".join([*lines, *_verdict(result)])


def _stages(result: dict[str, Any]) -> list[tuple[str, float]]:
    return list(result["peak_by_zero_stage"].items())


def _verdict(result: dict[str, Any]) -> list[str]:
    if "fits" not in result:
        return []
    room = f"{result['limit'] / GIB:.2f} of {result['device_gib']:g} GiB are for tensors"
    if result["fits"]:
        return [f"fits: {room}"]
    if result["advice"] is None:
        return [f"does not fit: {room}; no change of settings that the plan knows is enough, use a smaller model"]
    advice = result["advice"]
    what = "cheapest change that fits" if len(advice["changes"]) == 1 else "cheapest changes that fit, together"
    saved = f"saves {advice['saves'] / GIB:.2f} GiB, peak {advice['peak'] / GIB:.2f}"
    return [f"does not fit: {room}", f"{what}: {'; '.join(advice['changes'])} ({saved})"]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the plan of the command line `argv`."""
    script, lora, args = parse_args([EstimateArguments, LoraArguments, PPOConfig], argv)
    result = plan(script, lora, args)
    print(json.dumps(result, indent=2) if script.json else table(result))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
