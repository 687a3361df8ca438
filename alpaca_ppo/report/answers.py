"""Chooses the answers that a report shows, and those of them whose tokens it holds, and lays them out by column.

A page cannot hold every token of a long run. All of an ordinary run's answers are in its tables; the numbers of their
tokens have a budget, and so has the reading of files. What was left out is counted and said.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpaca_ppo.doctor.examination import read_lines
from alpaca_ppo.report.runs import Run, TableFile, number_or_none, plain

MAX_ANSWERS = 5000
"""Most answers in the tables of one report."""
READ_TIMES = 8
"""As many times the budget of tokens are read from tables at most."""
_EXTREMES = 8
_TEXTS = {"prompt", "response"}
_KNOWN = _TEXTS | {"prompt_id", "sample_id", "score", "scores", "stopped", "length", "tokens", "kl", "turns", "columns"}


@dataclass
class Answers:
    """The answers of a report, in columns, as the page reads them."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    """A list for each column, with an entry for each answer."""
    prompts: list[str] = field(default_factory=list)
    """Distinct prompts; the column `prompt` holds indices into it."""
    tokens: dict[int, str] = field(default_factory=dict)
    """By answer, as JSON: `texts`, `ids`, and in `numbers` a list for each number of a token; null for a token that
    has none."""
    left_out: list[str] = field(default_factory=list)
    """Sentences saying what is missing, and how to get it."""


@dataclass
class _Row:
    run: int
    table: str
    step: int
    values: dict[str, Any]


def choose_answers(runs: Sequence[Run], *, token_mb: float) -> Answers:
    """The answers of `runs` for one report.

    Args:
        runs: the runs, whose tables are read here.
        token_mb: most megabytes (10^6 bytes) of numbers of tokens.
    """
    answers = Answers()
    rows = _read_rows(runs, token_mb=token_mb, left_out=answers.left_out)
    rows = _keep(rows, answers.left_out)
    for name in ("run", "table", "step", "prompt_id", "sample_id", "prompt", "response", "score", "kl", "length"):
        answers.columns[name] = []
    for name in ("stopped", "scores", "more", "turns"):
        answers.columns[name] = []
    prompts: dict[str, int] = {}
    for row in rows:
        for name, value in _summary(row, prompts).items():
            answers.columns[name].append(value)
    answers.prompts = list(prompts)
    _add_tokens(answers, rows, token_mb)
    return answers


def spread_order(count: int) -> list[int]:
    """0 to `count` - 1 in an order whose every beginning is spread over the range: first, last, middle, quarters."""
    if count < 3:
        return list(range(count))
    order, width = [0, count - 1], count - 1
    parts = 2
    while len(order) < count:
        order += [i for i in ((width * part) // parts for part in range(1, parts, 2)) if i not in set(order)]
        parts *= 2
        if parts > 4 * count:
            order += sorted(set(range(count)) - set(order))
    return list(dict.fromkeys(order))


def _read_rows(runs: Sequence[Run], *, token_mb: float, left_out: list[str]) -> list[_Row]:
    limit = max(READ_TIMES * token_mb, 8.0) * 1e6
    files = [(i, file) for i, run in enumerate(runs) for file in run.tables]
    chosen: set[tuple[int, TableFile]] = set()
    read = 0
    for entry in _by_step(files):
        if not chosen or read + entry[1].size <= limit:
            chosen.add(entry)
            read += entry[1].size
    if len(chosen) < len(files):
        left_out.append(
            f"Answers of {len(chosen)} of {len(files)} tables are shown, spread over the steps: the tables have "
            f"{sum(file.size for _, file in files) / 1e6:.0f} MB, and {limit / 1e6:.0f} MB are read at most. "
            "Raise report_token_mb for more."
        )
    rows = []
    for i, file in files:
        if (i, file) in chosen:
            rows += [_Row(i, file.table, file.step, values) for values in read_lines(file.path, key="prompt")]
    return rows


def _by_step(files: Sequence[tuple[int, TableFile]]) -> Iterator[tuple[int, TableFile]]:
    """`files` in the order in which they are taken: of every table in turn the next step of `spread_order`."""
    tables: dict[tuple[int, str], list[tuple[int, TableFile]]] = {}
    for entry in files:
        tables.setdefault((entry[0], entry[1].table), []).append(entry)
    orders = [[table[k] for k in spread_order(len(table))] for table in tables.values()]
    for turn in range(max(map(len, orders), default=0)):
        yield from (order[turn] for order in orders if turn < len(order))


def _keep(rows: list[_Row], left_out: list[str]) -> list[_Row]:
    if len(rows) <= MAX_ANSWERS:
        return rows
    kept = sorted(spread_order(len(rows))[:MAX_ANSWERS])
    left_out.append(f"The tables show {MAX_ANSWERS} of {len(rows)} answers, spread over runs and steps.")
    return [rows[i] for i in kept]


def _summary(row: _Row, prompts: dict[str, int]) -> dict[str, Any]:
    values, tokens = row.values, row.values.get("tokens")
    kl = number_or_none(values.get("kl"))
    if kl is None and tokens:
        parts = [number_or_none(token.get("kl")) for token in tokens]
        kl = _rounded(sum(part for part in parts if part is not None)) if any(p is not None for p in parts) else None
    columns = values.get("columns")
    more = {name: value for name, value in values.items() if name not in _KNOWN}
    # Scores of an evaluation stand in columns of their own.
    scores = {name: more.pop(name) for name in list(more) if isinstance(more[name], int | float | None)}
    scores |= values.get("scores") or {}
    if isinstance(columns, dict):
        more |= columns
    return {
        "run": row.run,
        "table": row.table,
        "step": row.step,
        "prompt_id": plain(values.get("prompt_id")),
        "sample_id": plain(values.get("sample_id", 0)),
        "prompt": prompts.setdefault(_text(values.get("prompt")), len(prompts)),
        "response": _text(values.get("response")),
        "score": number_or_none(values.get("score")),
        "kl": kl,
        "length": number_or_none(values.get("length")),
        "stopped": values.get("stopped"),
        "scores": plain(scores) or None,
        "more": plain(more) or None,
        "turns": plain(values.get("turns")),
    }


def script_json(data: Any) -> str:
    """`data` as JSON that can stand within a script element whatever its texts hold: `<` is escaped, so neither
    `</script>` nor `<!--` can occur.
    """
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _add_tokens(answers: Answers, rows: Sequence[_Row], token_mb: float) -> None:
    candidates = [i for i, row in enumerate(rows) if row.values.get("tokens")]
    spent = 0.0
    for i in _token_order(answers.columns, candidates):
        tokens = script_json(_token_columns(rows[i].values["tokens"]))
        size = len(tokens.encode(errors="replace"))
        if spent + size <= token_mb * 1e6:
            answers.tokens[i] = tokens
            spent += size
    if missing := len(candidates) - len(answers.tokens):
        answers.left_out.append(
            f"The tokens of {len(answers.tokens)} of {len(candidates)} answers are in this file; those of {missing} "
            f"were left out, because the numbers of tokens may take {token_mb:g} MB (report_token_mb). Kept first: "
            "prompts that are followed through training, the best, the worst, the most KL, then answers spread over "
            "the steps."
        )


def _token_order(columns: Mapping[str, list[Any]], candidates: Sequence[int]) -> Iterable[int]:
    """Which answers get their tokens first."""
    followed = [i for i in candidates if columns["table"][i] != "rollouts"]
    extremes: list[int] = []
    for name in ("score", "kl"):
        known = sorted((i for i in candidates if columns[name][i] is not None), key=lambda i: columns[name][i])
        extremes += known[::-1][:_EXTREMES] + (known[:_EXTREMES] if name == "score" else [])
    cut = [i for i in candidates if columns["stopped"][i] is False][:_EXTREMES]
    spread = [candidates[k] for k in spread_order(len(candidates))]
    return dict.fromkeys([*(followed[k] for k in spread_order(len(followed))), *extremes, *cut, *spread])


def _token_columns(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for token in tokens for name in token))
    numbers = [name for name in names if name not in ("id", "text", "environment")]
    columns: dict[str, Any] = {"texts": [_text(token.get("text", "")) for token in tokens]}
    columns["ids"] = [token.get("id") for token in tokens]
    if any(token.get("environment") for token in tokens):
        columns["environment"] = [int(bool(token.get("environment"))) for token in tokens]
    columns["numbers"] = {name: [number_or_none(token.get(name)) for token in tokens] for name in numbers}
    return columns
