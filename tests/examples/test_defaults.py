"""The search for defaults: its new task, the options of its rows, and what it takes up again."""

import json
import random

import pytest

from alpaca_ppo import PPOConfig, parse_args
from examples.defaults import search
from examples.defaults.chain import QUERY_LEN, RESPONSE_LEN, STEPS, TABLE, Teacher, build_tokenizer, draw_prompt, right
from examples.defaults.rows import ROWS, settings_of
from examples.defaults.tasks import TASKS
from examples.long_horizon.pipeline import flags_of


def test_a_chain_is_right_by_its_last_digit_alone():
    prompt = "3 5 1 9 4 0 7 ="
    first, *others = map(int, prompt.split()[:-1])
    words = []
    for other in others:
        words += [first, other, TABLE[first][other]]
        first = words[-1]
    whole = " ".join(map(str, words))
    wrong = whole[:-1] + str((first + 1) % 10)
    # The steps before the last digit may say anything, but there must be as many.
    invented = " ".join(["0"] * (3 * STEPS - 1) + [str(first)])
    assert right([prompt] * 5, [whole, wrong, invented, whole + " 1", ""]) == [1, 0, 1, 0, 0]


def test_every_row_and_column_of_the_table_has_each_digit_once():
    assert all(sorted(line) == list(range(10)) for line in [*TABLE, *zip(*TABLE, strict=True)])


def test_the_teacher_writes_chains_that_fill_the_lengths_and_are_seldom_right():
    generator, teacher = random.Random(3), Teacher(1)
    prompts = [draw_prompt(generator) for _ in range(500)]
    texts = [teacher.write(prompt, generator) for prompt in prompts]
    for part, length in ((prompts, QUERY_LEN), (texts, RESPONSE_LEN - 1)):
        assert {len(ids) for ids in build_tokenizer()(part)["input_ids"]} == {length}
    assert 0.05 < sum(right(prompts, texts)) / 500 < 0.4


@pytest.mark.parametrize("task", TASKS)
def test_every_row_is_a_valid_configuration_with_as_many_responses_as_the_others(task):
    for row in ROWS:
        options = TASKS[task].options(settings_of(row, task))
        (args,) = parse_args([PPOConfig], flags_of({**options, "output_dir": "unused"}))
        assert args.total_episodes * args.num_return_sequences == TASKS[task].sizes["total_episodes"]
        assert args.rollout_batch_size * args.num_return_sequences == TASKS[task].sizes["rollout_batch_size"]


def test_a_search_goes_on_where_it_was_and_keeps_the_fifth_task(tmp_path):
    record = tmp_path / "search.jsonl"
    asked = list(search.missing(search.recorded(record)))
    assert len(asked) == len(ROWS) * 4 * 2 and {run["task"] for run in asked} == set(TASKS) - {"chain"}
    made = {**asked[0], "before": 1.0, "after": 2.0, "kl": 0.5, "processor_seconds": 3600.0}
    record.write_text(json.dumps(made) + "\n")
    assert list(search.missing(search.recorded(record))) == asked[1:]
    page = search.page(search.recorded(record))
    assert "| the defaults before | 2.00 (2.00) |" in page and "1 runs, 1.0 processor hours" in page
