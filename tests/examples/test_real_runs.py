"""`make real` and `make real-rlhf` with a tiny model: what they write, and what they keep."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.parser import parse_args
from examples.mini_farm import real
from examples.sentences import run as sentences
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer

CHAT = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
FEW = (
    "--held_out",
    "3",
    "--max_steps",
    "2",
    "--eval_steps",
    "1",
    "--rollout_batch_size",
    "2",
    "--step_batch_size",
    "8",
)
SHORT = ("--num_return_sequences", "4", "--response_len", "8", "--query_len", "96")


@pytest.fixture
def model(tmp_path) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    folder = tmp_path / "model"
    tiny_causal_lm("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def check(folder: Path, results, text: str, titles: tuple[str, ...]):
    assert list(results) == ["before", "before, best of 8", "after"]
    assert (folder / "results.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "final/policy/config.json").is_file() and (folder / "report.html").is_file()
    written = (folder / "results.txt").read_text()
    assert written in text and all(title in written for title in (*titles, "before:", "after:"))


def test_the_sentences_are_trained_and_shown(model, tmp_path, capsys):
    results = sentences.main(["--model", model, "--output_dir", str(tmp_path / "run"), *FEW, *SHORT])
    check(tmp_path / "run", results, capsys.readouterr().out, ("reward", "all words", "KL"))
    assert results["before"].kl == 0 and len(results["after"].scores) == 3


def test_rlhf_writes_pairs_and_a_reward_model_once_and_shows_both_scores(model, tmp_path, capsys):
    folder = tmp_path / "run"
    given = ["--model", model, "--pairs", "6", *FEW, *SHORT]
    results = real.main([*given, "--output_dir", str(folder)])
    check(folder, results, capsys.readouterr().out, ("reward model", "annotators", "KL"))
    assert len(results["after"].gold) == len(results["after"].scores) == 3
    pairs = [json.loads(line) for line in (tmp_path / "pairs/pairs.jsonl").read_text().splitlines()]
    assert 0 < len(pairs) <= 6 and all(pair["chosen"] != pair["rejected"] for pair in pairs)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"eval/scores", "eval/scores/gold", "eval/kl_sum_seq"} <= steps[0].keys()
    with pytest.raises(ValueError, match="holds a run that has ended; append REAL="):
        real.main([*given, "--output_dir", str(folder)])
    # What is overwritten has not ended, whatever becomes of it.
    (args,) = parse_args([PPOConfig], ["--config", str(real.CONFIG), "--output_dir", str(tmp_path / "other")])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/results.txt").touch()
    with pytest.raises(ValueError, match="holds a run that has ended"):
        sentences.continues(args)
    assert not sentences.continues(replace(args, overwrite_output_dir=True))
    assert not sentences.continues(args)
    # Interrupted after its first step.
    again = [*given, "--output_dir", str(tmp_path / "again"), "--save_steps", "1"]
    real.main(again)
    (tmp_path / "again/results.txt").unlink()
    shutil.rmtree(tmp_path / "again/final")
    shutil.rmtree(tmp_path / "again/checkpoint-2")
    capsys.readouterr()
    assert real.main(again).keys() == results.keys()
    said = capsys.readouterr().out
    assert said.count("kept from an earlier run") == 2 and "checkpoint-1" in said
    # Interrupted after its last step, before the table.
    (tmp_path / "again/results.txt").unlink()
    assert real.main(again).keys() == results.keys()
    # Interrupted before a checkpoint: refused before anything is sampled.
    for name in ("results.txt", "final", "checkpoint-1", "checkpoint-2"):
        shutil.move(tmp_path / "again" / name, tmp_path / name)
    capsys.readouterr()
    with pytest.raises(ValueError, match="holds the records of an earlier run"):
        real.main(again)
    assert not capsys.readouterr().out


def test_instructions_of_ones_own_are_held_out_or_trained_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    texts = [f"Describe lanterns {n}." for n in (0, 1, 2, 3, 4, 4)]
    file.write_text("".join(json.dumps({"instruction": text, "input": None}) + "\n" for text in texts))
    rows = real._split(str(file), 0, {"sft": 0, "preference": 7, "unlabeled": 3, "val": 2})
    texts = {split: [row["instruction"] for row in of_split] for split, of_split in rows.items()}
    assert [len(texts[split]) for split in ("preference", "unlabeled", "val")] == [7, 3, 2]
    assert not set(texts["val"]) & {*texts["preference"], *texts["unlabeled"]} and len(set(texts["preference"])) == 3
    assert rows["val"][0]["asks"] == ["describe", "lanterns"]
    with pytest.raises(ValueError, match="5 rows; set held_out, now 5, below that"):
        real._split(str(file), 0, {"sft": 0, "preference": 7, "unlabeled": 3, "val": 5})
