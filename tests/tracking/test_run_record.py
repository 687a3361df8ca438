"""run.yaml: what it holds is read back as the same options, or refused by name."""

import functools
import subprocess
from dataclasses import dataclass, replace

import pytest
import torch
import yaml
from accelerate import Accelerator
from peft import LoraConfig
from transformers import EarlyStoppingCallback, TrainerCallback

from alpaca_ppo import LoraArguments, PPOConfig, PPOTrainer, ScriptArguments, parse_args
from alpaca_ppo.cli.evaluate import EvaluateArguments
from alpaca_ppo.config.credentials import REMOVED
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.git_state import package_commit
from alpaca_ppo.config.modules import load_module
from alpaca_ppo.config.parser import ParsedOptions
from alpaca_ppo.distributed.accelerator import hardware
from alpaca_ppo.estimate_memory.estimator import EstimateArguments
from alpaca_ppo.tracking.run_record import RunRecord, import_name
from tests.independent.cases import CASES
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import acting, count_even, prompts, tiny_config, tiny_trainer

SECRET = "b1946ac92492d2347c6235b4d2611184"
ALL = [ScriptArguments, LoraArguments, PPOConfig]
SCRIPT = {"model_name_or_path": "me/model", "dataset_name": "data.jsonl", "reward_funcs": ["my.py:f", "my.py:g"]}
GIVEN = {
    "model": "me/model",
    "reward_funcs": count_even,
    "args": PPOConfig(),
    **dict.fromkeys(
        "train_dataset eval_dataset processing_class value_model ref_model peft_config reward_processing_classes "
        "metric_processing_classes metric_funcs tools environment_factory tool_call_parser "
        "callbacks accelerator".split()
    ),
    "optimizers": (None, None),
}


def command(script, lora=None, launcher=None):
    return RunRecord.of_command(ParsedOptions((script, lora or LoraArguments()), ("vapo",), ("a.yaml",)), launcher)


def written(path, content):
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return path


@pytest.mark.parametrize("name", ["odd values", *list(CASES)[::12]])
def test_a_run_file_is_read_back_as_the_same_options(name, tmp_path):
    odd = {
        "prompt_template": "{instruction}: {input}\n\tüñ 'x' \"y\" #z",
        "critic": "c51",
        "risk_level": 0.25,
        "report_to": ["none"],
        "max_grad_norm": 1e-7,
        "truncate_tokens": ["\n", "null", "1.5"],
        "total_epochs": None,
        "total_episodes": 640,
    }
    settings = acting(odd if name == "odd values" else CASES[name].settings())
    args = PPOConfig(output_dir=str(tmp_path), save_total_limit=None, **settings)
    script = ScriptArguments(**SCRIPT, import_modules=None, dataset_test_split="test[:3]")
    lora = LoraArguments(use_peft=True, lora_r=4, lora_target_modules=["q_proj"])
    content = command(script, lora).config(args)
    path = written(tmp_path / "run.yaml", {**content, "provenance": {"in_memory": {}}})
    assert parse_args(ALL, ["--config", str(path)]) == (script, lora, args)


def test_a_run_file_names_the_run_and_not_what_its_start_did_with_the_folder(tmp_path):
    script = ScriptArguments(**SCRIPT, resume_from_checkpoint="true")
    content = command(script).config(PPOConfig(overwrite_output_dir=True))
    # Otherwise the file would delete the run that it belongs to, or look for its checkpoint in another folder.
    assert (content["resume_from_checkpoint"], content["overwrite_output_dir"]) == (None, False)
    path = written(tmp_path / "run.yaml", content)
    again = parse_args(ALL, ["--config", str(path), "--total_epochs", "3", "--seed", "7"])[2]
    assert (again.total_epochs, again.seed) == (3, 7)


