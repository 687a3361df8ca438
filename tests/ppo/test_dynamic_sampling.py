"""Which prompts are replaced, by which, and in which place; each case by hand."""

import math
from dataclasses import replace

import torch

from alpaca_ppo import PPOConfig
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.ppo.dynamic_sampling import informative, replace_uninformative

ROUNDS = PPOConfig(dynamic_sampling=3, num_return_sequences=2)


def rows_of(scores):
    """Rollouts of prompts with the given scores, {prompt: [score of each response]}, one token for each point."""
    flat = [(prompt, score) for prompt, several in scores.items() for score in several]
    given = torch.tensor([score for _, score in flat])
    return {
        "prompt_ids": torch.tensor([prompt for prompt, _ in flat], dtype=torch.int64),
        "responses": torch.arange(len(flat)).unsqueeze(1).expand(-1, 9),
        "response_mask": torch.arange(9) < given.unsqueeze(1),
        "scores": given,
    }


class Prompts:
    """Draws the numbers from 10 on, but `drawn` first."""

    def __init__(self, *drawn):
        self.left, self.asked = [*drawn, *range(10, 30)], []

    def draw(self, count, *, without):
        self.asked.append((count, list(without)))
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    extra_prompts = 5


def replaced(first, *rounds, prompts=None, max_rounds=5):
    """The prompts and scores after all rounds, what was asked for, and the counts."""
    left, prompts = list(rounds), prompts or Prompts()
    given = []

    def rollout(fresh, number):
        given.append((fresh, number))
        return rows_of(left.pop(0))

    args = replace(ROUNDS, dynamic_sampling=max_rounds)
    result, counts = replace_uninformative(rows_of(first), prompts, rollout, args=args)
    found: dict[int, list[float]] = {}
    for prompt, score in zip(result["prompt_ids"].tolist(), result["scores"].tolist(), strict=True):
        found.setdefault(prompt, []).append(score)
    assert list(found) == list(dict.fromkeys(result["prompt_ids"].tolist())) and not left
    assert torch.equal(result["response_mask"].sum(dim=1), result["scores"].long())
    return list(found.items()), given, prompts.asked, counts


def test_groups_without_spread_are_replaced_in_their_places_until_all_have_one():
    found, given, asked, counts = replaced(
        {3: [1.0, 1.0], 4: [2.0, 0.0], 5: [3.0, 3.0]}, {10: [1.0, 2.0], 11: [4.0, 4.0]}, {12: [0.0, 1.0]}
    )
    assert found == [(10, [1.0, 2.0]), (4, [2.0, 0.0]), (12, [0.0, 1.0])]
    assert given == [([10, 11], 1), ([12], 2)]
    # The third time there is nothing left to replace.
    assert asked == [(2, [4]), (1, [10, 4]), (0, [10, 4, 12])]
    # Discarded: 1 + 1 + 3 + 3 tokens in the first round, 4 + 4 in the second.
    assert counts == {
        "objective/sampling_rounds": 2,
        "objective/redrawn_prompts": 3,
        "tokens/discarded": 16,
        "objective/uninformative_prompts": 0,
        "objective/extra_prompts": 5,
    }


def test_after_the_last_round_groups_without_spread_stay():
    found, given, _, counts = replaced({3: [1.0, 1.0], 4: [2.0, 0.0]}, {10: [2.0, 2.0]}, max_rounds=1)
    assert found == [(10, [2.0, 2.0]), (4, [2.0, 0.0])] and len(given) == 1
    assert (counts["objective/sampling_rounds"], counts["objective/uninformative_prompts"]) == (1, 1)


def test_gdpo_learns_from_scores_that_differ_in_a_source_that_counts():
    # Equal sums: of prompt 3, the first two sources differ; of 4, only a source of weight 0; of 5, one that scored
    # a single response; of 6, none.
    given = rows_of({prompt: [1.0, 1.0] for prompt in (3, 4, 5, 6)})
    given["scores_by_source"] = torch.tensor(
        [[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1], [1, 0, 0], [math.nan, 1, 0], [1, 0, 0], [1, 0, 0]]
    )
    given["scores_by_source"][4:6, 1] = math.nan
    gdpo = {"adv_estimator": "gdpo", "num_return_sequences": 2, "reward_weights": [1.0, 0.5, 0.0]}
    assert informative(given, PPOConfig(**gdpo)).tolist() == [True, True, *[False] * 6]
    assert not informative(given, PPOConfig()).any()


def test_a_single_response_that_is_left_of_a_group_has_no_spread():
    assert replaced({3: [1.0], 4: [2.0, 0.0]}, {10: [1.0, 2.0]})[0] == [(10, [1.0, 2.0]), (4, [2.0, 0.0])]


def test_a_fresh_prompt_without_a_response_replaces_nothing():
    found, given, _, counts = replaced({3: [1.0, 1.0], 4: [1.0, 1.0]}, {11: [0.0, 2.0]}, {}, max_rounds=2)
    assert found == [(3, [1.0, 1.0]), (11, [0.0, 2.0])]
    assert given == [([10, 11], 1), ([12], 2)]
    assert (counts["objective/redrawn_prompts"], counts["tokens/discarded"]) == (3, 2)
    assert counts["objective/uninformative_prompts"] == 1


def test_a_prompt_that_is_drawn_for_the_place_of_another_is_in_the_batch_once():
    # 4 is drawn again, in the place of 3, and 10, in the place of 4, has no response: 3 takes the place of 4.
    found, *_ = replaced({3: [1.0, 1.0], 4: [1.0, 1.0]}, {4: [0.0, 2.0]}, prompts=Prompts(4, 10), max_rounds=1)
    assert found == [(4, [0.0, 2.0]), (3, [1.0, 1.0])]
    # 5 to the place of 4, and 4 to that of 3, leave the place of 5, for which 10 has no response, to 3.
    found, *_ = replaced(
        {3: [1.0, 1.0], 4: [1.0, 1.0], 5: [1.0, 1.0]},
        {4: [0.0, 2.0], 5: [0.0, 3.0]},
        prompts=Prompts(4, 5, 10),
        max_rounds=1,
    )
    assert found == [(4, [0.0, 2.0]), (5, [0.0, 3.0]), (3, [1.0, 1.0])]
    # Its own place may be given to it too.
    assert replaced({3: [1.0, 1.0]}, {3: [0.0, 2.0]}, prompts=Prompts(3))[0] == [(3, [0.0, 2.0])]


def test_a_dataset_that_has_fewer_prompts_left_gives_those():
    schedule = PromptSchedule(3, PPOConfig(rollout_batch_size=3, step_batch_size=3, seed=1, total_epochs=4))
    step = schedule.prompts_of(0)
    spread = {prompt: [0.0, float(prompt == step.indices[0])] for prompt in step.indices}
    again = {prompt: [0.0, 1.0] for prompt in step.indices[1:]}
    result, counts = replace_uninformative(
        rows_of(spread),
        step,
        lambda fresh, number: rows_of({p: again[p] for p in fresh}),
        args=replace(ROUNDS, dynamic_sampling=9),
    )
    assert counts["objective/sampling_rounds"] == 1 and result["scores"].tolist() == [0.0, 1.0] * 3
    # All three of the next epoch, of which the one in the batch is passed over.
    assert counts["objective/extra_prompts"] in (2, 3)
