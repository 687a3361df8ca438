"""examples/train_ppo.py as a user starts it: folders and files in, a trained model out."""

import os
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alpaca_ppo import LoraArguments, PPOConfig, PPOTrainer, ScriptArguments, parse_args
from alpaca_ppo.cli.train import run_training
from alpaca_ppo.data import loading
from alpaca_ppo.presets import preset_names, preset_path
from alpaca_ppo.trainer import from_arguments
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path) -> Path:
    """A run of two steps with a reward model and a reward function, as a YAML file."""
    tiny_causal_lm("llama").save_pretrained(tmp_path / "policy")
    tiny_sequence_classifier("llama", seed=1).save_pretrained(tmp_path / "reward")
    for name in ("policy", "reward"):
        tiny_tokenizer().save_pretrained(tmp_path / name)
    prompts(20).to_json(tmp_path / "train.jsonl")
    prompts(4).to_json(tmp_path / "test.jsonl")
    (tmp_path / "my_rewards.py").write_text(
        "async def brief(prompts, completions, **columns):\n    return [-float(len(c.split())) for c in completions]\n"
    )
    settings = {
        "model_name_or_path": str(tmp_path / "policy"),
        "reward_model_name_or_path": str(tmp_path / "reward"),
        "reward_funcs": f"{tmp_path / 'my_rewards.py'}:brief",
        "reward_weights": [1.0, 0.1],
        "dataset_name": str(tmp_path / "train.jsonl"),
        "eval_dataset_name": str(tmp_path / "test.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "init_value_with_reward": True,
        "query_len": 4,
        "response_len": 4,
        "rollout_batch_size": 10,
        "rollout_per_device_batch_size": 10,
        "step_batch_size": 5,
        "step_per_device_batch_size": 5,
        "eval_steps": 1,
        "save_steps": 1,
        "use_cpu": True,
        "report_to": "none",
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_the_script_trains_evaluates_saves_and_resumes(config, tmp_path):
    stats = run_training(["--config", str(config)])
    assert {"objective/scores/reward", "objective/scores/brief", "eval/scores"} <= stats.keys()
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/final/policy")
    # The run's own file repeats it, in another folder.
    run_training(["--config", str(tmp_path / "run/run.yaml"), "--output_dir", str(tmp_path / "again")])
    assert metric_lines(tmp_path / "again") == lines
    first, again = (yaml.safe_load((tmp_path / name / "run.yaml").read_text()) for name in ("run", "again"))
    assert first["reward_weights"] == [1.0, 0.1] and first["provenance"]["config_files"] == [str(config)]
    assert again["provenance"]["config_files"] == [str(tmp_path / "run/run.yaml")]
    assert {k: v for k, v in again.items() if first[k] != v}.keys() == {"output_dir", "provenance"}
    run_training(
        ["--config", str(config), "--resume_from_checkpoint", str(tmp_path / "run/checkpoint-1"), "--seed", "42"]
    )
    assert metric_lines(tmp_path / "run") == lines
    # YAML reads `true` as a boolean.
    config.write_text(config.read_text() + "resume_from_checkpoint: true\n")
    run_training(["--config", str(config)])
    assert metric_lines(tmp_path / "run") == lines


def test_the_script_refuses_what_it_can_before_it_loads_anything(config, tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("loaded before the mistake was found")

    for name in ("load_prompt_dataset", "load_processing_class", "PPOTrainer"):
        monkeypatch.setattr(from_arguments, name, load)
    (tmp_path / "run/final").mkdir(parents=True)
    for flags, message in (
        ([], "holds a finished run .* choose another output_dir"),
        (["--resume_from_checkpoint", "true"], "has no checkpoint; name one"),
        (["--resume_from_checkpoint", "checkpoint-7"], "checkpoint-7 is no folder"),
        (["--output_dir", str(config)], "output_dir is '.*run.yaml', .*Not a directory"),
        (["--output_dir", str(tmp_path / "new"), "--report_to", "smoke"], "report_to names 'smoke'"),
        (["--output_dir", str(tmp_path / "new"), "--model_name_or_path", "./no/such"], "model_name_or_path is './no"),
        (
            ["--output_dir", str(tmp_path / "new"), "--reward_funcs", "my_module.fn"],
            "reward_funcs holds 'my_module.fn'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run_training(["--config", str(config), *flags])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [("train.jsonl", "train", "main"), ("test.jsonl", None, None)]),
        (
            ["--eval_dataset_name", "null", "--dataset_test_split", "train[:2]"],
            [("train.jsonl", "train", "main"), ("train.jsonl", "train[:2]", "main")],
        ),
    ],
)
def test_each_dataset_is_read_with_its_own_configuration(config, monkeypatch, flags, expected):
    class Stop(Exception):
        pass

    asked = []

    def stop(*args, **kwargs):
        raise Stop

    def ask(name, *, split, config_name=None):
        asked.append((Path(name).name, split, config_name))

    for module in (from_arguments, loading):
        monkeypatch.setattr(module, "load_prompt_dataset", ask)
    monkeypatch.setattr(from_arguments, "PPOTrainer", stop)
    with pytest.raises(Stop):
        run_training(["--config", str(config), "--dataset_config", "main", *flags])
    assert asked == expected


def test_trust_in_remote_code_reaches_every_model_and_tokenizer(config, tmp_path, monkeypatch):
    loaded = []

    def record(auto_class):
        original = auto_class.from_pretrained

        def load(name, *args, **kwargs):
            loaded.append((auto_class.__name__, Path(name).name, kwargs["trust_remote_code"]))
            return original(name, *args, **kwargs)

        monkeypatch.setattr(auto_class, "from_pretrained", load)

    for auto_class in (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer):
        record(auto_class)
    monkeypatch.setattr(PPOTrainer, "train", lambda self, **kwargs: {})
    flags = ["--reference", str(tmp_path / "policy")]
    for trust in (False, True):
        loaded.clear()
        run_training(["--config", str(config), *flags, "--trust_remote_code", str(trust)])
        # Reference and policy; the reward model and the critic that starts from it, whose tokenizer is compared.
        assert sorted(loaded) == [
            *[("AutoModelForCausalLM", "policy", trust)] * 2,
            *[("AutoModelForSequenceClassification", "reward", trust)] * 2,
            ("AutoTokenizer", "policy", trust),
            *[("AutoTokenizer", "reward", trust)] * 2,
        ]


# Presets of the two other scripts are theirs to test.
PRESETS = [p for p in sorted((ROOT / "examples/configs").glob("*.yaml")) if not p.stem.endswith(("_sft", "_reward"))]
PRESETS += [preset_path(name) for name in preset_names()]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_valid(path):
    given = yaml.safe_load(path.read_text())
    required = {"model_name_or_path": "m", "dataset_name": "d"}
    flags = [text for name, value in required.items() if name not in given for text in (f"--{name}", value)]
    if not given.get("reward_funcs"):
        flags += ["--reward_funcs", "a:b"]
    parsed_args = parse_args([ScriptArguments, LoraArguments, PPOConfig], ["--config", str(path), *flags])
    for name, value in given.items():
        (parsed,) = [getattr(instance, name) for instance in parsed_args if hasattr(instance, name)]
        value = os.path.abspath(value) if name == "output_dir" else value
        assert parsed == (value if not isinstance(parsed, list) or isinstance(value, list) else [value]), name
