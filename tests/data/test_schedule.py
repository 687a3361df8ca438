"""Which prompts each step takes: every prompt once an epoch, and ragged last steps."""

import pytest

from alpaca_ppo.config import PPOConfig
from alpaca_ppo.data.schedule import PromptSchedule


def schedule_of(num_prompts, **options):
    """Of four prompts a step."""
    return PromptSchedule(num_prompts, PPOConfig(rollout_batch_size=4, step_batch_size=4, seed=0, **options))


def test_an_epoch_visits_every_prompt_once_and_epochs_differ():
    # 10 prompts, 4 a step: steps of 4, 4, 2 in each of two epochs.
    schedule = schedule_of(10, total_epochs=2)
    steps = [schedule.prompts_of(step).indices for step in range(schedule.num_steps)]
    assert [len(step) for step in steps] == [schedule.num_prompts_at(i) for i in range(6)] == [4, 4, 2, 4, 4, 2]
    assert sorted(sum(steps[:3], [])) == sorted(sum(steps[3:], [])) == list(range(10))
    assert steps[:3] != steps[3:]
    assert [schedule.epoch_at(step) for step in range(7)] == [0.0, 0.4, 0.8, 1.0, 1.4, 1.8, 2.0]


def test_a_number_of_episodes_may_end_within_an_epoch():
    # 10 + 7 prompts at 4 a step: 4, 4, 2 | 4, 3.
    schedule = schedule_of(10, total_episodes=17)
    assert [len(schedule.prompts_of(step).indices) for step in range(schedule.num_steps)] == [4, 4, 2, 4, 3]
    assert [schedule.num_prompts_at(step) for step in range(schedule.num_steps)] == [4, 4, 2, 4, 3]
    assert schedule.epoch_at(5) == 1.7


def test_a_step_after_extra_prompts_begins_later_in_the_sequence_of_all_epochs():
    schedule = schedule_of(10, total_epochs=2)
    first, second = schedule.prompts_of(0).indices, schedule.prompts_of(1).indices + schedule.prompts_of(2).indices
    third = [index for step in range(3, 6) for index in schedule.prompts_of(step).indices]
    # From place 4 + 3 on: three of the first epoch, then one of the second that is not among them.
    step = schedule.prompts_of(1, 3)
    assert step.indices == second[3:] + [index for index in third if index not in second[3:]][:1]
    assert [len(schedule.prompts_of(step, 7).indices) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    passed_over = third.index(step.indices[3])
    assert step.extra_prompts == passed_over
    # Three more that are neither 0 nor the first ones of the second epoch.
    without = {0, *third[:4]}
    drawn = step.draw(3, without=without)
    left = [index for index in third[passed_over + 1 :] if index not in without]
    assert drawn == left[:3]
    assert step.extra_prompts == third.index(drawn[-1]) + 1 - 1
    # There are no more than 10 - 8 others, and none twice.
    assert len(set(step.draw(5, without=set(range(8))))) == 2
    assert first == schedule.prompts_of(0, 0).indices


def test_a_step_after_the_last_is_refused():
    with pytest.raises(ValueError, match="step 3 is outside the schedule of 3 steps"):
        schedule_of(10, total_epochs=1).prompts_of(3)


def test_a_run_may_be_given_as_a_number_of_steps():
    # Ten prompts are steps of 4, 4 and 2, so four steps are an epoch and 4 prompts.
    schedule = schedule_of(10, max_steps=4)
    assert (schedule.num_steps, schedule.num_episodes) == (4, 14)
    assert [len(schedule.prompts_of(step).indices) for step in range(4)] == [4, 4, 2, 4]
    assert schedule_of(10, max_steps=3).num_episodes == 10
    # A step of more prompts than there are takes all of them.
    assert (schedule_of(3, max_steps=5).num_steps, schedule.epoch_at(4)) == (5, 1.4)
