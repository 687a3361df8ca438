"""The task of the long horizon, the flags of its rows, and the table, from runs that are only written down."""

import json
import random
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from PIL import Image

from alpaca_ppo import PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.parser import read_yaml
from examples.long_horizon import pipeline, table
from examples.long_horizon.base import build_tokenizer
from examples.long_horizon.other_data import (
    LEVELS,
    PROMPTS_PER_LEVEL,
    uneven_prompts,
)
from examples.long_horizon.other_rewards import passes, true_marks
from examples.long_horizon.pipeline import Experiment, HorizonArguments, flags_of
from examples.long_horizon.results import outcome_of
from examples.long_horizon.rows import ABLATIONS, OTHERS, PPO, ROWS, VAPO, Sizes, settings_of
from examples.long_horizon.task import (
    FORMS,
    PLURALS,
    QUERY_LEN,
    RESPONSE_LEN,
    STEPS,
    WORDS,
    Teacher,
    draw_prompt,
    grades,
    right_steps,
)

PRESET = HorizonArguments().ppo_preset


@pytest.fixture(scope="module")
def text():
    """A prompt and a text of the teacher for it."""
    generator = random.Random(3)
    prompt = draw_prompt(generator)
    return prompt, Teacher(0).write(prompt, generator)


def test_every_word_of_the_language_is_another_one():
    assert len(set(WORDS)) == len(WORDS) == 300 + 600 + 30 + 2 + 4


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


def test_every_ablation_differs_from_the_recipe_and_every_option_from_the_row_beside_it():
    def settings(name):
        return settings_of(name, Sizes(32, 640))

    assert all(settings(name) != settings(VAPO) for name in ABLATIONS)
    assert all(settings(name) != settings(beside) for name, (beside, _) in OTHERS.items())


def test_a_text_with_seven_of_ten_steps_right_passes():
    assert passes([PROMPT] * 3, [text_with(20), text_with(21), text_with(30)]) == [0, 1, 1]


def test_true_marks_count_steps_whose_mark_says_what_they_are():
    # All thirty marks say "right", of which 20 or 30 are; an empty text has no mark.
    assert true_marks([PROMPT] * 3, [text_with(20), text_with(30), ""]) == pytest.approx([2000 / 3, 1000, 0])


def test_uneven_prompts_are_equally_often_of_each_level_of_difficulty():
    prompts, right = uneven_prompts(0), Teacher(0).right
    means = [fmean(right[noun] for noun in prompt.split()[:STEPS]) for prompt in prompts]
    # Between 0.3 and 0.5, 0.65 and 0.75, 0.8 and 0.9.
    assert [sum(low < mean < high for mean in means) for low, high in LEVELS] == [PROMPTS_PER_LEVEL] * 3
    assert [len(prompt.split()) for prompt in prompts] == [QUERY_LEN] * len(prompts)
    assert prompts == uneven_prompts(0) != uneven_prompts(1)


def test_a_row_gets_the_critic_and_the_data_that_it_names(tmp_path, monkeypatch):
    stages, commands = {}, []

    def run_stage(folder, title, fill, *, settings, sources, parents=()):
        stages[folder.name] = (settings, [parent.name for parent in parents], fill)
        return folder

    monkeypatch.setattr(pipeline, "run_stage", run_stage)
    monkeypatch.setattr(pipeline.AutoConfig, "from_pretrained", lambda _: SimpleNamespace(n_positions=9))
    monkeypatch.setattr(pipeline.subprocess, "run", lambda command, **_: commands.append(command))
    experiment = Experiment(HorizonArguments(root=str(tmp_path)))
    runs = [
        experiment.run("small critic", seed=1),
        experiment.run("GRPO, pass or fail, uneven prompts", seed=1),
    ]
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


def test_an_unknown_row_is_refused():
    with pytest.raises(ValueError, match="no row 'PPPO'"):
        settings_of("PPPO", Sizes(32, 640))
    with pytest.raises(ValueError, match=r"no rows \['PPPO'\]"):
        table.TableArguments(rows=["PPPO", VAPO])
    with pytest.raises(ValueError, match="VAPO"):
        table.TableArguments(rows=[PPO])
    with pytest.raises(ValueError, match="two different seeds"):
        table.TableArguments(ablation_seeds=[1, 1])


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


def test_the_table_says_by_how_much_the_recipe_is_ahead(tmp_path, monkeypatch):
    right = {VAPO: 26, PPO: 20, "GRPO, 4 samples": 25, "HL-Gauss critic": 26, "GSPO loss": 26}

    def run(_, row, *, seed):
        return write_run(tmp_path / f"{row} {seed}", right[row] + 2 * seed, critic="GRPO" not in row)

    monkeypatch.setattr(Experiment, "run", run)
    common = ["--root", str(tmp_path), "--report", str(tmp_path / "RESULTS.md"), "--rows", *right]
    outcomes = table.main([*common, "--seeds", "1", "2", "--ablation_seeds", "1", "2"])
    assert [run.right for run in outcomes[VAPO]] == pytest.approx([90, 290 / 3])
    text = (tmp_path / "RESULTS.md").read_text()
    # 90 and 96.7: a standard deviation of 4.7, and a standard error of the difference of sqrt(4.7^2/2 + 4.7^2/2).
    assert "| VAPO | 2 | 93.3 ± 4.7 |" in text and "| no critic |" in text
    assert f"- against {PPO}: +20.0 ± 4.7" in text and "- against GRPO, 4 samples: +3.3 ± 4.7" in text
    assert "ahead of 1 of 2 of the rows" in text
    # The row beside which GSPO is set was not made.
    main, others = text.split("## Other options")
    assert "| HL-Gauss critic | VAPO | 93.3 ± 4.7 | +0.0 ± 4.7 | 3.0 ± 0.0 | 0.40 ± 0.00 | 0 ± 0 | 4 ± 0 |" in others
    assert "HL-Gauss" not in main and "GSPO" not in text
    assert str(tmp_path) not in text
    with Image.open(tmp_path / "results.png") as image:
        image.verify()
