"""What `alpaca-ppo evaluate` shows and writes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.atomic_io import write_text_atomically


def results_text(results: Mapping[str, Any]) -> str:
    """Returns what was evaluated and how, and the metrics, each with its standard error if it has one.

    Metrics of a set with the same number and the same standard error share a line.
    """
    sets, n, temperature = results["prompts"], results["samples_per_prompt"], results["temperature"]
    prompts = ", ".join(f"{count} prompts" + (f" of {name}" if name else "") for name, count in sets.items())
    how = f"sampled at temperature {temperature:g}" if temperature else "greedy (the likeliest tokens)"
    lines = [f"{results['model']}: {prompts}, {n} {'answer' if n == 1 else 'answers'} to each, {how}"]
    if results["success"] is not None:
        lines.append(f"a success is an answer with {results['success']}")
    stats = {name.removeprefix("eval/"): value for name, value in sorted(results["metrics"].items())}
    shown: dict[Any, list[str]] = {}
    for name in (name for name in stats if not name.endswith("_se")):
        of_set = next((each for each in sets if each and name.startswith(f"{each}/")), "")
        value, se = stats[name], stats.get(f"{name}_se", math.nan)
        same_line = name if math.isnan(value + se) else (of_set, f"{value:.5g}", f"{se:.5g}")
        shown.setdefault(same_line, []).append(name)
    titles = {" = ".join(names): names[0] for names in shown.values()}
    width = max(map(len, titles))
    for title, name in titles.items():
        se = stats.get(f"{name}_se", math.nan)
        lines.append(f"{title:<{width}}  {stats[name]:>10.4g}" + ("" if math.isnan(se) else f"  ±{se:.2g}"))
    return "\n".join(lines)


def write_results(folder: Path, results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
    """Writes results.json and answers.jsonl; a number that is not finite becomes null."""
    numbers = {name: value if math.isfinite(value) else None for name, value in results["metrics"].items()}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**results, "metrics": numbers}, indent=2, ensure_ascii=False)
    write_text_atomically(folder / "results.json", text + "\n")
    lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
    write_text_atomically(folder / "answers.jsonl", "".join(lines))
