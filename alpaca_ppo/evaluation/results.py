"""What `alpaca-ppo evaluate` shows and writes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.tracking.results import json_line, without_nan


def results_text(results: Mapping[str, Any]) -> str:
    """Returns what was evaluated and how, and the metrics with their standard errors."""
    sets, n, temperature = results["prompts"], results["samples_per_prompt"], results["temperature"]
    prompts = ", ".join(f"{count} prompts" + (f" of {name}" if name else "") for name, count in sets.items())
    decoding = f"sampled at temperature {temperature:g}" if temperature else "greedy (the likeliest tokens)"
    lines = [f"{results['model']}: {prompts}, {n} {'answer' if n == 1 else 'answers'} to each, {decoding}"]
    if results["success"] is not None:
        lines.append(f"a success is an answer with {results['success']}")
    stats = {name.removeprefix("eval/"): value for name, value in sorted(results["metrics"].items())}
    standard_errors = {f"{name}_se" for name in stats}
    errors = {name: stats.get(f"{name}_se", math.nan) for name in stats if name not in standard_errors}
    width = max(map(len, errors))
    for name, se in errors.items():
        error = "" if math.isnan(se) else f"  ±{se:.2g}"
        lines.append(f"{name:<{width}}  {stats[name]:>10.4g}{error}")
    return "\n".join(lines)


def write_results(folder: Path, results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
    """Writes results.json and answers.jsonl; numbers that are not finite become null."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_nan(results), indent=2, ensure_ascii=False)
    write_text_atomically(folder / "results.json", text + "\n")
    write_text_atomically(folder / "answers.jsonl", "".join(map(json_line, answers)))
