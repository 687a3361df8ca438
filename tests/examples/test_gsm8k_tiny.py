"""The GSM8K example in miniature: from a file of questions to the table, with a few steps of each training."""

import json
from pathlib import Path

import pytest

from alpaca_ppo.cli.train import run_training, sft
from alpaca_ppo.data import load_prompt_dataset
from examples import gsm8k_tiny

CONFIGS = Path(gsm8k_tiny.__file__).parent / "configs"
TINY = ["--sft_rows", "20", "--test_rows", "6", "--vocab_size", "300", "--hidden_size", "16", "--num_layers", "1"]


@pytest.fixture
def questions(tmp_path):
    """Forty rows with GSM8K's columns."""
    rows = [
        {
            "question": f"Ann has {i} pears and buys {i + 1} more. How many pears does she have?",
            "answer": f"{i} + {i + 1}\n#### {2 * i + 1}",
        }
        for i in range(40)
    ]
    return write_rows(tmp_path / "gsm8k.jsonl", rows)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def flags(**values):
    return [str(part) for name, value in values.items() for part in (f"--{name}", value)]


def prepare(data, folder):
    gsm8k_tiny.main(["prepare", str(data), "--folder", str(folder), *TINY, "--num_heads", "2"])


def test_the_commands_of_the_readme_lead_from_a_file_to_a_table(questions, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gsm8k_tiny, "RESPONSE_LEN", 12)
    prepare(questions, tmp_path)
    paths = {"model_name_or_path": tmp_path / "base", "dataset_name": tmp_path / "sft.jsonl"}
    options = flags(config=CONFIGS / "gsm8k_tiny_sft.yaml", **paths, output_dir=tmp_path / "sft", max_steps=40)
    # Enough steps for some responses to stop; otherwise all get the same penalty, and nothing is learned.
    sft([*options, "--learning_rate", "0.02"])
    paths = {"model_name_or_path": tmp_path / "sft", "dataset_name": tmp_path / "ppo.jsonl"}
    sizes = {"rollout_batch_size": 4, "step_batch_size": 4, "total_episodes": 8, "response_len": 12}
    ppo = flags(config=CONFIGS / "gsm8k_tiny_ppo.yaml", **paths, output_dir=tmp_path / "ppo", **sizes)
    # This model's answers are never well-formed, and nothing is learned from equal rewards, so another reward is used.
    run_training([*ppo, "--report_to", "none", "--reward_funcs", "tests.tiny_runs:count_even"])
    gsm8k_tiny.main(["measure", "--folder", str(tmp_path)])

    lines = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["objective/kl_sum_seq"] == pytest.approx(0.0, abs=1e-4)
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["sft, sampled", "sft, greedy", "ppo/final/policy, sampled", "ppo/final/policy, greedy"]
    # The supervised model is its own reference.
    assert results["sft, sampled"]["kl"] == 0.0
    assert results["ppo/final/policy, sampled"]["kl"] != 0.0
    assert all(0 <= row["well_formed"] <= row["stopped"] <= 1 for row in results.values())
    assert all(1 <= row["length"] <= 12 for row in results.values())
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()][-1] == "ppo/final/policy"


def test_the_splits_are_disjoint_and_complete(questions, tmp_path):
    prepare(questions, tmp_path)
    splits = [load_prompt_dataset(str(tmp_path / f"{name}.jsonl"))["question"] for name in ("sft", "test", "ppo")]
    assert [len(split) for split in splits] == [20, 6, 14]
    assert len({question for split in splits for question in split}) == 40
