"""The comparison of critics: its runs, and that its page shows them."""

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.parser import parse_args
from examples.critics import compare
from examples.defaults.records import recorded
from examples.defaults.tasks import REAL_TASKS, TASKS
from examples.long_horizon.pipeline import flags_of
from tests.docs.markdown import ROOT


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("row", compare.SETTINGS)
def test_every_critic_samples_as_many_responses(row, task):
    asked = compare.asked_of({"row": row, "task": task, "seed": 1})
    (args,) = parse_args([PPOConfig], flags_of({**TASKS[task].options(asked["settings"]), "output_dir": "unused"}))
    assert args.total_episodes * args.num_return_sequences == TASKS[task].sizes["total_episodes"]
    assert args.uses_critic == (row != compare.GRPO) and row.startswith(args.critic_layout) == args.uses_critic
    in_groups = row in (compare.GRPO, compare.GROUPED) or (task in REAL_TASKS and row != compare.LARGE)
    assert args.num_return_sequences == (8 if in_groups else 1)
    evaluations = compare.REAL_EVALUATIONS if task in REAL_TASKS else compare.EVALUATIONS
    assert -(-args.total_episodes // args.rollout_batch_size // args.eval_steps) == evaluations


def test_on_every_task_the_rows_with_seeds_have_grpo_beside_them():
    for task in TASKS:
        seeds = {row: set(compare.seeds_of(row, task)) for row in compare.ROWS}
        assert seeds[compare.GRPO] and all(of_row <= seeds[compare.GRPO] for of_row in seeds.values())


def test_critics_are_compared_at_equal_samples_and_at_equal_time():
    def run(row, seed, seconds, scores):
        curve = [(size * 100, size * seconds / 2, score) for size, score in enumerate(scores)]
        explained = None if row == compare.GRPO else 0.25
        ends = {"before": scores[0], "after": scores[-1], "processor_seconds": seconds, "explained_variance": explained}
        return {"row": row, "task": "chain", "seed": seed, "curve": curve, **ends}

    # After 10 seconds the other has the score of its second evaluation, or half of that.
    runs = [run(compare.SEPARATE, 2, 20.0, [0, 4, 8]), run(compare.SEPARATE, 3, 40.0, [0, 6, 10]),
            run(compare.GRPO, 2, 10.0, [0, 3, 5]), run(compare.GRPO, 3, 10.0, [0, 3, 7])]  # fmt: skip
    assert compare.scores(runs, compare.SEPARATE, "chain") == [8, 10]
    assert compare.times(runs, compare.SEPARATE, "chain") == {2: 2, 3: 4}
    separate = "| separate, 4 passes | 9.0 ± 1.0 | -2.5 ± 1.5 |  | 0.25 ± 0.00 | 3.00 ± 1.00 | 2 |"
    grpo = "| GRPO | 6.0 ± 1.0 |  | -3.0 ± 0.0 |  | 1 | 2 |"
    assert compare.table(runs, "chain").splitlines()[2:] == [grpo, separate]
    # A row of one seed is compared with the same seed of others.
    runs.append(run(compare.SMALL, 3, 10.0, [0, 3, 9]))
    small = "| cached, small | 9.0 | +2.0 | -1.0 | 0.25 | 1.00 | 1 |"
    assert small in compare.table(runs, "chain").splitlines()
    # One that began elsewhere has no lead.
    runs.append(run("shared", 3, 10.0, [1, 3, 9]))
    assert "| shared | 9.0 |  |  | 0.25 | 1.00 | 1 |" in compare.table(runs, "chain").splitlines()
    runs.pop()
    title = TASKS["chain"].title
    assert f"## {title}\n\nRight (%); before training 0.00.\n\n{compare.table(runs, 'chain')}" in compare.page(runs)


def test_a_run_that_was_made_later_is_compared_with_what_grpo_took_then():
    def run(row, seconds, **then):
        curve = [(0, 0, 10, 0), (256, seconds / 2, 50, 1), (512, seconds, 60, 2)]
        return {"row": row, "task": "chain", "seed": 2, "curve": curve, "processor_seconds": seconds, **then}

    runs = [run(compare.GRPO, 10.0), run(compare.SMALL, 80.0, grpo_seconds=40.0), run(compare.SEPARATE, 5.0)]
    assert compare.times(runs, compare.SMALL, "chain") == {2: 2.0}
    assert compare.scores_after(runs, compare.SMALL, "chain", {2: 0.5}) == [50]
    assert compare.scores_after(runs, compare.GRPO, "chain", compare.times(runs, compare.SEPARATE, "chain")) == [50]


def test_scores_at_equal_kl_are_read_off_the_curve():
    run = {"row": compare.GRPO, "task": compare.REAL, "curve": [(0, 0, 30, 0), (256, 10, 50, 1.5), (512, 20, 60, 3.5)]}
    assert [compare.score_at_kl(run, nats) for nats in (0.75, 2.5, 5)] == [None, 55, None]
    further = {**run, "curve": [(0, 0, 32, 0), (256, 10, 52, 1.5), (512, 20, 72, 6)]}
    ends = {"seed": 2, "before": 30, "after": 60, "processor_seconds": 20, "explained_variance": None}
    table = compare.table([run | ends, further | ends], compare.REAL)
    # One of the two did not go as far as 5 nats.
    assert "GRPO = 1 | at a KL of 2 | runs |" in table and "| 53.4 ± 0.9 | 2 |" in table
    older = {**run, "curve": [point[:3] for point in run["curve"]]}
    assert compare.score_at_kl(older, 2.5) is None


def test_by_default_it_goes_on_with_its_own_record():
    (arguments,) = parse_args([compare.CriticArguments], [])
    assert (arguments.record, arguments.report) == (str(compare.RECORD), str(compare.PAGE))
    assert compare.REAL in arguments.tasks


def test_the_page_shows_the_recorded_runs():
    runs = recorded(compare.RECORD)
    assert compare.page(runs).partition("\n## ")[2] in compare.PAGE.read_text("utf-8")
    assert compare.summary(runs) in (ROOT / "README.md").read_text("utf-8")
