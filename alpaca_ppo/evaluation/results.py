"""What `alpaca-ppo evaluate` shows and writes."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.tracking.results import json_line, without_nan


def results_text(results: Mapping[str, Any]) -> str:
    """Returns what was evaluated and how, and the metrics with their standard errors.

    Metrics of a set with the same number and the same standard error share a line.
    """
    sets, n, temperature = results["prompts"], results["samples_per_prompt"], results["temperature"]
    prompts = ", ".join(f"{count} prompts" + (f" of {name}" if name else "") for name, count in sets.items())
    decoding = f"sampled at temperature {temperature:g}" if temperature else "greedy (the likeliest tokens)"
    lines = [f"{results['model']}: {prompts}, {n} {'answer' if n == 1 else 'answers'} to each, {decoding}"]
    if results["success"] is not None:
        lines.append(f"a success is an answer with {results['success']}")
    stats = {name.removeprefix("eval/"): value for name, value in sorted(results["metrics"].items())}
    standard_errors = {f"{name}_se" for name in stats}
    errors = {name: stats.get(f"{name}_se", math.nan) for name in stats if name not in standard_errors}
    sharing: dict[tuple[str, ...], list[str]] = {}
    for name, se in errors.items():
        eval_set = next((set_name for set_name in sets if set_name and name.startswith(f"{set_name}/")), "")
        # Without a number or an error, nothing shows that two metrics are the same.
        is_known = not math.isnan(stats[name] + se)
        sharing.setdefault((eval_set, f"{stats[name]:.5g}", f"{se:.5g}") if is_known else (name,), []).append(name)
    first_names = {" = ".join(names): names[0] for names in sharing.values()}
    width = max(map(len, first_names))
    for title, name in first_names.items():
        error = "" if math.isnan(errors[name]) else f"  ±{errors[name]:.2g}"
        lines.append(f"{title:<{width}}  {stats[name]:>10.4g}{error}")
    return "\n".join(lines)


def write_results(folder: Path, results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
    """Writes results.json and answers.jsonl; numbers that are not finite become null."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_nan(results), indent=2, ensure_ascii=False)
    write_text_atomically(folder / "results.json", text + "\n")
    write_text_atomically(folder / "answers.jsonl", "".join(map(json_line, answers)))
