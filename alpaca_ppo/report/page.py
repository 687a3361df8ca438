"""Writes a report: the runs' data as JSON within one HTML page that needs neither a server nor a network."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.config import TRAINING_ARGUMENTS
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.git_state import package_pages
from alpaca_ppo.doctor.examination import read_lines
from alpaca_ppo.report.runs import Run, TableFile, number_or_none, plain, rounded
from alpaca_ppo.tracking.results import better_before_training, means_in_words, start_and_end

SCRIPTS = (
    "format.js", "charts.js", "metrics.js", "curves.js", "overview.js", "configuration.js", "tokens.js", "answers.js",
    "page.js",
)  # fmt: skip
MAX_POINTS = 1500
OF_ONE_RUN = {"seed", "output_dir", "run_name", "provenance", "hub_model_id"}
MAX_ANSWERS = 5000
READ_TIMES = 8
"""Bytes read from tables at most, as a multiple of the budget for tokens; but 8 MB with a smaller one."""
_EXTREMES = 8
_COLUMNS = (
    "run", "table", "step", "prompt_id", "sample_id", "prompt", "question", "response", "score", "kl", "length",
    "stopped", "scores", "more", "turns",
)  # fmt: skip
_KNOWN = {*_COLUMNS, "tokens", "columns"}


def write_report(runs: Sequence[Run], path: Path, *, token_mb: float = 20.0) -> Path:
    """Writes the report of at least one run to the HTML file `path`, complete or not at all, and returns it.

    `token_mb` bounds the numbers of tokens, in megabytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, report_page(report_data(runs, token_mb=token_mb)))
    return path


def report_data(runs: Sequence[Run], *, token_mb: float) -> dict[str, Any]:
    """Returns everything that the page shows, as plain values."""
    answers = choose_answers(runs, token_mb=token_mb)
    options = {name: option for kind in TRAINING_ARGUMENTS for name, option in options_of(kind).items()}
    return {
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [_run_data(run, group, answers.left_out) for run, group in zip(runs, _groups(runs), strict=True)],
        "answers": answers.columns,
        "prompts": answers.prompts,
        "tokens": answers.tokens,
        "left_out": answers.left_out,
        "of_one_run": sorted(OF_ONE_RUN),
        "pages": package_pages(),
        "defaults": {name: plain(option.default) for name, option in options.items()},
    }


