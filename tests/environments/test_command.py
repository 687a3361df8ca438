"""Environments by name: a run of the command, and the run that its run.yaml repeats."""

import pytest
import yaml
from datasets import Dataset

from alpaca_ppo.cli.evaluate import evaluate
from alpaca_ppo.cli.train import run_training
from tests.environments.test_interrupted_episodes import without_mismatch
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import metric_lines

GAME = '''
class Game:
    def reset(self, seed, **row):
        self.turns = seed % 2
        return f"w{10 + seed % 50}"

    def reply(self, completion):
        self.turns += 1
        return (f"w{self.turns}", 0.5) if self.turns < 3 else (None, 1.0)


def weather(city: str) -> str:
    """Says the weather.

    Args:
        city: where
    """
    return "sun"


def no_calls(text):
    return []
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_causal_lm("llama").save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    (tmp_path / "game.py").write_text(GAME)
    settings = {
        "model_name_or_path": "policy",
        "output_dir": "run",
        "environments": "game.py:Game",
        "query_len": 6,
        "response_len": 20,
        "max_turn_tokens": 3,
        "max_steps": 2,
        "rollout_batch_size": 6,
        "rollout_per_device_batch_size": 6,
        "step_batch_size": 6,
        "step_per_device_batch_size": 6,
        "save_steps": 0,
        "use_cpu": True,
        "report_to": "none",
        "report": False,
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(settings))
    return tmp_path


def test_a_run_without_a_dataset_is_repeated_and_its_policy_evaluated(folder, capsys):
    run_training(["--config", "run.yml"])
    options = yaml.safe_load((folder / "run/run.yaml").read_text())
    assert (options["environments"], options["dataset_name"]) == (["game.py:Game"], "")
    run_training(["--config", "run/run.yaml", "--output_dir", "again"])
    assert without_mismatch("again") == without_mismatch("run")
    assert 1 < metric_lines("run")[-1]["objective/turns"] < 4
    Dataset.from_list([{"prompt": "w9 "}, {"prompt": "w8 "}]).to_json("test.jsonl")
    flags = ["--config", "run/run.yaml", "--eval_dataset_name", "test.jsonl"]
    assert evaluate(["--model", "run/final/policy", *flags]) == 0
    assert "Game" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--environments", "game.py:Gone"], "environment 'game.py:Gone': game.py has no function 'Gone'"),
        (["--environments", "a=game.py:Game", "game.py:Game"], "give each its own name"),
        (["--environments", "a=game.py:Game", "b=game.py:Game"], r"environment_factory has \['a', 'b'\], so"),
        (["--tools", "game.py:weather"], "the policy has tools .weather., but the prompts are plain text"),
        (["--tool_call_parser", "game.py:none"], "tool_call_parser 'game.py:none': game.py has no function 'none'"),
        (["--max_steps", "null", "--total_episodes", "12"], "train_dataset is None, but max_steps is null"),
    ],
)
def test_what_names_do_not_fit_is_said(folder, flags, message):
    with pytest.raises(ValueError, match=message):
        run_training(["--config", "run.yml", *flags])
