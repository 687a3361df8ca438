import json
from types import SimpleNamespace

import datasets
import pytest
from datasets import Dataset, DatasetDict

from alpaca_ppo.data.loading import load_eval_datasets, load_prompt_dataset

ROWS = [{"prompt": f"naïve {i} 🦙", "answer": i} for i in range(10)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    dataset = Dataset.from_list(rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        dataset.to_parquet(path)
    else:
        dataset.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    return str(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_file_is_loaded_with_all_rows_and_columns(tmp_path, suffix):
    name = write(tmp_path / f"prompts{suffix}", ROWS)
    assert load_prompt_dataset(name).to_list() == ROWS
    assert load_prompt_dataset(name, split="train").to_list() == ROWS


def test_a_slice_of_a_split_can_be_loaded(tmp_path):
    name = write(tmp_path / "prompts.jsonl", ROWS)
    assert load_prompt_dataset(name, split="train[:3]").to_list() == ROWS[:3]
    assert load_prompt_dataset(name, split="train[80%:]").to_list() == ROWS[8:]
    assert load_prompt_dataset(name, split="train[:1]+train[9:]").to_list() == [ROWS[0], ROWS[9]]


def test_the_path_of_an_eval_set_may_hold_the_sign_before_a_split(tmp_path):
    name = write(tmp_path / "prompts@v2.jsonl", ROWS)
    loaded = load_eval_datasets(SimpleNamespace(eval_datasets=[f"all={name}", f"some={name}@train[:3]"]))
    assert {key: rows.to_list() for key, rows in loaded.items()} == {"all": ROWS, "some": ROWS[:3]}


def test_saved_datasets_and_folders_of_files_are_loaded_by_split(tmp_path):
    both = DatasetDict({"train": Dataset.from_list(ROWS[:8]), "test": Dataset.from_list(ROWS[8:])})
    both.save_to_disk(tmp_path / "saved")
    both["test"].save_to_disk(tmp_path / "saved_split")
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", ROWS[:8])
    write(tmp_path / "files" / "test.jsonl", ROWS[8:])
    assert load_prompt_dataset(str(tmp_path / "saved"), split="test").to_list() == ROWS[8:]
    assert load_prompt_dataset(str(tmp_path / "saved"), split="train[:2]").to_list() == ROWS[:2]
    assert load_prompt_dataset(str(tmp_path / "saved_split")).to_list() == ROWS[8:]
    assert load_prompt_dataset(str(tmp_path / "files"), split="test").to_list() == ROWS[8:]
    with pytest.raises(ValueError, match=r"has the splits \['train', 'test'\]; set the split to one of them"):
        load_prompt_dataset(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"has no split 'dev'; use one of \['train', 'test'\]"):
        load_prompt_dataset(str(tmp_path / "files"), split="dev")


def test_a_split_is_found_by_a_name_that_is_no_slice(tmp_path):
    DatasetDict({name: Dataset.from_list(ROWS) for name in ("train-v2", "test")}).save_to_disk(tmp_path)
    assert load_prompt_dataset(str(tmp_path), split="train-v2").to_list() == ROWS


def test_a_folder_of_other_files_is_read_as_datasets_reads_it(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words/train.txt").write_text("one\ntwo\n")
    assert load_prompt_dataset(str(tmp_path / "words")).to_list() == [{"text": "one"}, {"text": "two"}]


def test_a_hub_id_is_loaded_with_its_configuration(monkeypatch):
    asked = []

    def load_dataset(*args):
        asked.append(args)
        return DatasetDict({"train": Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompt_dataset("openai/gsm8k", split="train", config_name="main").to_list() == ROWS
    assert asked == [("openai/gsm8k", "main")]


@pytest.mark.parametrize("error", [FileNotFoundError("no such dataset"), ConnectionError("offline")])
def test_an_unknown_or_unreachable_hub_id_is_refused_by_name(monkeypatch, error):
    def load_dataset(*args):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=f"'someone/else' cannot be read: {type(error).__name__}: {error}"):
        load_prompt_dataset("someone/else")


def test_a_folder_without_data_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"dataset_name '{tmp_path}' cannot be read: EmptyDatasetError"):
        load_prompt_dataset(str(tmp_path))


@pytest.mark.parametrize("name", ["data/missing.jsonl", "./missing", "/missing/folder", "~/missing"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load_prompt_dataset(name)


def test_a_missing_file_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "alpaca.json").write_text("[]")
    with pytest.raises(ValueError, match=r"neither a file nor a folder.* did you mean .*/alpaca\.json\?"):
        load_prompt_dataset(str(tmp_path / "alpca.json"))


def test_a_file_of_unknown_type_is_refused(tmp_path):
    (tmp_path / "prompts.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"has an unknown suffix; use one of .jsonl, .json, .csv"):
        load_prompt_dataset(str(tmp_path / "prompts.txt"))


def load_rows(tmp_path, text, suffix=".jsonl"):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_prompt_dataset(str(path)).to_list()


def test_json_is_read_as_it_is_written(tmp_path):
    rows = [
        # Text that looks like a date, an integer that float64 cannot hold, keys that differ from row to row.
        {"prompt": "a", "answer": "2020-01-01", "n": 2**53 + 1, "meta": {"x": 1}},
        {"prompt": "b", "answer": "2021-02-03T00:00:00Z", "n": 1, "meta": {"y": "z"}},
    ]
    assert load_rows(tmp_path, "\n".join(map(json.dumps, rows))) == rows
    assert load_rows(tmp_path, json.dumps(rows, indent=1), ".json") == rows
    assert load_rows(tmp_path, '{"prompt": "a",\n "answer": [1]}', ".json") == [{"prompt": "a", "answer": [1]}]
    mixed = [{"n": 5, "l": [True]}, {"n": True, "l": ["x"]}]
    assert str(load_rows(tmp_path, json.dumps(mixed))) == str(mixed)
    # A column of several types, rows without a column, blank lines, a BOM, CRLF.
    text = '\ufeff{"prompt": "a", "answer": 1}\r\n\r\n{"prompt": "b", "answer": "x"}\r\n{"id": true}'
    assert load_rows(tmp_path, text) == [
        {"prompt": "a", "answer": 1, "id": None},
        {"prompt": "b", "answer": "x", "id": None},
        {"prompt": None, "answer": None, "id": True},
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prompt": "a"}\nnull\n', r"rows.jsonl line 2 is a NoneType; every row must be a JSON object"),
        ('["a"]', r"rows.jsonl entry 0 is a str; every row must be a JSON object"),
        ('[{"prompt": "a"}', r"rows.jsonl is not valid JSON: Expecting ',' delimiter"),
        ('{"prompt": "a"}\n{"prompt": "b', r"rows.jsonl line 2 is not valid JSON: Unterminated string"),
        ("\n \n", r"rows.jsonl holds no rows"),
        (b'{"prompt": "\xff"}', "UnicodeDecodeError: .*0xff in position 12"),
        ('{"prompt": "a", "n": 18446744073709551616}', "OverflowError"),
        ('{"prompt": ["\\ud800"]}', "UnicodeEncodeError"),
        ('{"n": 1}\n{"n": ["x", 0.3333333333333333, NaN]}', "column 'n' has values of different types"),
        ('{"n": 0.5}\n{"n": true}', "column 'n' has values of different types"),
    ],
)
def test_malformed_json_is_refused_with_its_place(tmp_path, text, reason):
    with pytest.raises(ValueError, match=f"^dataset_name '{tmp_path}/rows.jsonl' cannot be read: .*{reason}"):
        load_rows(tmp_path, text)


def test_words_in_a_csv_file_stay_words(tmp_path):
    rows = load_rows(tmp_path, "prompt,answer,n\nNA,None,1\nnull,,\n", ".csv")
    assert rows == [{"prompt": "NA", "answer": "None", "n": 1}, {"prompt": "null", "answer": None, "n": None}]


def test_empty_lines_of_a_table_are_no_rows_and_no_names(tmp_path):
    assert load_rows(tmp_path, "\r\n\nprompt,answer\n\na,b\n\n", ".csv") == [{"prompt": "a", "answer": "b"}]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["7", "-1", ""], [7, -1, None]),
        (["7", "0.5", "1e-05"], [7.0, 0.5, 1e-5]),
        # What a number would be written as differs, or it is none.
        (["7", "007"], ["7", "007"]),
        (["0.5", "0.50"], ["0.5", "0.50"]),
        (["1", "NaN"], ["1", "NaN"]),
        (["1", "null"], ["1", "null"]),
        (["True", "False"], ["True", "False"]),
        (["[1]", "[" * 100_000], ["[1]", "[" * 100_000]),
        (["1", "99999999999999999999"], ["1", "99999999999999999999"]),
        ([*map(str, range(30_000)), "abc"], [*map(str, range(30_000)), "abc"]),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_column_of_a_table_is_text_unless_each_cell_is_a_number_as_it_is_written(tmp_path, suffix, cells, values):
    separator = {".csv": ",", ".tsv": "\t"}[suffix]
    text = f"prompt{separator}answer\n" + "".join(f"w5{separator}{cell}\n" for cell in cells)
    found = [row["answer"] for row in load_rows(tmp_path, text, suffix)]
    assert found == values and [*map(type, found)] == [*map(type, values)]


@pytest.mark.parametrize(
    ("text", "suffix", "reason"),
    [
        ("prompt,answer\na,b,c\n", ".csv", "line 2 has 3 cells, but there are 2 columns"),
        ("prompt,answer\na\n", ".csv", "line 2 has 1 cells, but there are 2 columns"),
        ("", ".csv", "rows.csv holds no rows"),
        ('prompt\n"a\nb', ".csv", r"the quoted cell that begins in .*rows.csv line 2 has no end \(unexpected end of"),
        # After two cells of two lines, one of them in the same row.
        ('p,a\n"x\r\n""y""",""\n"b\nc","d\n1,2', ".csv", "rows.csv line 5 has no end"),
        ('p\ta\n5" x, y\t"c\nd\t"e"\n', ".tsv", "rows.tsv line 2 has no end .*expected after"),
        ("prompt,n,n\na,1,2\n", ".csv", "rows.csv has several columns 'n'; rename them"),
        (b"", ".parquet", "ArrowInvalid: Parquet file size is 0 bytes"),
    ],
)
def test_a_damaged_table_is_refused_by_name(tmp_path, text, suffix, reason):
    with pytest.raises(ValueError, match=f"^dataset_name '{tmp_path}/rows{suffix}' cannot be read: .*{reason}"):
        load_rows(tmp_path, text, suffix)


def test_a_parquet_file_with_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    name = write(tmp_path / "rows.parquet", [{"prompt": "unlikely words"}])
    content = (tmp_path / "rows.parquet").read_bytes()
    assert b"unlikely" in content
    (tmp_path / "rows.parquet").write_bytes(content.replace(b"unlikely", b"\xffnlikely"))
    with pytest.raises(ValueError, match=f"^dataset_name '{name}' cannot be read: ArrowInvalid: .*UTF8"):
        load_prompt_dataset(name)


def test_the_files_of_a_folder_are_read_as_single_ones(tmp_path):
    (tmp_path / "files").mkdir()
    for number, row in enumerate(({"prompt": "a", "answer": "2020-01-01"}, {"prompt": "b", "answer": 3})):
        (tmp_path / "files" / f"train-{number}.jsonl").write_text(json.dumps(row) + "\n")
    loaded = load_prompt_dataset(str(tmp_path / "files"), split="train").to_list()
    assert loaded == [{"prompt": "a", "answer": "2020-01-01"}, {"prompt": "b", "answer": 3}]
    (tmp_path / "files" / "train-0.jsonl").write_text("null\n")
    with pytest.raises(ValueError, match=f"dataset_name '{tmp_path}/files' .*train-0.jsonl is a NoneType"):
        load_prompt_dataset(str(tmp_path / "files"))


def test_a_damaged_saved_dataset_and_an_impossible_name_are_refused(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=f"dataset_name '{tmp_path}/saved' cannot be read: KeyError"):
        load_prompt_dataset(str(tmp_path / "saved"))
    for name in ("", "a b", "x" * 5000):
        with pytest.raises(ValueError, match=f"dataset_name '{name}'"):
            load_prompt_dataset(name)


def test_a_long_cell_and_a_saved_format_are_read(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\na," + "x" * 140_000 + "\n")
    (row,) = load_prompt_dataset(str(tmp_path / "rows.csv"))
    assert row == {"prompt": "a", "answer": "x" * 140_000}
    Dataset.from_list([{"prompt": "a", "answer": 1}]).with_format("numpy", columns=["answer"]).save_to_disk(
        tmp_path / "s"
    )
    assert load_prompt_dataset(str(tmp_path / "s"))[0] == {"prompt": "a", "answer": 1}


def test_what_is_no_split_is_refused(tmp_path):
    name = write(tmp_path / "prompts.jsonl", ROWS)
    for split in ("train[", "", "train[a:b]", "train[5%]"):
        with pytest.raises(ValueError, match="has no split"):
            load_prompt_dataset(name, split=split)
