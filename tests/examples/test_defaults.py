"""The search for defaults: its new task, the options of its rows, and what it takes up again."""

import random
from functools import partial

import pytest

from alpaca_ppo import PPOConfig, parse_args
from examples.defaults import compare, search
from examples.defaults.chain import QUERY_LEN, RESPONSE_LEN, STEPS, TABLE, Teacher, build_tokenizer, draw_prompt, right
from examples.defaults.records import fill, outcome, recorded, runs_of
from examples.defaults.rows import GIVEN_UP, KL_RULES, OF_SCALES, RLHF, ROWS, of_scale, settings_of
from examples.defaults.tasks import SMALL_TASKS, TASKS
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


@pytest.mark.parametrize("task", SMALL_TASKS)
@pytest.mark.parametrize("row", [row for row in compare.ROWS if row != compare.TRL])
def test_every_compared_program_samples_as_many_responses_and_is_evaluated_five_times(row, task):
    asked = compare.asked_of({"row": row, "task": task, "seed": 1})
    (args,) = parse_args([PPOConfig], flags_of({**TASKS[task].options(asked["settings"]), "output_dir": "unused"}))
    assert args.total_episodes * args.num_return_sequences == TASKS[task].sizes["total_episodes"]
    steps = args.total_episodes // args.rollout_batch_size
    # After the last step too, whatever eval_steps says.
    assert len({*range(args.eval_steps, steps + 1, args.eval_steps), steps}) == 5


def test_the_search_asks_for_every_row_and_keeps_the_fifth_task():
    asked = search.asked()
    assert len(asked) == len({tuple(run.values()) for run in asked})
    assert {run["row"] for run in asked} == {*ROWS, *OF_SCALES, *RLHF} - set(GIVEN_UP)
    assert {run["task"] for run in asked} == set(SMALL_TASKS) - {"chain"}


def test_runs_that_a_record_has_are_not_made_again(tmp_path):
    record, asked = tmp_path / "runs.jsonl", search.asked()[:3]
    made = []

    def make(run):
        made.append(run)
        return {"before": 1.0, "after": 2.0, "kl": 0.5, "processor_seconds": 3600.0}

    assert len(fill(record, asked[:1], make, jobs=1)) == 1
    runs = fill(record, asked, make, jobs=2)
    assert [run["task"] for run in made] == [run["task"] for run in asked] and len(runs) == 3
    assert recorded(record) == runs
    page = search.page(runs)
    assert "| the old defaults | 2.00 | 2.00 | 2.00 |  | 10800 |" in page
    assert "3 runs took 3.0 processor hours" in page


def test_seconds_of_a_row_are_those_of_one_seed():
    tries = ((search.OLD, 11, 1.0), (search.OLD, 12, 2.0), (search.CRITIC, 11, 3.0))
    runs = [{"row": row, "task": "mini_farm", "seed": seed, "after": after, "kl": 0.0, "processor_seconds": 10.0 * seed}
            for row, seed, after in tries]  # fmt: skip
    page = search.page(runs)
    assert f"| {search.OLD} | 1.50 (1.00, 2.00) |  |  |  | 115 |" in page
    assert f'"{search.CRITIC}" is ahead of "{search.OLD}" in 1 of 1 pairs' in page and ": +1.50 on mini_farm." in page


def test_rewards_of_another_scale_have_a_table_of_their_own():
    row = KL_RULES["`fixed`, 0.05"]
    runs = [{"row": name, "task": "mini_farm", "seed": 11, "after": after, "kl": 2 * after, "processor_seconds": 1.0}
            for name, after in ((of_scale(row, 0.1), 1.0), (row, 2.0), (of_scale(row, 10), 3.0))]  # fmt: skip
    page = search.page(runs)
    assert "| `fixed`, 0.05 | 1.00 at 2.0 nats | 2.00 at 4.0 nats | 3.00 at 6.0 nats |" in page
    assert f"| {of_scale(row, 10)} |" not in page


def test_settings_of_other_projects_are_shown_at_their_end_and_their_best():
    curve = [[0, 0.0, 1.0, 0.0], [10, 1.0, 3.0, 0.5], [20, 2.0, 2.0, 4.0]]
    run = {"row": "both", "task": "mini_farm", "seed": 11, "after": 2.0, "kl": 4.0, "processor_seconds": 2.0}
    assert "| both | 2.00 at 4.0 nats | 3.00 at 0.5 nats |" in search.page([{**run, "curve": curve}])


