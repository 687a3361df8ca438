"""TRL's runs of the tasks, without TRL: what it is given, and the scores that it reads."""

import json
from types import SimpleNamespace

import pytest
import torch

from examples.defaults.chain import TABLE, build_tokenizer, right
from examples.defaults.tasks import TASKS
from examples.defaults.trl_points import Points
from examples.defaults.trl_ppo import FunctionReward
from examples.defaults.trl_run import trl_grpo_settings, trl_inputs, trl_settings
from examples.mini_farm.against_trl import TRL_DEFAULTS, trl_optimizer_steps

PROMPT = "3 5 1 9 4 0 7 ="


def chain_of(prompt):
    result, *others = map(int, prompt.split()[:-1])
    words = []
    for other in others:
        words += [result, other, TABLE[result][other]]
        result = words[-1]
    return words


def scores_as_trl_reads_them(reward, tokens, pad):
    """At the last token before the first padding, of the backbone's states after padding has become token 0."""
    mask = tokens != pad
    backbone = getattr(reward, reward.base_model_prefix)
    given = {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask, "position_ids": mask.cumsum(1)}
    output = backbone(**given, return_dict=True, output_hidden_states=True, use_cache=False)
    scores = reward.score(output.hidden_states[-1])
    assert scores.shape == (*tokens.shape, 1) and scores.dtype == torch.float32
    last = mask.sum(dim=1) - 1
    return scores[torch.arange(len(tokens)), last].squeeze(-1).tolist()


def test_trl_reads_the_score_that_the_function_gives_to_the_text():
    tokenizer = build_tokenizer()
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    words = chain_of(PROMPT)
    wrong = [*words[:-1], (words[-1] + 1) % 10]
    # Right; wrong; right, but too short and ended early; right, and without an eos at the end.
    texts = [" ".join(map(str, chain)) for chain in (words, wrong, words[-3:], words)]
    endings = [[eos, pad], [eos, pad], [eos] + [pad] * 16, [3, 3]]
    rows = [tokenizer(f"{PROMPT} {text}")["input_ids"] + ending for text, ending in zip(texts, endings, strict=True)]
    reward = FunctionReward(right, tokenizer, query_len=8)
    # The last one has two words more than a chain.
    assert scores_as_trl_reads_them(reward, torch.tensor(rows), pad) == [1, 0, 0, 0]
    # A shorter prompt is padded on its left.
    padded = torch.tensor([[pad, *row] for row in rows])
    assert scores_as_trl_reads_them(FunctionReward(right, tokenizer, query_len=9), padded, pad) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    # A rate of 0.048 over the width; 4 passes of 2 steps over each of 3200 / 128, 1024 / 32 and 6400 / 128 rollouts.
    "task, episodes, rollout, length, rate, steps",
    [
        ("mini_farm", 3200, 128, 48, 3e-4, 200),
        ("long_horizon", 1024, 32, 211, 7.5e-4, 256),
        ("chain", 6400, 128, 19, 7.5e-4, 400),
    ],
)
def test_trl_gets_sizes_and_a_rate_and_keeps_its_defaults(task, episodes, rollout, length, rate, steps):
    settings = trl_settings(TASKS[task], seed=3)
    expected = {"total_episodes": episodes, "per_device_train_batch_size": rollout, "response_length": length}
    expected |= {"num_mini_batches": 2, "gradient_accumulation_steps": 1, "temperature": 1.0, "seed": 3}
    assert {name: settings[name] for name in expected} == expected
    assert settings["learning_rate"] == pytest.approx(rate)
    assert not settings.keys() & {*TRL_DEFAULTS, "num_ppo_epochs", "lr_scheduler_type", "warmup_steps"}
    assert trl_optimizer_steps({**settings, "num_ppo_epochs": 4}) == steps


def test_on_the_real_model_it_gets_the_schedule_and_temperature_of_the_others():
    settings = trl_settings(TASKS["sentences"], seed=3)
    assert (settings["lr_scheduler_type"], settings["temperature"]) == ("constant", 0.7)
    grpo = trl_grpo_settings("sentences", seed=3)
    same = ("learning_rate", "lr_scheduler_type", "temperature", "seed")
    assert [grpo[name] for name in same] == [settings[name] for name in same]
    # 512 answers, one optimizer step over 32 of them.
    expected = {"num_generations": 8, "per_device_train_batch_size": 32, "max_steps": 16, "max_completion_length": 32}
    assert {name: grpo[name] for name in expected} == expected
    assert not grpo.keys() & {"beta", "epsilon", "loss_type", "scale_rewards"}


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.plays])
def test_a_task_with_an_environment_is_refused(task):
    with pytest.raises(ValueError, match="no environments"):
        trl_settings(TASKS[task], seed=3)
    with pytest.raises(ValueError, match="no reward function"):
        trl_grpo_settings(task, seed=3)


def test_the_policy_is_saved_at_points_of_the_run_and_saving_takes_no_time(tmp_path, monkeypatch):
    now, saved = [0.0], []
    monkeypatch.setattr("time.process_time", lambda: now[0])

    class Slow:
        def save_pretrained(self, folder):
            saved.append(folder)
            now[0] += 100

    state = SimpleNamespace(global_step=0, max_steps=16)
    points = Points(tmp_path, 5, Slow(), Slow, lambda state: 32 * state.global_step)
    points.on_train_begin()
    for step in range(1, 17):
        state.global_step = step
        now[0] += 2
        points.on_optimizer_step()
        points.on_step_end(None, state)
    points.write(optimizer_steps=points.optimizer_steps)
    written = json.loads((tmp_path / "points.json").read_text())
    expected = [(32 * step, 2.0 * step) for step in (3, 6, 10, 13, 16)]
    assert [(point["responses"], point["seconds"]) for point in written["points"]] == expected
    assert written["optimizer_steps"] == 16 and len(saved) == 10


def test_the_critic_starts_from_the_reward_model_or_from_the_policy():
    files = {"model_name_or_path": "sft", "dataset_name": "prompts.jsonl"}
    farm = {"reward_model_name_or_path": "judge", "reward_funcs": "watched", "prompt_template": "{instruction}\n"}
    same = {"policy": "sft", "prompts": "prompts.jsonl", "query_len": 8}
    assert trl_inputs({**files, **farm}, 8) == {
        **same, "value_model": "judge", "reward_model": "judge", "prompt_template": "{instruction}\n"
    }  # fmt: skip
    assert trl_inputs({**files, "reward_funcs": "a:b"}, 8) == {
        **same, "value_model": "sft", "reward_function": "a:b", "prompt_template": "{prompt}"
    }  # fmt: skip
