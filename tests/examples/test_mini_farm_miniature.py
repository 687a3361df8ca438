"""The whole laboratory in miniature, started as a user does: from the grammar to the table, then a second time."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.mini_farm import compare, lora, overopt, quickstart, results
from examples.mini_farm.splits import prompt_of, read_rows
from tests.tools.warm_python import warm_python

pytestmark = pytest.mark.proof

REPOSITORY = Path(__file__).resolve().parents[2]
MINIATURE = (
    "--sft_rows 160 --preference_rows 24 --held_out_pairs 8 --unlabeled_rows 16 --val_rows 8 --vocab_size 700 "
    "--hidden_size 16 --num_layers 1 --sft_epochs 0.2 --reward_epochs 1 --best_of 2 --ppo_episodes 16"
).split()
STAGES = ("data", "base", "sft", "pairs", "reward_model", "sft_answers", "ppo_seed_1", "ppo_seed_1_answers")


def run_quickstart(root):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "examples.mini_farm.quickstart", "--root", str(root), *MINIATURE]
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    """The folder of a first run and its screen."""
    root = tmp_path_factory.mktemp("laboratory") / "quickstart"
    return root, run_quickstart(root)


def test_the_screen_shows_a_line_per_stage_and_then_the_table(laboratory):
    _, ran = laboratory
    title, *stages = ran.stdout.split("\n\n")[0].splitlines()
    assert title.startswith("AlpacaFarm in miniature")
    assert len(stages) == len(STAGES) and all(line.endswith(" s") for line in stages)
    rows = [line.strip("|").split("|") for line in ran.stdout.split("\n\n")[2].splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["SFT", "best-of-2", "PPO"]
    assert all(len(row) == 7 for row in rows)
    assert rows[0][3].strip() == "50.0 %" and rows[0][6].strip() == "0.00"
    assert ran.stderr == ""


def test_the_trained_policy_loads_and_is_not_the_supervised_model(laboratory):
    root, _ = laboratory
    policy = AutoModelForCausalLM.from_pretrained(root / "final" / "policy")
    sft = AutoModelForCausalLM.from_pretrained(root / "sft")
    weights = [model.state_dict()["model.layers.0.mlp.up_proj.weight"] for model in (policy, sft)]
    assert not weights[0].equal(weights[1])
    tokenizer = AutoTokenizer.from_pretrained(root / "final" / "policy")
    prompt = prompt_of(read_rows(root / "data" / "val.jsonl")[0])
    answer = policy.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith(prompt)
    assert AutoModelForSequenceClassification.from_pretrained(root / "reward_model").config.num_labels == 1


def test_only_the_reward_model_trains_the_policy(laboratory):
    root, _ = laboratory
    (step,) = [json.loads(line) for line in (root / "ppo_seed_1" / "metrics.jsonl").read_text().splitlines()]
    assert step["objective/scores"] == pytest.approx(step["objective/scores/reward_model"])
    assert step["objective/scores/gold"] != pytest.approx(step["objective/scores/reward_model"])


def test_a_second_run_trains_nothing_and_shows_the_same_table(laboratory, capsys):
    root, first = laboratory
    written = {stage: (root / stage / "stage.json").stat().st_mtime_ns for stage in STAGES}
    quickstart.main(["--root", str(root), *MINIATURE])
    second = capsys.readouterr().out
    assert written == {stage: (root / stage / "stage.json").stat().st_mtime_ns for stage in STAGES}
    assert second.count("kept from an earlier run") == len(STAGES)
    # Where report and figure are, and the table.
    assert second.split("\n\n")[1:3] == first.stdout.split("\n\n")[1:3]
    shown = re.fullmatch(r"Report: (.+) \(open it in a browser\)\nFigure: (.+)", second.split("\n\n")[1])
    assert shown is not None and all(Path(path).is_file() for path in shown.groups())


@pytest.fixture
def warm_processes(monkeypatch):
    """The PPO runs start in processes that need not import torch; those of `laboratory` are started as users do."""
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.mark.proof
def test_results_and_over_optimisation_add_to_the_report_on_the_same_models(laboratory, tmp_path, warm_processes):
    root, _ = laboratory
    trained = (root / "reward_model" / "stage.json").stat().st_mtime_ns
    report = tmp_path / "RESULTS.md"
    common = ["--root", str(root), "--report", str(report), *MINIATURE]
    summaries = results.main([*common, "--seeds", "1", "2"])
    assert [line.method for line in summaries] == ["SFT", "best-of-2", "PPO, seed 1", "PPO, seed 2"]
    assert summaries[2].kl != summaries[3].kl
    # As long as a window of the report.
    overopt.main(
        [*common[:-1], str(overopt.WINDOW * 2), "--overopt_preset", str(short_preset(tmp_path)), "--pairs", "4"]
    )
    assert len(read_rows(root / "overopt_reward_model" / "pairs.jsonl")) == 4
    text = report.read_text()
    assert "| PPO, seed 2 " in text and "| highest gold | 1 to 8 |" in text
    assert all((tmp_path / figure).is_file() for figure in ("results.png", "overopt.png"))
    assert str(root) not in text and str(REPOSITORY) not in text
    assert (root / "reward_model" / "stage.json").stat().st_mtime_ns == trained


@pytest.mark.proof
def test_algorithms_and_adapters_are_compared_on_the_same_models(laboratory, tmp_path, monkeypatch, warm_processes):
    root, _ = laboratory
    report = tmp_path / "RESULTS.md"
    monkeypatch.setattr(compare, "VARIANTS", {name: compare.VARIANTS[name] for name in (compare.BASELINE, "RLOO")})
    monkeypatch.setattr(compare, "SHORT_VARIANTS", {})
    monkeypatch.setattr(lora, "LAYOUTS", {lora.REWARD_ADAPTER: lora.LAYOUTS[lora.REWARD_ADAPTER]})
    common = ["--root", str(root), "--report", str(report), *MINIATURE, "--seeds", "1", "2"]
    outcomes = compare.main(common)
    assert outcomes["RLOO"][0].explained_variance is None and outcomes["RLOO"][0].kl != outcomes["RLOO"][1].kl
    layouts = lora.main(common)
    assert list(layouts) == [compare.BASELINE, f"LoRA, {lora.REWARD_ADAPTER}"]
    assert layouts[compare.BASELINE] == outcomes[compare.BASELINE]
    assert (root / "lora_adapter_reward_adapter_too_seed_1/final/policy/adapter_model.safetensors").is_file()
    judged = json.loads((root / "reward_adapter" / "agreement.json").read_text())
    assert judged["pairs"] <= 8 and 0 <= judged["reward_model_agrees_with_gold"] <= 1
    text = report.read_text()
    assert f"score on {100 * judged['reward_model_agrees_with_gold']:.1f} % of the held-out pairs" in text
    assert "| RLOO | " in text and "no critic" in text and "points of win-rate, " in text


def short_preset(folder):
    """The preset of the long run with steps of two prompts."""
    preset = shutil.copy(overopt.OveroptArguments().overopt_preset, folder)
    lines = Path(preset).read_text().splitlines()
    sizes = {"rollout_batch_size": 2, "rollout_per_device_batch_size": 2, "step_batch_size": 2}
    sizes |= {"step_per_device_batch_size": 2}
    kept = [line for line in lines if line.split(":")[0] not in sizes]
    Path(preset).write_text("\n".join([*kept, *(f"{name}: {size}" for name, size in sizes.items())]))
    return preset