def test_a_failed_run_loses_no_other(tmp_path):
    record, asked = tmp_path / "runs.jsonl", search.asked()[:3]

    def make(run):
        if run == asked[0]:
            raise RuntimeError("no memory")
        return {"before": 1.0, "after": 2.0, "kl": 0.5, "processor_seconds": 1.0}

    with pytest.raises(RuntimeError, match="no memory"):
        fill(record, asked, make, jobs=1)
    assert [run["task"] for run in recorded(record)] == [run["task"] for run in asked[1:]]


def test_a_failed_run_says_how_it_ended():
    with pytest.raises(RuntimeError, match="(?s)status 1.*No module named examples.defaults.none"):
        outcome("examples.defaults.none", "nowhere", {"task": "none"})


def test_programs_are_compared_when_the_fastest_has_ended():
    def run(row, seed, seconds, scores):
        curve = [(size * 100, size * seconds / 2, score) for size, score in enumerate(scores)]
        return {"row": row, "task": "chain", "seed": seed, "before": scores[0], "after": scores[-1], "kl": 1.0,
                "processor_seconds": seconds, "curve": curve}  # fmt: skip

    # The second program takes twice as long: at its half it has the score of its second evaluation.
    runs = [run(compare.OURS, 1, 20.0, [0, 4, 8]), run(compare.OURS, 2, 20.0, [0, 6, 10]),
            run(compare.TRL, 1, 10.0, [0, 3, 5]), run(compare.TRL, 2, 10.0, [0, 3, 7])]  # fmt: skip
    assert compare.scores(runs, same_time=False)["chain"] == {compare.OURS: [8, 10], compare.TRL: [5, 7]}
    assert compare.scores(runs, same_time=True)["chain"] == {compare.OURS: [4, 6], compare.TRL: [5, 7]}
    page = compare.page(runs)
    # The standard error of each mean is 1, that of their difference the root of 2.
    chain = TASKS["chain"].title
    assert f"| {chain}: right (%) | 0.00 | 9.00 ± 1.00 |  | 6.00 ± 1.00 |" in page
    assert f"| {chain} |  | +3.00 ± 1.41 |" in page and f"| {chain} |  | -1.00 ± 1.41 |" in page
    assert f"| {chain} | {compare.TRL} | 10 | 1.0 | 5.00 |" in page
    ahead, behind = f"- Ahead of {compare.TRL} by more than two standard errors on", "behind by more than one on"
    assert f"{ahead} 1 of 1 tasks, {behind} none." in page and f"{ahead} 0 of 1 tasks, {behind} none." in page
    worse = {compare.TRL: {"chain": ([1.0, 2.0], [3.0, 4.0])}}
    assert f"{ahead} 0 of 1 tasks, {behind} {chain}." in compare.verdict(worse)
    # A third program that ends earlier moves the table, but not how the two stand to each other.
    third = [run(compare.GRPO, seed, 5.0, [0, 1, 1]) for seed in (1, 2)]
    assert compare.scores([*runs, *third], same_time=True)["chain"][compare.OURS] == [2, 3]
    assert compare.pairs([*runs, *third], same_time=True)[compare.TRL] == {"chain": ([4, 6], [5, 7])}


def test_between_two_evaluations_a_score_is_on_a_straight_line():
    # A quarter of the way from 10 to 14 seconds, and after the end.
    assert compare.score_at([(0, 0.0, 1.0), (8, 10.0, 3.0), (16, 14.0, 7.0)], 11.0) == 4.0
    assert compare.score_at([(0, 0.0, 1.0), (8, 10.0, 3.0)], 11.0) == 3.0


def test_the_pages_show_the_recorded_runs():
    runs = [run for run in recorded(compare.RECORD) if run["seed"] in compare.SEEDS]
    samples = compare.table(compare.scores(runs, same_time=False), runs)
    assert samples in compare.PAGE.read_text("utf-8")
    for row in (*compare.ROWS, compare.LORA):
        for task in filter(partial(compare.belongs, row), SMALL_TASKS):
            seeds = [run["seed"] for run in runs_of(runs, row, task)]
            assert sorted(seeds) == list(compare.SEEDS), (row, task)
