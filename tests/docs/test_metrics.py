"""docs/metrics.md lists every metric that a run writes, and none that no run writes."""

import re

import pytest

from tests.docs.test_names import documented_metrics
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_trainer


def distinct(prompts, completions, completion_ids, **columns):
    return [float(len(set(ids))) for ids in completion_ids]


RUNS = {
    "everything in the loss, critic pretraining and an evaluation": {
        "use_kl_loss": True,
        "entropy_coef": 0.01,
        "positive_nll_coef": 0.1,
        "critic_pretraining_steps": 1,
        "failed_rewards": "drop",
        "trainer_arguments": {"eval_dataset": prompts(4), "reward_funcs": [count_even, distinct]},
    },
    "a distributional critic on the sampler's log-probs": {
        "critic": "c51",
        "value_min": -1.0,
        "value_max": 6.0,
        "risk_level": "0.5",
        "old_policy": "rollout",
    },
    "no critic and no reference": {
        "adv_estimator": "remax",
        "reference": "none",
        "use_kl_in_reward": False,
        "target_kl_stop": 1.0,
        "num_return_sequences": 2,
        "dynamic_sampling": True,
        "curriculum": True,
        "overlong_buffer_len": 2,
    },
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines of metrics.jsonl of each run."""
    found = []
    for settings in RUNS.values():
        folder = tmp_path_factory.mktemp("run")
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
    assert len(steps) == 6
    assert [unwritten(line, always) for line in steps] == [set()] * 6


def test_a_metric_that_is_missing_on_either_side_is_found():
    assert undocumented(["a/b", "s/x"], ["s/<source>"]) == {"a/b"}
    assert unwritten(["s/x"], ["s/<source>", "a/b"]) == {"a/b"}
