"""The comparison of critics: its runs, and that its page shows them."""

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.parser import parse_args
from examples.critics import compare
from examples.defaults.records import recorded
from examples.defaults.tasks import TASKS
from examples.long_horizon.pipeline import flags_of
from tests.docs.markdown import ROOT


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("row", compare.SETTINGS)
def test_every_critic_samples_as_many_responses(row, task):
    asked = compare.asked_of({"row": row, "task": task, "seed": 1})
    (args,) = parse_args([PPOConfig], flags_of({**TASKS[task].options(asked["settings"]), "output_dir": "unused"}))
    assert args.total_episodes * args.num_return_sequences == TASKS[task].sizes["total_episodes"]
    assert args.uses_critic == (row != compare.GRPO) and row.startswith(args.critic_layout) == args.uses_critic
    in_groups = row in (compare.GRPO, compare.GROUPED) or (task == compare.REAL and row != compare.LARGE)
    assert args.num_return_sequences == (8 if in_groups else 1)
    evaluations = compare.REAL_EVALUATIONS if task == compare.REAL else compare.EVALUATIONS
    assert -(-args.total_episodes // args.rollout_batch_size // args.eval_steps) == evaluations


def test_critics_are_compared_at_equal_samples_and_at_equal_time():
    def run(row, seed, seconds, scores):
        curve = [(size * 100, size * seconds / 2, score) for size, score in enumerate(scores)]
        ends = {"before": scores[0], "after": scores[-1], "processor_seconds": seconds, "explained_variance": 0.25}
        return {"row": row, "task": "chain", "seed": seed, "curve": curve, **ends}

    # After 10 seconds the other has the score of its second evaluation, or half of that.
    runs = [run(compare.SEPARATE, 2, 20.0, [0, 4, 8]), run(compare.SEPARATE, 3, 40.0, [0, 6, 10]),
            run(compare.GRPO, 2, 10.0, [0, 3, 5]), run(compare.GRPO, 3, 10.0, [0, 3, 7])]  # fmt: skip
    assert compare.scores(runs, compare.SEPARATE, "chain") == [8, 10]
    assert compare.times(runs, compare.SEPARATE, "chain") == {2: 2, 3: 4}
    page = compare.page(runs)
    # The columns: three cached critics, GRPO, separate with a pass, shared, separate with four, TRL's PPO and GRPO.
    title = TASKS["chain"].title
    rows = [line for line in page.splitlines() if line.startswith(f"| {title} |")]
    assert rows == [
        f"| {title} |  |  |  | 6.00 ± 1.00 |  |  | 9.00 ± 1.00 |  |  |",
        f"| {title} |  |  |  | 6.00 ± 1.00 |  |  | 3.50 ± 0.50 |  |  |",
        f"| {title} |  |  |  |  |  |  | -2.50 ± 1.12 |  |  |",
        f"| {title} |  |  |  | -3.00 ± 1.41 |  |  |  |  |  |",
        f"| {title} |  |  |  |  |  |  | 0.25 ± 0.00 |  |  |",
        f"| {title} |  |  |  | 1.00 ± 0.00 |  |  | 3.00 ± 1.00 |  |  |",
        f"| {title} |  |  |  | 2, 3 |  |  | 2, 3 |  |  |",
    ]


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
    assert [compare.score_at_kl(run, nats) for nats in (0.75, 2.5, 5)] == [40, 55, None]
    further = {**run, "curve": [(0, 0, 32, 0), (256, 10, 52, 1.5), (512, 20, 72, 6)]}
    table = compare.at_equal_kl([run, further])
    # One of the two did not go as far as 5 nats.
    assert table.splitlines()[2:] == ["| GRPO | 53.4 ± 0.9 |  |  |"]
    older = {**run, "curve": [point[:3] for point in run["curve"]]}
    assert compare.score_at_kl(older, 2.5) is None and compare.at_equal_kl([older]) == ""


def test_by_default_it_goes_on_with_its_own_record():
    (arguments,) = parse_args([compare.CriticArguments], [])
    assert (arguments.record, arguments.report) == (str(compare.RECORD), str(compare.PAGE))
    assert compare.REAL in arguments.tasks


def test_the_page_shows_the_recorded_runs():
    runs = recorded(compare.RECORD)
    assert compare.page(runs).partition("\n## ")[2] in compare.PAGE.read_text("utf-8")
    assert compare.summary(runs) in (ROOT / "README.md").read_text("utf-8")
