import json

import datasets
import pytest
from datasets import Dataset, DatasetDict

from alpaca_ppo.data import load_prompt_dataset

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


def test_a_single_file_has_only_a_train_split(tmp_path):
    name = write(tmp_path / "prompts.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"no split 'test'; use one of \['train'\]"):
        load_prompt_dataset(name, split="test")


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
    with pytest.raises(ValueError, match=f"'someone/else' is not a folder with data files.*{error}.*check the name"):
        load_prompt_dataset("someone/else")


def test_a_folder_without_data_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a folder with data files"):
        load_prompt_dataset(str(tmp_path))


@pytest.mark.parametrize("name", ["data/missing.jsonl", "./missing", "/missing/folder", "~/missing"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load_prompt_dataset(name)


def test_a_file_of_unknown_type_is_refused(tmp_path):
    (tmp_path / "prompts.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"has an unknown suffix; use one of .jsonl, .json, .csv"):
        load_prompt_dataset(str(tmp_path / "prompts.txt"))
