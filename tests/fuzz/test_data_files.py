"""Files of prompts: every row is read as it was written, or the file is refused by name."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from alpaca_ppo.data import load_prompt_dataset
from tests.fuzz.mutations import mutated_bytes, mutated_tree, scalars, texts
from tests.fuzz.oracle import Refused, files_unchanged, fuzz, outcome

ROWS: list[dict[str, Any]] = [
    {"prompt": "naïve 🦙 one", "answer": "2020-01-01", "n": 1, "x": 0.5, "tags": ["a", "b"]},
    {"prompt": "two\u2028three", "answer": "NA", "n": 2**53 + 1, "x": -1.5, "tags": []},
    {"prompt": "four", "answer": None, "n": -3, "x": 1e300, "tags": ["c"]},
]
MESSAGES: list[dict[str, Any]] = [
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}], "meta": {"id": 1}},
    {"prompt": [{"role": "user", "content": "two", "name": "n"}], "meta": {"id": 2, "source": "x"}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the file; the cache of `datasets` is beside it for the time of these tests."""
    base = tmp_path_factory.mktemp("data")
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = base / "cache"
    datasets.disable_progress_bars()
    (base / "files").mkdir()
    yield base / "files"
    datasets.enable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = before


def load(folder: Path, name: str, content: bytes) -> Any:
    """The rows of a file of this content, or `Refused`; the file stays as it is, alone in its folder."""
    path = folder / name
    path.write_bytes(content)
    with files_unchanged(folder):
        found = outcome(lambda: load_prompt_dataset(str(path)).to_list(), names=(name,))
    path.unlink()
    return found


def lines(rows: list[Any], *, ascii_only: bool = True) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows).encode(errors="surrogatepass")


def strict(value: Any) -> Any:
    """`value` in a form that compares by type as well, and NaN as equal to itself."""
    if isinstance(value, dict):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [strict(entry) for entry in value]
    if isinstance(value, bool | None):
        return repr(value)
    # A column of integers and numbers holds all of them as numbers.
    exact = isinstance(value, int) and abs(value) >= 2**53
    return ("number", value if exact else repr(float(value))) if isinstance(value, int | float) else value


def full(rows: list[dict[str, Any]]) -> Any:
    """`rows` with None for the columns that they lack, without blank ones at the end."""
    names = [name for row in rows for name in row]
    return strict([{name: row.get(name) for name in names} for row in rows])


@fuzz(400, rows=mutated_tree(ROWS) | mutated_tree(MESSAGES), ascii_only=st.booleans(), array=st.booleans())
def test_mutated_rows_of_json_are_kept_exactly_or_refused(folder, rows, ascii_only, array):
    rows = rows if isinstance(rows, list) else [rows]
    content = (
        json.dumps(rows, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        if array
        else lines(rows, ascii_only=ascii_only)
    )
    found = load(folder, "rows.json" if array else "rows.jsonl", content)
    if not isinstance(found, Refused):
        assert strict(found) == full(rows)


@fuzz(
    300, content=mutated_bytes(lines(ROWS)) | mutated_bytes(lines(MESSAGES)) | mutated_bytes(json.dumps(ROWS).encode())
)
def test_a_mutated_json_file_is_what_it_says_or_refused(folder, content):
    found = load(folder, "rows.jsonl", content)
    if not isinstance(found, Refused):
        # Lines may end as on any system.
        text = re.sub("\r\n?", "\n", content.decode("utf-8-sig"))
        try:
            rows = json.loads(text)
        except ValueError:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        assert strict(found) == full(rows if isinstance(rows, list) else [rows])


def table(rows: list[list[Any]], separator: str = ",") -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogatepass")


CSV = [["prompt", "answer", "n"], ["naïve, 🦙", "NA", "1"], ['say "two"', "None", "2"], ["three\nlines", "x", "3"]]


def cell_is(found: Any, written: str) -> bool:
    """Whether a cell holds the text that was written, or the number, switch or None that it stands for."""
    if written == "":
        return found is None
    if isinstance(found, bool):
        return str(found).lower() == written.lower()
    if isinstance(found, int | float):
        return type(found)(float(written) if isinstance(found, float) else written) == found or math.isnan(found)
    return found == written


@fuzz(100, rows=mutated_tree(CSV, values=scalars | st.lists(texts, max_size=4)), separator=st.sampled_from(",\t"))
def test_mutated_cells_are_kept_or_refused(folder, rows, separator):
    rows = [
        [*map(str, row)] if isinstance(row, list) else [str(row)] for row in (rows if isinstance(rows, list) else [])
    ]
    found = load(folder, "rows.csv" if separator == "," else "rows.tsv", table(rows, separator))
    if not isinstance(found, Refused):
        written = [row for row in csv.reader(io.StringIO(table(rows).decode(), newline="")) if row]
        assert len(found) == len(written) - 1
        for row, cells in zip(found, written[1:], strict=True):
            assert all(map(cell_is, row.values(), cells)), (row, cells)


def parquet_bytes() -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


@fuzz(60, content=mutated_bytes(parquet_bytes()))
def test_a_mutated_parquet_file_is_read_or_refused(folder, content):
    found = load(folder, "rows.parquet", content)
    if not isinstance(found, Refused):
        # Parquet has no checksum: a flipped bit may be another letter.
        assert len(found) == len(ROWS)


@fuzz(
    200,
    name=texts
    | st.sampled_from(["x" * 300, "./" + "x" * 5000, "a/b/c", "/dev/null", "a\nb.csv", ".jsonl", "x.parquet"]),
)
def test_a_name_of_no_dataset_is_refused(folder, name):
    found = outcome(lambda: load_prompt_dataset(name), names=("dataset_name",))
    assert isinstance(found, Refused) or name in ("/", "../x")


SPLITS = "train[ train[:2] train[50%:] train[1:2]+train[0:1] train[5:2] train[:999] train[-1:] test + all Train".split()
SPLITS += "train[:50%](pct1_dropremainder) train[a:b] train[::2] train+train train[%:]".split() + ["", "train "]


@fuzz(150, split=st.sampled_from(SPLITS) | texts)
def test_a_split_selects_rows_or_is_refused(folder, split):
    path = folder / "rows.jsonl"
    path.write_bytes(lines(ROWS))
    found = outcome(lambda: load_prompt_dataset(str(path), split=split).to_list(), names=("split",))
    if not isinstance(found, Refused):
        assert all(strict(row) in strict(ROWS) for row in found)
