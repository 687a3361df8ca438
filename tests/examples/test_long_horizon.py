"""The task of the long horizon, the flags of its rows, and the table, from runs that are only written down."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from alpaca_ppo import PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.parser import read_yaml
from examples.long_horizon import pipeline
from examples.long_horizon.base import build_tokenizer
from examples.long_horizon.other_rewards import true_marks
from examples.long_horizon.pipeline import Experiment, HorizonArguments, flags_of
from examples.long_horizon.results import outcome_of
from examples.long_horizon.rows import ROWS, Sizes, settings_of
from examples.long_horizon.task import (
    FORMS,
    PLURALS,
    QUERY_LEN,
    RESPONSE_LEN,
    STEPS,
    Teacher,
    draw_prompt,
    grades,
    right_steps,
)

pytestmark = pytest.mark.proof

PRESET = HorizonArguments().ppo_preset


@pytest.fixture(scope="module")
def text():
    """A prompt and a text of the teacher for it."""
    generator = random.Random(3)
    prompt = draw_prompt(generator)
    return prompt, Teacher(0).write(prompt, generator)


def test_prompt_and_response_fill_the_lengths_of_the_preset_with_one_token_a_word(text):
    tokens = [build_tokenizer()(part)["input_ids"] for part in text]
    assert [len(part) for part in tokens] == [QUERY_LEN, RESPONSE_LEN - 1]
    assert (read_yaml(PRESET)["query_len"], read_yaml(PRESET)["response_len"]) == (QUERY_LEN, RESPONSE_LEN)
    unknown = build_tokenizer().unk_token_id
    assert unknown not in tokens[0] + tokens[1]


def test_the_teacher_marks_its_steps(text):
    prompt, written = text
    assert [mark == "right" for mark in written.split()[6::7]] == right_steps(prompt, written)
    assert 0 < sum(right_steps(prompt, written)) < STEPS


def test_a_step_is_right_on_its_own_and_its_mark_earns_nothing(text):
    prompt, written = text
    steps = [f"s{n} : {noun} -> {PLURALS[noun]} ; wrong" for n, noun in enumerate(prompt.split()[:STEPS], start=1)]
    assert all(right_steps(prompt, " ".join(steps)))
    noun = prompt.split()[4]
    wrong = next(form for form in FORMS if form[:-1] == noun and form != PLURALS[noun])
    steps[4] = steps[4].replace(PLURALS[noun], wrong)
    assert [n for n, right in enumerate(right_steps(prompt, " ".join(steps))) if not right] == [4]
    # 29 of 30 steps: 5 * (2 * 29/30 - 1). An empty text: -5. Without its first word nothing is in place.
    given = [" ".join(steps), "", " ".join(steps)[3:]]
    assert grades([prompt] * 3, given) == pytest.approx([14 / 3, -5, -5])


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_a_valid_configuration_with_as_many_samples_as_the_others(name):
    flags = flags_of(
        {
            "config": PRESET,
            **settings_of(name, Sizes(32, 640)),
            "output_dir": "unused",
            "model_name_or_path": "m",
            "dataset_name": "d",
        }
    )
    args, _ = parse_args([PPOConfig, ScriptArguments], flags)
    assert args.rollout_batch_size * args.num_return_sequences == 32
    assert args.total_episodes * args.num_return_sequences == 640


def test_true_marks_count_steps_whose_mark_says_what_they_are():
    # All thirty marks say "right", of which 20 or 30 are; an empty text has no mark.
    assert true_marks([PROMPT] * 3, [text_with(20), text_with(30), ""]) == pytest.approx([2000 / 3, 1000, 0])


def test_a_row_gets_the_critic_and_the_data_that_it_names(tmp_path, monkeypatch):
    stages, commands = {}, []

    def run_stage(folder, title, fill, *, settings, sources, parents=()):
        stages[folder.name] = (settings, [parent.name for parent in parents], fill)
        return folder

    monkeypatch.setattr(pipeline, "run_stage", run_stage)
    monkeypatch.setattr(pipeline.AutoConfig, "from_pretrained", lambda _: SimpleNamespace(n_positions=9))
    monkeypatch.setattr(pipeline.subprocess, "run", lambda command, **_: commands.append(command))
    experiment = Experiment(HorizonArguments(root=str(tmp_path)))
    runs = [experiment.run("small critic", seed=1), experiment.run("GRPO, pass or fail, uneven prompts", seed=1)]
    assert stages[runs[0].name][1] == ["data", "pretrained", "small_critic"]
    assert stages[runs[1].name][1] == ["uneven_data", "pretrained"]
    assert stages["small_critic"][1] == ["data", "small_base"]
    assert (stages["base"][0]["hidden_size"], stages["small_base"][0]["hidden_size"]) == (64, 32)
    for run in runs:
        stages[run.name][2](run)
    values = [dict(zip(command, command[1:], strict=False)) for command in commands]
    assert [Path(value["--dataset_name"]).parent.name for value in values] == ["data", "uneven_data"]
    assert [Path(value["--eval_dataset_name"]).parent.name for value in values] == ["data", "uneven_data"]
    assert values[0]["--value_model_name_or_path"] == str(tmp_path / "small_critic")
    assert "--value_model_name_or_path" not in values[1]


PROMPT = " ".join(["ba"] * STEPS + ["write"])


def text_with(right):
    """A text for `PROMPT` whose first `right` steps are right."""
    wrong = next(form for form in FORMS if form[:-1] == "ba" and form != PLURALS["ba"])
    return " ".join(f"s{n} : ba -> {PLURALS['ba'] if n <= right else wrong} ; right" for n in range(1, STEPS + 1))


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, right, *, critic, discarded=0):
    """A run of two steps of 100 tokens, after which `right` of the 30 steps of one held-out text are right, and two
    less of the other; 18 are before.
    """
    step = {"time/step": 2.0, "tokens/sampled": 100.0}
    step |= {"ppo/val/explained_variance": 0.4} if critic else {}
    step |= {"tokens/discarded": discarded} if discarded else {}
    grades = [5 * (2 * number / STEPS - 1) for number in (18, right - 1)]
    # The reward may be another one than the grade.
    last = {"objective/scores": 0.5, "eval/scores": 0.5, "eval/kl_sum_seq": 3.0}
    rows = [
        {"step": 0, "eval/scores": 0.5, "eval/kl_sum_seq": 0.0},
        {"step": 1, "objective/scores/grades": grades[0], **step},
        {"step": 2, "objective/scores/grades": grades[1], **last, **step},
    ]
    write_lines(folder / "metrics.jsonl", rows)
    for number, texts in enumerate([(18, 18), (right, right - 2)]):
        table = [{"prompt": PROMPT, "response": text_with(count)} for count in texts]
        write_lines(folder / "eval" / f"step_{number:06}.jsonl", table)
    return folder


def test_the_outcome_of_a_run_is_read_from_its_metrics_and_its_held_out_texts(tmp_path):
    outcome = outcome_of(write_run(tmp_path, 25, critic=True, discarded=7.0))
    assert outcome.curve == pytest.approx([60, 80])
    assert (outcome.right_before, outcome.right, outcome.mean_right) == pytest.approx((60, 80, 70))
    assert (outcome.kl, outcome.explained_variance, outcome.seconds, outcome.seconds_per_step) == (3.0, 0.4, 4.0, 2.0)
    assert outcome.tokens == 214
