"""Rows of .jsonl and .json files, exactly as they are written.

`datasets` would turn text that looks like a date into a timestamp and an integer beyond 64 bits into a float, and a
line `null` ends the process (datasets 5.2 with pyarrow 26). The rows are in memory, not memory-mapped.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from alpaca_ppo.config.fields import shown


def read_json_files(paths: Sequence[Path]) -> Dataset:
    """Returns the rows of all files, in order. A row without a column that others have holds None there.

    A column whose entries differ in type, or in their keys, keeps each of them as it is.

    Raises:
        ValueError: for a file that is not UTF-8; with its line, for a row that is not a JSON object, has a key twice,
            or holds what no dataset can: an integer beyond 64 bits, or half of a surrogate pair.
    """
    rows = [row for path in paths for row in _read_rows(path)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        raise ValueError(f"{', '.join(map(str, paths))} holds no rows; write one JSON object per line")
    columns = {name: [row.get(name) for row in rows] for name in names}
    arrays = {name: _arrow(values) for name, values in columns.items()}
    dataset = Dataset(pa.table(arrays))
    for name in (name for name, array in arrays.items() if isinstance(array.type, pa.JsonType)):
        # `datasets` parses JSON with less than full precision.
        for row, (kept, value) in enumerate(zip(dataset[name][:], columns[name], strict=True)):
            if not _same(kept, value):
                raise ValueError(
                    f"column {name!r} has values of different types, among which {shown(value)} in row {row} cannot be "
                    "kept exactly; write that column as text"
                )
    return dataset


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of one file: an array of them, one per line, or a single one over many lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    if text.lstrip().startswith("["):
        found = {f"{path} entry {i}": row for i, row in enumerate(_parse(text, str(path)))}
    else:
        # Not splitlines, which also splits at characters that may stand within JSON text, such as U+2028.
        lines = {f"{path} line {i}": line for i, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1)}
        try:
            found = {f"{path} line 1": _parse(text, str(path))}
        except ValueError:
            found = {place: _parse(line, place) for place, line in lines.items() if line.strip()}
    for place, row in found.items():
        if not isinstance(row, dict):
            raise ValueError(f"{place} is a {type(row).__name__}; every row must be a JSON object")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place} holds {shown(row)}, which is not text ({error})") from error
    return list(found.values())


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from error


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"64 bits cannot hold {text[:30]}; write it as text")
    return int(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the key {repeated!r} occurs twice")
    return dict(pairs)


def _arrow(values: list[Any]) -> pa.Array:
    """`values` as an Arrow column, of JSON text if a column of one type cannot hold them unchanged: Arrow fills keys
    that some of the entries lack, makes True a 1.0 among numbers, and cannot store a type nested much deeper than 50.
    """
    # Of values that differ in type, or that Arrow cannot hold at all.
    with suppress(pa.ArrowException, OverflowError, TypeError):
        array = pa.array(values)
        if _depth(array.type) <= 50 and all(map(_same, array.to_pylist(), values)):
            return array
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def _depth(kind: pa.DataType) -> int:
    return 1 + max((_depth(kind.field(i).type) for i in range(kind.num_fields)), default=0)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(entry, b[key]) for key, entry in a.items())
    return (a == b or a != a and b != b) and isinstance(a, bool) == isinstance(b, bool)
