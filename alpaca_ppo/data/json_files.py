"""Rows of .jsonl and .json files, exactly as they are written.

`datasets` would turn text that looks like a date into a timestamp and an integer beyond 64 bits into a float, and a
line `null` ends the process (datasets 5.2 with pyarrow 26). The rows are in memory, not memory-mapped.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from alpaca_ppo.config.fields import shown


def read_json_files(paths: Sequence[Path]) -> Dataset:
    """Returns the rows of all files, in order. A row without a column that others have holds None there.

    A column whose entries differ in type, or in their keys, keeps each of them as it is.

    Raises:
        ValueError: for a file that is not UTF-8; for a row that is not a JSON object, or has a key twice (with its
            line); for a value that no dataset can hold, such as an integer beyond 64 bits (with its column).
    """
    rows = [row for path in paths for row in _read_rows(path)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        raise ValueError(f"{', '.join(map(str, paths))} holds no rows; write one JSON object per line")
    if bad := next((name for name in names if any("\ud800" <= c <= "\udfff" for c in name)), None):
        raise ValueError(f"a column has the name {shown(bad)}, which is not text; rename it")
    columns = {name: [row.get(name) for row in rows] for name in names}
    arrays = {name: _arrow(name, values) for name, values in columns.items()}
    mixed = [name for name, array in arrays.items() if isinstance(array.type, pa.JsonType)]
    dataset = Dataset(pa.table(arrays))
    for name in mixed:
        # `datasets` parses JSON with less than full precision.
        kept = dataset[name][:]
        if (row := next((i for i, value in enumerate(columns[name]) if not _same(kept[i], value)), None)) is not None:
            raise ValueError(
                f"column {name!r} has values of different types, among which {shown(columns[name][row])} in row {row} "
                "cannot be kept exactly; write that column as text"
            )
    return dataset


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of one file: an array of them, one per line, or a single one over many lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    try:
        whole = _parse(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            raise ValueError(f"{path} is not valid JSON: {_reason(error)}") from error
    else:
        if isinstance(whole, list):
            return [_checked_row(row, f"{path} entry {i}") for i, row in enumerate(whole)]
        return [_checked_row(whole, f"{path} line 1")]
    rows = []
    # Not splitlines, which also splits at characters that may stand within JSON text, such as U+2028.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = _parse(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number} is not valid JSON: {_reason(error)}") from error
        rows.append(_checked_row(row, f"{path} line {number}"))
    return rows


def _parse(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _checked_row(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(
            f'{place} is a {type(row).__name__}; every row must be a JSON object such as {{"prompt": ...}}'
        )
    return row


def _arrow(name: str, values: list[Any]) -> pa.Array:
    """`values` as an Arrow column, of JSON text if a column of one type cannot hold them unchanged."""
    try:
        array = pa.array(values)
    # Of values that differ in type, or that Arrow cannot hold at all.
    except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError):
        array = None
    if array is None or not _holds(array, values):
        for row, value in enumerate(values):
            _check_value(name, value, row)
        texts = [None if value is None else json.dumps(value) for value in values]
        array = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))
    return array


def _check_value(name: str, value: Any, row: int) -> None:
    """Checks that `value` has neither integers beyond 64 bits nor lone surrogates, which no dataset can hold."""
    for number in _integers(value):
        if not -(2**63) <= number < 2**63:
            raise ValueError(
                f"column {name!r} holds {shown(number)} in row {row}, which 64 bits cannot hold; write it as text"
            )
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"column {name!r} holds {shown(value)} in row {row}, which is not text ({error})") from error


def _holds(array: pa.Array, values: list[Any]) -> bool:
    """Whether `array` has the `values` that it was made of: Arrow fills keys that some of the entries lack, makes True
    a 1.0 among numbers, and cannot store a type that is nested much deeper than 50.
    """
    if pa.types.is_nested(array.type):
        return _depth(array.type) <= 50 and all(map(_same, array.to_pylist(), values))
    return not pa.types.is_floating(array.type) or not any(isinstance(value, bool) for value in values)


def _depth(kind: pa.DataType) -> int:
    return 1 + max((_depth(kind.field(i).type) for i in range(kind.num_fields)), default=0)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(entry, b[key]) for key, entry in a.items())
    return (a == b or a != a and b != b) and isinstance(a, bool) == isinstance(b, bool)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _integers(part)
