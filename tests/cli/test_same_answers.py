"""`evaluate` and `sample` answer a finished run's prompts as the run's own evaluation did, whatever the run set."""

import json

import pytest
import torch
import yaml
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from alpaca_ppo.cli.commands import main
from alpaca_ppo.cli.evaluate import evaluate
from alpaca_ppo.cli.train import run_training
from tests.integration.launching import write_run
from tests.tiny_runs import metric_lines, prompts, tiny_trainer

OBJECTS = '''
class Game:
    """Says a word after each turn of the policy."""

    def reset(self, seed, **row):
        self.turns = 0

    def reply(self, completion):
        self.turns += 1
        return f" w{10 + self.turns}", 0.5


def look_up(word: str) -> str:
    """Looks a word up.

    Args:
        word: any
    """
    return "w3 w4"


def find_calls(text):
    words = text.split()
    return [{"name": "look_up", "arguments": {"word": words[0]}}] if words else []


def size(completions, **columns):
    return [float(len(str(text))) for text in completions]


def sometimes(prompts, completions, completion_ids, **columns):
    return [None if ids[0] % 3 == 0 else float(len(ids)) for ids in completion_ids]
'''
CHAT = (
    "{% if tools %}w9 {% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ mark or 'w1' }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
CHATTING = {"user_template": "w5 {prompt}", "query_len": 32}
GAME = {"environments": "objects.py:Game", "response_len": 12, "max_turn_tokens": 3}
TOOLS = {"tools": "objects.py:look_up", "tool_call_parser": "objects.py:find_calls", **CHATTING}
RUNS = {
    "a template, stop strings and a sampled evaluation": {
        "prompt_template": "w30 {prompt}", "stop_strings": ["w1"], "eval_temperature": 0.7, "eval_num_samples": 2,
    },
    "truncate tokens": {"truncate_tokens": ["w7", "w9", "w20"], "truncate_after": 1, "response_len": 8},
    "a system prompt and arguments of the chat template": {
        "system_prompt": "w6", "chat_template_kwargs": {"mark": "w2"}, **CHATTING,
    },
    "an environment with few turns": {**GAME, "max_turns": 2},
    "an environment and sampling": {**GAME, "eval_temperature": 1.0, "seed": 5},
    "tools": {**TOOLS, "max_turns": 3, "max_turn_tokens": 2, "response_len": 12},
    "arguments of the model and a base in half precision": {
        "model_init_kwargs": {"attn_implementation": "eager"}, "dtype": "bfloat16", "use_peft": True,
    },
    "a reference of an adapter": {"use_peft": True, "lora_r": 2, "critic_layout": "adapter", "learning_rate": 0.05},
    "prompts that are cut": {"query_len": 2, "overlong_prompts": "truncate"},
    "a model's repetition penalty": {"repetition_penalty": 3.0, "response_len": 8},
    "several sources of which one fails": {
        "reward_funcs": ["objects.py:size", "objects.py:sometimes"], "reward_weights": [0.5, 2.0],
        "failed_rewards": "mask", "metric_funcs": ["objects.py:size"], "max_tokens_per_micro_batch": 16,
        "adv_estimator": "grpo", "num_return_sequences": 2, "rollout_batch_size": 4, "step_batch_size": 8,
    },
}  # fmt: skip


def check_evaluation(folder, *flags):
    """Compares what `evaluate` finds for `folder`/run with that run's last evaluation."""
    assert evaluate(["--config", "run/run.yaml", "--model", "run", "--results_dir", "results", *flags]) == 0
    evaluated = json.loads((folder / "results/results.json").read_text())["metrics"]
    found, expected = (
        {key: value for key, value in metrics.items() if key.startswith("eval/")}
        for metrics in (evaluated, metric_lines("run")[-1])
    )
    assert found == expected


@pytest.mark.parametrize("name", RUNS)
def test_a_runs_own_evaluation_is_repeated_to_the_digit(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = yaml.safe_load(write_run(tmp_path).read_text()) | {"max_steps": 1, "dataset_test_split": "train[:5]"}
    options |= {"save_steps": 0, "output_dir": "run", "report": False, **RUNS[name]}
    (tmp_path / "objects.py").write_text(OBJECTS)
    if "environments" in options:
        del options["reward_funcs"]
    if "user_template" in options:
        tokenizer = AutoTokenizer.from_pretrained("policy")
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained("policy")
    if penalty := options.pop("repetition_penalty", None):
        GenerationConfig.from_pretrained("policy", repetition_penalty=penalty).save_pretrained("policy")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(options))
    run_training(["--config", "config.yaml"])
    check_evaluation(tmp_path)
    if "eval_temperature" not in options:
        answers = [json.loads(line) for line in (tmp_path / "results/answers.jsonl").read_text().splitlines()]
        capsys.readouterr()
        flags = ["--prompts", "train.jsonl", "--num_prompts", "5", "--temperature", "0"]
        assert main(["sample", "run", *flags]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("policy: ")]
        assert shown == [f"policy: {answer['response'].strip() or '(empty)'}" for answer in answers]


@pytest.mark.parametrize("flag", ["--model_name_or_path", "--reference"])
def test_the_evaluation_of_a_model_in_memory_is_repeated_with_the_model_that_it_was(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("policy", dtype=torch.bfloat16)
    peft_config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    rows = prompts(5)
    rows.to_json("rows.jsonl")
    arguments = {"peft_config": peft_config, "eval_dataset": rows}
    tiny_trainer("run", model=model, trainer_arguments=arguments, total_episodes=10, learning_rate=0.05).train()
    assert metric_lines("run")[-1]["eval/kl_sum_seq"] != 0.0
    check_evaluation(tmp_path, "--eval_dataset_name", "rows.jsonl", flag, "policy")
