"""docs/metrics.md lists every metric that a run writes, and none that no run writes."""

import re

import pytest
from datasets import Dataset

from tests.docs.test_names import documented_metrics
from tests.environments.chat import chat_bytes
from tests.environments.test_kinds import add
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_trainer


def distinct(prompts, completions, completion_ids, log_metric, **columns):
    log_metric("shortest", min(len(ids) for ids in completion_ids))
    return [float(len(set(ids))) for ids in completion_ids]


def all_but_one(completions, **columns):
    return [0.0 if row else None for row in range(len(completions))]


def last_word(completions, **columns):
    return [text.split()[-1] if text.split() else None for text in completions]


def call_once(text):
    return [{"name": "add", "arguments": {"a": len(text), "b": 1}}]


RUNS = {
    "tools": {
        "model": tiny_causal_lm("llama", vocab_size=300),
        "query_len": 400,
        "response_len": 80,
        "max_turn_tokens": 3,
        "max_turns": 2,
        "trainer_arguments": {
            "tools": [add],
            "tool_call_parser": call_once,
            "processing_class": chat_bytes(),
            "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "go"}]}] * 20),
        },
    },
    "everything in the loss, critic pretraining and an evaluation": {
        "teacher_model_name_or_path": "a folder",
        "kl_loss_coef": 0.001,
        "entropy_coef": 0.01,
        "positive_nll_coef": 0.1,
        "critic_pretraining_steps": 1,
        "failed_rewards": "mask",
        "eval_temperature": 1.0,
        "eval_num_samples": 2,
        "eval_success_above": 1.0,
        "eval_opponent": "reference",
        "trainer_arguments": {
            # The last one is longer than query_len.
            "eval_dataset": Dataset.from_list([*prompts(4), {"prompt": "w10 w11 w12 w13 w14"}]),
            "reward_funcs": [count_even, distinct, all_but_one],
        },
    },
    "a distributional critic on the sampler's log-probs": {
        "critic": "c51",
        "value_support": [-1.0, 6.0],
        "risk_level": "0.5",
        "old_policy": "rollout",
    },
    "no critic and no reference": {
        "adv_estimator": "remax",
        "reference": "none",
        "kl_coef": 0.0,
        "target_kl_stop": 1.0,
        "num_return_sequences": 2,
        "dynamic_sampling": 3,
        "overlong_buffer_len": 2,
        "trainer_arguments": {"eval_dataset": {"named": prompts(2)}, "metric_funcs": [distinct]},
    },
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines of metrics.jsonl of each run."""
    found = []
    for settings in RUNS.values():
        folder = tmp_path_factory.mktemp("run")
        if "teacher_model_name_or_path" in settings:
            settings = settings | {"teacher_model_name_or_path": str(folder / "teacher")}
            tiny_causal_lm("llama", seed=1).save_pretrained(folder / "teacher")
        tiny_trainer(folder, num_logged_rollouts=0, **settings).train()
        found.append(metric_lines(folder, timings=True))
    return found


def undocumented(written, documented) -> set[str]:
    """Metrics of `written` that no name of `documented` stands for; `<source>` in one stands for any word."""
    patterns = [re.sub(r"<\w+>", r"\\w+", name) for name in documented]
    return {name for name in written if not any(re.fullmatch(pattern, name) for pattern in patterns)}


def unwritten(written, documented) -> set[str]:
    """Names of `documented` that stand for no metric of `written`."""
    return {name for name in documented if not any(not undocumented([metric], [name]) for metric in written)}


def test_every_metric_is_documented(lines):
    written = {name for run in lines for line in run for name in line} - {"step"}
    assert undocumented(written, documented_metrics()) == set()


def test_every_documented_metric_is_written(lines):
    written = {name for run in lines for line in run for name in line}
    assert unwritten(written, documented_metrics()) == set()


def test_what_is_always_written_is_in_every_line_of_a_step(lines):
    always = {name for name, when in documented_metrics().items() if when.startswith("always")}
    steps = [line for run in lines for line in run if line["step"] > 0]
    assert len(steps) == 8
    assert [unwritten(line, always) for line in steps] == [set()] * 8


def test_a_metric_that_is_missing_on_either_side_is_found():
    assert undocumented(["a/b", "s/x"], ["s/<source>"]) == {"a/b"}
    assert unwritten(["s/x"], ["s/<source>", "a/b"]) == {"a/b"}
