"""The recipes of docs/recipes: each page shows its file, and each file trains, evaluates and reports on stand-ins."""

import json
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from alpaca_ppo.cli.commands import main
from examples.environments.arithmetic import calculate
from examples.rewards import boxed
from tests.docs.markdown import ROOT, blocks
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer

RECIPES = {
    "reward-model": "rlhf",
    "verifier": "gsm8k_qwen",
    "tools": "tool_use",
    "long-reasoning": "long_reasoning",
    "one-24gb-gpu": "four_roles_lora",
    "distillation": "distillation",
    "several-gpus": "several_gpus",
}
"""The file in examples/configs of each page."""
CHAT = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
)
COLUMNS = {
    "tatsu-lab/alpaca": ("instruction", "input", "output"),
    "openai/gsm8k": ("question", "answer"),
    "open-r1/DAPO-Math-17k-Processed": ("prompt", "solution"),
}
"""Of the data that the recipes load from the hub."""
STAND_IN = yaml.safe_load("""
{ dataset_config: null, dataset_train_split: "train[4:]", dataset_test_split: "train[:4]", query_len: 64,
  response_len: 8, rollout_batch_size: 4, step_batch_size: 4, step_per_device_batch_size: 2, max_steps: 2,
  eval_steps: 1, bf16: false, use_cpu: true, dtype: float32, report_to: none }
""")
"""What a recipe needs to run in a second; the rest stays as it is."""


def file_of(page: str) -> Path:
    return ROOT / f"examples/configs/{RECIPES[page]}.yaml"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> dict[str, str]:
    """A policy, a reward model and a reward adapter by their options, and rows with the columns of each dataset."""
    folder = tmp_path_factory.mktemp("stand_ins")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tiny_causal_lm("llama").save_pretrained(folder / "policy")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, pad_token_id=0)
    classifier.save_pretrained(folder / "reward")
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    get_peft_model(classifier, lora).save_pretrained(folder / "adapter")
    for name in ("policy", "reward", "adapter"):
        tokenizer.save_pretrained(folder / name)
    for dataset, columns in COLUMNS.items():
        rows = [dict.fromkeys(columns, f"w{10 + i} #### {i}") for i in range(12)]
        (folder / dataset.replace("/", "_")).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {
        "model_name_or_path": folder / "policy",
        "teacher_model_name_or_path": folder / "policy",
        "reward_model_name_or_path": folder / "reward",
        "reward_adapter": folder / "adapter",
    } | {dataset: (folder / dataset.replace("/", "_")).with_suffix(".jsonl") for dataset in COLUMNS}
    return {name: str(path) for name, path in files.items()}


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_trains_evaluates_and_reports_on_stand_ins(page, stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    given = yaml.safe_load(file_of(page).read_text())
    replaced = {name: value for name, value in stand_ins.items() if name in given}
    fewer = {"num_return_sequences": 2, "critic_pretraining_steps": 1, "warmup_steps": 1, "max_turn_tokens": 4}
    settings = STAND_IN | replaced | {name: value for name, value in fewer.items() if name in given}
    settings |= {"dataset_name": stand_ins[given["dataset_name"]], "output_dir": str(tmp_path / "run")}
    (tmp_path / "stand_in.yaml").write_text(yaml.safe_dump(settings))
    configs = ["--config", str(file_of(page)), "--config", str(tmp_path / "stand_in.yaml")]
    assert main(["train", *configs]) == 0
    assert "done: 2 steps" in capsys.readouterr().out
    results = tmp_path / "results"
    assert main(["evaluate", *configs, "--model", settings["output_dir"], "--results_dir", str(results)]) == 0
    assert main(["report", settings["output_dir"]]) == 0
    assert (results / "results.json").exists() and (tmp_path / "run/report.html").exists()


def test_every_page_shows_its_file_with_reasons():
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/recipes").glob("*.md")}
    assert set(pages) == {*RECIPES, "README"}
    for page, text in pages.items():
        if page != "README":
            file = file_of(page).read_text()
            assert [block.text for block in blocks(text, page, "yaml")] == [file], page
            assert file.count("# ") >= 6, page


def test_what_a_verifier_looks_for_is_what_the_prompt_asks_for():
    for page, form in (("verifier", "#### number."), ("tools", "#### number."), ("long-reasoning", "\\boxed{}.")):
        given = yaml.safe_load(file_of(page).read_text())
        assert any(given.get(name, "").endswith(form) for name in ("system_prompt", "user_template")), page


def test_a_boxed_number_is_right_if_it_is_the_solutions():
    texts = [r"so \boxed{1,234}", r"\boxed{7} no, \boxed{$1234$}", r"\boxed{1234} no, \boxed{7}", "1234", r"\boxed{ }"]
    assert boxed.correctness(texts, ["1234"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert boxed.correctness([[{"role": "assistant", "content": r"\boxed{7}"}]], ["7"]) == [1.0]


def test_the_calculator_works_out_arithmetic_and_runs_nothing_else():
    assert [calculate(text) for text in ("(3 + 4) * 2.5", "-7 / 2", "2 - -3")] == ["17.5", "-3.5", "5"]
    for text in ("__import__('os')", "2 ** 9", "True + 1", "'a' * 9", "1 if 1 else 2"):
        with pytest.raises(ValueError, match="only numbers, .*parentheses"):
            calculate(text)
    with pytest.raises(ValueError, match="at most 200 characters"):
        calculate("1+" * 200 + "1")
    with pytest.raises(SyntaxError):
        calculate("3 +")
