"""An estimate as text."""

from typing import Any

from alpaca_ppo.estimate_memory.estimator import GIB
from alpaca_ppo.estimate_memory.phases import CAUSES


def table(result: dict[str, Any]) -> str:
    """The result of `estimate` as text, in GiB."""
    heads = [cause.replace("kv_cache", "KV cache") for cause in CAUSES]
    lines = [f"{result['model']}: peak memory of one device in each phase of a PPO step, in GiB", ""]
    lines.append(f"{'phase':<15}" + "".join(f"{head:>13}" for head in (*heads, "total")))
    for phase in result["phases"]:
        numbers = "".join(f"{phase[cause] / GIB:>13.2f}" for cause in (*CAUSES, "total"))
        lines.append(f"{phase['phase']:<15}{numbers}")
    lines += ["", f"peak: {result['peak'] / GIB:.2f} GiB ({result['peak_phase']})"]
    if "peak_by_zero_stage" in result:
        stages = result["peak_by_zero_stage"].items()
        peaks = [f"{value / GIB:.2f} ({f'ZeRO {stage}' if stage != '0' else 'DDP'})" for stage, value in stages]
        lines.append(f"on {result['processes']} processes: {', '.join(peaks)}")
    if "offloaded" in result:
        lines.append(f"offloaded: another {result['offloaded'] / GIB:.2f} GiB of host memory per process")
    return "\n".join([*lines, *_verdict(result)])


def _verdict(result: dict[str, Any]) -> list[str]:
    if "fits" not in result:
        return []
    available = f"{result['limit'] / GIB:.2f} of {result['device_gib']:g} GiB are available for tensors"
    if result["fits"]:
        return [f"fits: {available}"]
    lines = [f"does not fit: {available}", "", "peak in GiB after each single change, the least intrusive first:"]
    recommended = None
    for change in result["changes"]:
        mark = "  fits" if change["fits"] else ""
        if change["fits"] and recommended is None:
            recommended, mark = change, "  fits: recommended"
        lines.append(f"  {change['change']:<45}{change['peak'] / GIB:>9.2f}{mark}")
    if recommended is None:
        together = result["all_changes"]
        verdict = (
            "all of them together fit"
            if together["fits"]
            else "even all of them together do not fit: use a smaller model"
        )
        peak = f"{together['peak'] / GIB:.2f} GiB with {'; '.join(together['changes'])}"
        lines.append(f"no single change is enough; {verdict} ({peak})")
    return lines