def test_provenance_says_how_where_and_with_what(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["my train.py", "--token", SECRET])
    record = command(ScriptArguments(**SCRIPT), launcher=("accelerate", "launch"))
    machine = hardware(Accelerator(cpu=True), PPOConfig())
    found = record.provenance(machine, resumed_step=20)
    assert found["command_line"] == f"'my train.py' --token '{REMOVED}'" and found["launcher"] == "accelerate launch"
    assert (found["presets"], found["config_files"]) == (["vapo"], ["a.yaml"])
    assert (found["folder"], found["resumed_after_step"], found["in_memory"]) == (str(tmp_path), 20, {})
    assert {"python", "torch", "transformers", "peft"} <= found["versions"].keys()
    assert (found["hardware"]["processes"], found["hardware"]["device"]) == (1, "cpu")
    # The file is YAML, whatever its values.
    assert yaml.safe_load(yaml.safe_dump(found)) == found
    assert found["package_commit"] == package_commit()
    assert found["git"] is None and record.provenance(machine)["resumed_after_step"] is None
    subprocess.run([*git, "init", "-q", "-b", "trunk"], check=True)
    (tmp_path / "my.py").write_text("x = 1\n")
    subprocess.run([*git, "add", "my.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "outputs.txt").write_text("not tracked")
    assert record.provenance(machine)["git"] == commit
    (tmp_path / "my.py").write_text("x = 2\n")
    assert record.provenance(machine)["git"] == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert record.provenance(machine)["git"] is None


@dataclass(frozen=True)
class JudgedConfig(PPOConfig):
    judge_api_key: str = argument("", "A key.")
    judge_url: str = argument("", "An address.")


class OwnTrainer(PPOTrainer):
    pass


def test_a_python_program_s_run_names_its_objects_and_no_file_of_it_holds_a_credential(tmp_path):
    url = "https://me:hunter2@judge/v1"
    config = JudgedConfig(**{**vars(tiny_config(tmp_path / "run")), "judge_api_key": SECRET, "judge_url": url})
    arguments = {
        "args": config,
        "callbacks": [TrainerCallback()],
        "peft_config": LoraConfig(r=4, target_modules="all-linear"),
    }
    trainer = tiny_trainer(tmp_path, trainer_class=OwnTrainer, trainer_arguments=arguments, report_to=["tensorboard"])
    trainer.train()
    text = (tmp_path / "run/run.yaml").read_text()
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or not any(s.encode() in path.read_bytes() for s in (SECRET, "hunter2")), path
    assert f"judge_api_key: {REMOVED}" in text and f"judge_url: https://{REMOVED}@judge/v1" in text
    assert f"judge_api_key: {REMOVED}" in (tmp_path / "run/final/policy/README.md").read_text()
    content = yaml.safe_load(text)
    assert content["provenance"]["in_memory"] == {
        "trainer_class": "tests.tracking.test_run_record.OwnTrainer",
        "model": "LlamaForCausalLM",
        "train_dataset": "Dataset of 40 rows with the columns prompt",
        "processing_class": type(tiny_tokenizer()).__name__,
        "peft_config": "LoraConfig",
        "callbacks[0]": "TrainerCallback",
        "reference": "LlamaForCausalLM",
    }
    # What has a name is an option.
    assert content["reward_funcs"] == ["tests.tiny_runs:count_even"]
    types = [ScriptArguments, LoraArguments, JudgedConfig]
    flags = ["--config", str(tmp_path / "run/run.yaml")]
    with pytest.raises(ValueError, match=r"run.yaml .*: trainer_class = t.*OwnTrainer; .*Give --model_name"):
        parse_args(types, flags)
    named = ["--model_name_or_path", "m", "--dataset_name", "d", "--use_peft", "true"]
    with pytest.raises(
        ValueError, match=r"Python program, which no file can bring back: trainer_class = .*\. Delete those lines"
    ):
        parse_args(types, [*flags, *named])
    del content["provenance"]["in_memory"]
    path = written(tmp_path / "edited.yaml", content)
    with pytest.raises(
        ValueError, match=r"lacks a credential in judge_api_key, judge_url, which .* \(--judge_api_key \.\.\.\)"
    ):
        parse_args(types, ["--config", str(path), *named])
    keys = ["--judge_api_key", SECRET, "--judge_url", url]
    assert parse_args(types, ["--config", str(path), *named, *keys])[2] == replace(config, critic_layout="separate")


def test_an_estimate_needs_the_models_of_a_run_alone(tmp_path):
    path = written(tmp_path / "run.yaml", {"provenance": {"in_memory": {"model": "M", "train_dataset": "D"}}})
    with pytest.raises(
        ValueError, match=r"bring back: model = M\. Give --model_name_or_path, or run that program again$"
    ):
        parse_args([EstimateArguments], ["--config", str(path)])
    assert parse_args([EstimateArguments], ["--config", str(path), "--model_name_or_path", "m"])
    # A later file names it, an earlier one would be overruled, and "" is no name.
    model, none = (written(tmp_path / f"{name or 'none'}.yaml", {"model_name_or_path": name}) for name in ("m", ""))
    assert parse_args([EstimateArguments], ["--config", str(path), "--config", str(model)])
    for flags in (["--config", str(model), "--config", str(path)], ["--config", str(path), "--config", str(none)]):
        with pytest.raises(ValueError, match="run.yaml is of a run .*: model = M"):
            parse_args([EstimateArguments], flags)


def test_an_evaluation_needs_what_it_measures_and_no_other_object(tmp_path):
    objects = {"model": "M", "train_dataset": "D", "callbacks": "C", "reward_funcs[0]": "f", "eval_dataset": "E"}
    path = written(tmp_path / "run.yaml", {"provenance": {"in_memory": objects}})
    flags = ["--config", str(path), "--model", "m"]
    with pytest.raises(
        ValueError, match=r"bring back: reward_funcs\[0\] = f; eval_dataset = E\. Give --reward_funcs, --e"
    ):
        parse_args([EvaluateArguments], flags)
    assert parse_args([EvaluateArguments], [*flags, "--reward_funcs", "a:b", "--eval_dataset_name", "d"])


@pytest.mark.parametrize("lost", ["auto", "copy_offloaded"])
def test_the_model_in_memory_to_which_a_run_measures_its_kl_is_missed_by_an_evaluation(tmp_path, lost):
    given = {**GIVEN, "model": tiny_causal_lm("llama", dtype=torch.bfloat16)}
    record = RunRecord.of_objects(PPOTrainer, {**given, "args": PPOConfig(reference=lost)})
    assert record.in_memory == {"model": "LlamaForCausalLM", "reference": "LlamaForCausalLM"}
    assert record.config(PPOConfig())["dtype"] == "bfloat16"
    path = written(tmp_path / "run.yaml", {"provenance": {"in_memory": dict(record.in_memory)}})
    flags = ["--config", str(path), "--model", "m"]
    with pytest.raises(ValueError, match=r"bring back: reference = LlamaForCausalLM\. Give --model_name_or_path, or"):
        parse_args([EvaluateArguments, PPOConfig], flags)
    for remedy in (["--model_name_or_path", "b"], ["--reference", "b"], ["--reference", "none", "--kl_coef", "0"]):
        assert parse_args([EvaluateArguments, PPOConfig], [*flags, *remedy])
    for other in (
        {"args": PPOConfig(reference="none", kl_coef=0.0)},
        {"args": PPOConfig(reference="b")},
        {"ref_model": "b"},
        {"model": "b"},
    ):
        assert "reference" not in RunRecord.of_objects(PPOTrainer, {**given, **other}).in_memory


def test_a_function_that_can_be_imported_is_named(tmp_path, monkeypatch):
    assert import_name(count_even) == "tests.tiny_runs:count_even"
    assert import_name(yaml.safe_load) == "yaml:safe_load" or import_name(yaml.safe_load) is None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/rewards.py").write_text(
        "def polite(x):\n    return x\n\nother = polite\npolite = print\n\ndef kind(x): pass\n"
    )
    module = load_module(str(tmp_path / "mine/rewards.py"), what="a reward")
    assert import_name(module.kind) == f"{tmp_path}/mine/rewards.py:kind"
    monkeypatch.chdir(tmp_path)
    assert import_name(module.kind) == "mine/rewards.py:kind"
    # Another object has taken its name.
    assert import_name(module.other) is None
    kind = module.kind
    monkeypatch.setattr(kind, "__module__", "__main__")
    monkeypatch.setattr("__main__.kind", kind, raising=False)
    assert import_name(kind) is None

    def local(x):
        return x

    for function in (local, lambda x: x, functools.partial(count_even), [].append, print):
        assert import_name(function) is None, function


def test_reward_weights_follow_their_sources_into_the_order_of_the_command():
    args = PPOConfig(reward_weights=[1.0, 2.0, 3.0, 4.0])
    sources = [count_even, "me/reward", "my.py:f", "me/other"]
    record = RunRecord.of_objects(PPOTrainer, {**GIVEN, "args": args, "reward_funcs": sources})
    content = record.config(args)
    assert content["reward_model_name_or_path"] == ["me/reward", "me/other"]
    assert content["reward_funcs"] == ["tests.tiny_runs:count_even", "my.py:f"]
    assert content["reward_weights"] == [2.0, 4.0, 1.0, 3.0] and not record.in_memory
    # Beside a source without a name they stay as they are.
    partly = RunRecord.of_objects(PPOTrainer, {**GIVEN, "args": args, "reward_funcs": [len, *sources[:3]]})
    assert partly.config(args)["reward_weights"] == [1.0, 2.0, 3.0, 4.0] and [*partly.in_memory] == ["reward_funcs[0]"]
    nameless = RunRecord.of_objects(PPOTrainer, {**GIVEN, "reward_funcs": [len, tiny_causal_lm, lambda x: x]})
    assert dict(nameless.in_memory) == {
        "reward_funcs[0]": "builtins.len",
        "reward_funcs[2]": "tests.tracking.test_run_record.test_reward_weights_follow_their_sources_into_the_order_of_"
        "the_command.<locals>.<lambda>",
    }
    assert nameless.options["reward_funcs"] == ["tests.tiny_models:tiny_causal_lm"]
    measured = RunRecord.of_objects(PPOTrainer, {**GIVEN, "metric_funcs": ["my.py:f", count_even, len]})
    assert measured.options["metric_funcs"] == ["my.py:f", "tests.tiny_runs:count_even"]
    assert dict(measured.in_memory) == {"metric_funcs[2]": "builtins.len"}


def test_names_stay_names_and_other_objects_are_described():
    given = {**GIVEN, "value_model": "me/critic", "ref_model": "me/ref", "processing_class": tiny_tokenizer()}
    record = RunRecord.of_objects(
        PPOTrainer, given | {"eval_dataset": {"mine": prompts(3)}, "callbacks": [EarlyStoppingCallback]}
    )
    content = record.config(PPOConfig())
    assert [content[name] for name in ("model_name_or_path", "value_model_name_or_path", "reference")] == [
        "me/model",
        "me/critic",
        "me/ref",
    ]
    assert dict(record.in_memory) == {
        "eval_dataset[mine]": "Dataset of 3 rows with the columns prompt",
        "processing_class": type(tiny_tokenizer()).__name__,
        "callbacks[0]": "transformers.trainer_callback.EarlyStoppingCallback",
    }