def report_page(data: Mapping[str, Any]) -> str:
    """Returns the HTML page that shows `data`."""
    assets = resources.files("alpaca_ppo.report") / "assets"
    parts = {
        "title": html.escape(f"Report: {', '.join(run['name'] for run in data['runs'])}"),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "data": script_json({name: value for name, value in data.items() if name != "tokens"}),
        "tokens": "{" + ",\n".join(f'"{i}":{text}' for i, text in data["tokens"].items()) + "}",
        "script": "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    # The template is text, @@name of a part@@, text and so on.
    pieces = (assets / "page.html").read_text(encoding="utf-8").split("@@")
    page = "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
    # A text of a model may hold half of a surrogate pair, which cannot be encoded.
    return page.encode(errors="replace").decode()


def _run_data(run: Run, group: int, left_out: list[str]) -> dict[str, Any]:
    """Returns what the page shows of a run; adds to `left_out` that curves are averaged."""
    lines = run.metrics
    names = sorted({name for line in lines for name in line} - {"step"})
    if len(lines) > MAX_POINTS:
        width = math.ceil(len(lines) / MAX_POINTS)
        left_out.append(f"Curves of {run.name}: every point is the mean of {width} steps.")
        lines = [_mean_line(lines[i : i + width], names) for i in range(0, len(lines), width)]
    return {
        "name": run.name,
        "path": str(run.path),
        "group": group,
        "last_step": run.last_step,
        "steps": [line["step"] for line in lines],
        "metrics": {name: [rounded(line.get(name)) for line in lines] for name in names},
        "config": {str(name): plain(value) for name, value in run.config.items()},
        "findings": [asdict(finding) for finding in run.findings],
        "ends": {name: [*map(rounded, ends)] for name in names if (ends := start_and_end(run.metrics, name))},
        "ends_are": means_in_words(run.metrics),
        "weights": _weights(run),
        "finished": (run.path / "final").is_dir(),
    }


def _weights(run: Run) -> dict[str, Any] | None:
    """Returns what the page says about the models in final/; None without them.

    `text` has their step in words; `best` the step, if a metric chose it; `before` a sentence, if that metric was
    better before training.
    """
    if (weights := run.weights) is None:
        return None
    greater = run.config.get("greater_is_better") is not False
    before = better_before_training(run.metrics, weights.metric, weights.value, greater_is_better=greater)
    return {
        "text": str(weights),
        "best": None if weights.metric is None else weights.step,
        "before": None if before is None else f"worse than before training, when {weights.metric} was {before:.4g}",
    }


def _mean_line(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    values = {name: [line[name] for line in lines if line.get(name) is not None] for name in names}
    return {"step": lines[-1]["step"], **{name: fmean(found) if found else None for name, found in values.items()}}


def _groups(runs: Sequence[Run]) -> list[int]:
    """Returns the number of each run's group, whose runs differ in no option but `OF_ONE_RUN`."""
    numbers: dict[str, int] = {}
    groups = []
    for i, run in enumerate(runs):
        shared = {name: plain(value) for name, value in run.config.items() if name not in OF_ONE_RUN}
        key = json.dumps(shared, sort_keys=True) if run.config else f"run {i}"
        groups.append(numbers.setdefault(key, len(numbers)))
    return groups


@dataclass
class Answers:
    """The answers of a report, as the page reads them.

    Attributes:
        columns: `_COLUMNS`, each with an entry for each answer.
        prompts: distinct prompts and questions; the columns `prompt` and `question` hold indices into it.
        tokens: JSON by the answer's index: `texts`, `ids`, and in `numbers` a list for each number of a token.
        left_out: sentences that say what is missing, and how to get it.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    tokens: dict[int, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def choose_answers(runs: Sequence[Run], *, token_mb: float) -> Answers:
    """Returns the answers of a report, with the tokens of as many as fit into `token_mb` megabytes."""
    answers = Answers()
    rows = _choose_rows(runs, max_bytes=max(READ_TIMES * token_mb, 8.0) * 1e6, left_out=answers.left_out)
    prompts: dict[str, int] = {}
    summaries = [_summary(row, prompts) for row in rows]
    answers.columns = {name: [summary[name] for summary in summaries] for name in _COLUMNS}
    answers.prompts = list(prompts)
    candidates = [i for i, row in enumerate(rows) if row.get("tokens")]
    spent = 0.0
    for i in _token_order(answers.columns, candidates):
        tokens = script_json(_token_columns(rows[i]["tokens"]))
        size = len(tokens.encode(errors="replace"))
        if spent + size <= token_mb * 1e6:
            answers.tokens[i] = tokens
            spent += size
    if missing := len(candidates) - len(answers.tokens):
        answers.left_out.append(
            f"The tokens of {len(answers.tokens)} of {len(candidates)} answers are in this file; those of {missing} "
            f"were left out, because the numbers of tokens may take {token_mb:g} MB (--token_mb)."
        )
    return answers


def _choose_rows(runs: Sequence[Run], *, max_bytes: float, left_out: list[str]) -> list[dict[str, Any]]:
    """Returns the rows of the answers that are shown; adds to `left_out` how many are missing."""
    files = [(i, file) for i, run in enumerate(runs) for file in run.tables]
    chosen = _choose_files(files, max_bytes=max_bytes)
    if len(chosen) < len(files):
        left_out.append(
            f"Answers of {len(chosen)} of {len(files)} tables are shown, spread over the steps; at most "
            f"{max_bytes / 1e6:.0f} MB are read. alpaca-ppo report --token_mb shows more."
        )
    rows = [
        {**values, "run": i, "table": file.table, "step": file.step}
        for i, file in files
        if (i, file) in chosen
        for values in read_lines(file.path, key="prompt")
    ]
    if len(rows) > MAX_ANSWERS:
        left_out.append(f"The tables show {MAX_ANSWERS} of {len(rows)} answers, spread over runs and steps.")
        rows = [rows[i] for i in sorted(spread_order(len(rows))[:MAX_ANSWERS])]
    return rows


def _choose_files(files: Sequence[tuple[int, TableFile]], *, max_bytes: float) -> set[tuple[int, TableFile]]:
    """Chooses files of at most `max_bytes` in all, but at least one, spread over tables and steps."""
    tables: dict[tuple[int, str], list[tuple[int, TableFile]]] = {}
    for run, file in files:
        tables.setdefault((run, file.table), []).append((run, file))
    orders = [[table[k] for k in spread_order(len(table))] for table in tables.values()]
    chosen: set[tuple[int, TableFile]] = set()
    size = 0
    # A file of each table in turn.
    for run, file in filter(None, chain.from_iterable(zip_longest(*orders))):
        if not chosen or size + file.size <= max_bytes:
            chosen.add((run, file))
            size += file.size
    return chosen


def spread_order(count: int) -> list[int]:
    """Returns 0 to `count` - 1 in an order whose first n numbers are spread over the range, for every n: both ends,
    then by the reversed binary digits.
    """
    digits = (count - 1).bit_length()
    spread = sorted(range(count), key=lambda i: f"{i:0{digits}b}"[::-1])
    return list(dict.fromkeys([*spread[:1], *range(count)[-1:], *spread]))


def _summary(row: Mapping[str, Any], prompts: dict[str, int]) -> dict[str, Any]:
    """Returns the entries of `row` in `Answers.columns`, and adds its prompt and question to `prompts` if new."""
    kl = rounded(row.get("kl"))
    if kl is None:
        token_kls = [k for token in row.get("tokens") or () if (k := number_or_none(token.get("kl"))) is not None]
        kl = rounded(sum(token_kls)) if token_kls else None
    others = {name: value for name, value in row.items() if name not in _KNOWN}
    # An evaluation writes each score as an entry of the row.
    scores = {name: value for name, value in others.items() if isinstance(value, int | float | None)}
    more = {name: value for name, value in others.items() if name not in scores}
    return {
        **{name: row[name] for name in ("run", "table", "step")},
        "prompt_id": plain(row.get("prompt_id")),
        "sample_id": plain(row.get("sample_id", 0)),
        "prompt": prompts.setdefault(_text(row.get("prompt")), len(prompts)),
        "question": prompts.setdefault(_text(row.get("question", row.get("prompt"))), len(prompts)),
        "response": _text(row.get("response")),
        "score": number_or_none(row.get("score")),
        "kl": kl,
        "length": number_or_none(row.get("length")),
        "stopped": row.get("stopped"),
        "scores": plain(scores | (row.get("scores") or {})) or None,
        "more": plain(more | (row.get("columns") or {})) or None,
        "turns": plain(row.get("turns")),
    }


def script_json(data: Any) -> str:
    """Returns `data` as JSON for a script element: `<` is escaped, so neither `</script>` nor `<!--` can occur."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _token_order(columns: Mapping[str, list[Any]], candidates: Sequence[int]) -> Iterable[int]:
    """Returns `candidates` in the order in which they get their tokens."""

    def ranked(name: str) -> list[int]:
        return sorted((i for i in candidates if columns[name][i] is not None), key=lambda i: columns[name][i])

    followed = [i for i in candidates if columns["table"][i] != "rollouts"]
    by_score = ranked("score")
    extremes = [*by_score[::-1][:_EXTREMES], *by_score[:_EXTREMES], *ranked("kl")[::-1][:_EXTREMES]]
    cut_off = [i for i in candidates if columns["stopped"][i] is False][:_EXTREMES]
    followed_spread = [followed[k] for k in spread_order(len(followed))]
    all_spread = [candidates[k] for k in spread_order(len(candidates))]
    return dict.fromkeys([*followed_spread, *extremes, *cut_off, *all_spread])


def _token_columns(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers = [k for k in dict.fromkeys(k for token in tokens for k in token) if k not in ("id", "text", "environment")]
    columns: dict[str, Any] = {"texts": [_text(token.get("text", "")) for token in tokens]}
    columns["ids"] = [token.get("id") for token in tokens]
    if any(token.get("environment") for token in tokens):
        columns["environment"] = [int(bool(token.get("environment"))) for token in tokens]
    columns["numbers"] = {name: [number_or_none(token.get(name)) for token in tokens] for name in numbers}
    return columns
