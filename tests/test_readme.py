"""What the README shows a user is run: its Python with a tiny model in place of the hub's; its names exist."""

import dataclasses
import re
from pathlib import Path

import datasets
from datasets import Dataset

from alpaca_ppo import PPOConfig, ScriptArguments
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def test_the_python_of_the_readme_trains(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_causal_lm("llama").save_pretrained(tmp_path / "model")
    rows = [{"instruction": f"w{10 + i}", "input": "w5" if i % 2 else "", "output": "w6"} for i in range(8)]
    asked = []

    def load(name, split):
        asked.append((name, split))
        return Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = code.replace('"Qwen/Qwen2.5-0.5B-Instruct"', '"model"').replace("bf16=True", "use_cpu=True, save_steps=0")
    code = code.replace("query_len=128, response_len=128", "query_len=16, response_len=4, report_to=['none']")
    assert code.count('"model"') == 1 and code.count("response_len=4") == 1
    exec(compile(code, "README.md", "exec"), {})
    assert asked == [("tatsu-lab/alpaca", "train")]
    assert (tmp_path / "outputs/polite/final/policy/model.safetensors").is_file()


def test_every_option_that_the_readme_names_exists():
    fields = {f.name for cls in (PPOConfig, ScriptArguments) for f in dataclasses.fields(cls)}
    table = README.split("## Algorithms")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z][a-z_0-9]*)(?::[^`]*)?`", table))
    values = {"separate", "shared", "adapter", "horizon", "rollout", "correct", "c51", "quantile", "iqn", "k2"}
    values |= {"k1_clamped", "k3"}
    values |= {"grpo", "grpo_no_std", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    assert named - values <= fields, named - values - fields
    assert {"critic", "adv_estimator", "target_kl_stop", "use_kl_loss"} <= named


def test_the_files_that_the_readme_names_exist():
    for name in re.findall(r"`((?:examples|tests|alpaca_ppo)/[\w./-]+)`", README):
        assert (ROOT / name).exists(), name
