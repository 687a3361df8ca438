"""Reward sources get copies: what one of them does to its arguments changes nothing for anybody else."""

import asyncio
import copy

import numpy as np
import pytest

from alpaca_ppo.rewards import FunctionReward, RewardScorer, build_reward

QUESTION = [{"role": "user", "content": "hi", "parts": [{"text": "hi"}]}]
FACTS = {"answer": ["x", "y"], "scores": {"a": [1, 2]}, "array": np.arange(3)}


def arguments():
    """Two responses to one prompt: as in a rollout, they share the dataset's row, and so its prompt and its facts."""
    row = {"prompt": copy.deepcopy(QUESTION), "facts": copy.deepcopy(FACTS), "level": 3}
    return [row["prompt"]] * 2, ["one two", "la"], [[5, 6, 2], [7, 2]], [row, row]


def destroy(prompts, completions, completion_ids, facts, level):
    """Changes everything that a source may change, in the first of two rows only."""
    completion_ids[0].pop()
    prompts[0][0]["parts"][0]["text"] = "changed"
    prompts[0].clear()
    completions[0][0]["content"] = "changed"
    facts[0]["answer"].pop()
    facts[0]["scores"]["a"][0] = facts[0]["array"][0] = 9
    level[0] = 9
    return [0.0, 0.0]


async def destroy_later(prompts, completions, completion_ids, facts, level):
    await asyncio.sleep(0)
    return destroy(prompts, completions, completion_ids, facts, level)


@pytest.mark.parametrize("first", [destroy, destroy_later])
def test_what_a_source_does_to_its_arguments_is_unknown_to_the_next_source_and_to_the_caller(first):
    seen = []

    def witness(**keywords):
        seen.append(copy.deepcopy(keywords))
        return [0.0, 0.0]

    async def late_witness(**keywords):
        await asyncio.sleep(0.01)
        return witness(**keywords)

    sources = [FunctionReward(function) for function in (first, witness, late_witness)]
    scorer = RewardScorer(sources, [1.0] * 3)
    given = arguments()
    scorer(*given)
    assert len(seen) == 2
    for keywords in seen:
        assert keywords["completion_ids"] == [[5, 6, 2], [7, 2]]
        assert keywords["prompts"] == [QUESTION, QUESTION]
        assert [answer[0]["content"] for answer in keywords["completions"]] == ["one two", "la"]
        assert keywords["level"] == [3, 3]
        assert str(keywords["facts"]) == str([FACTS, FACTS])
    assert str(given) == str(arguments())


def test_rows_that_share_an_object_are_separate_for_a_source():
    seen = []

    def judge(prompts, completions, completion_ids, facts, level):
        destroy(prompts, completions, completion_ids, facts, level)
        seen.append((prompts[1], facts[1]))
        return [0.0, 0.0]

    build_reward(judge)(*arguments())
    assert str(seen) == str([(QUESTION, FACTS)])
