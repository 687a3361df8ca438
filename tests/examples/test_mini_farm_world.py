"""The laboratory's instructions, demonstrations and annotators."""

import itertools
import random
from collections import Counter
from statistics import fmean

import pytest

from examples.mini_farm import demonstrations, grammar, lexicon
from examples.mini_farm.annotators import (
    LABEL_NOISE,
    Features,
    extract_features,
    gold,
    gold_score,
    prefers_first,
    win_rate,
)
from examples.mini_farm.splits import draw_splits, prompt_of

pytestmark = pytest.mark.proof

SIZES = {"sft": 400, "preference": 80, "unlabeled": 160, "val": 80}
TASK = {"asks": ["duck", "kitchen"], "avoids": ["barn"]}


def some_tasks(number=400, seed=0):
    return list(itertools.islice(grammar.tasks(seed), number))


def test_no_pair_of_instruction_and_input_occurs_twice_in_or_across_splits():
    splits = draw_splits(3, SIZES)
    assert {split: len(rows) for split, rows in splits.items()} == SIZES
    prompts = Counter(prompt_of(row) for rows in splits.values() for row in rows)
    assert set(prompts.values()) == {1}


def test_every_family_has_the_same_fraction_of_every_split():
    for split, rows in draw_splits(3, SIZES).items():
        families = Counter(task.family for task in some_tasks(SIZES[split]))
        assert set(families.values()) == {len(rows) // len(grammar.FAMILIES)}
    assert len(grammar.FAMILIES) >= 6


def test_splits_depend_on_the_seed_only():
    assert draw_splits(3, SIZES) == draw_splits(3, SIZES)
    assert draw_splits(3, SIZES)["val"] != draw_splits(4, SIZES)["val"]


def test_complete_answers_have_the_full_content_and_fragments_do_not():
    for task in some_tasks():
        for answer in task.answers:
            assert extract_features(answer, asks=task.asks, avoids=task.avoids).content == 1.0, (
                task.instruction,
                answer,
            )
        assert extract_features(task.fragment, asks=task.asks, avoids=task.avoids).content < 1.0


def test_the_annotators_rank_the_styles_of_demonstrations():
    rng = random.Random(0)
    tasks = some_tasks()
    gold_of = {
        style.__name__: fmean(gold_score(style(task, rng), vars(task)) for task in tasks)
        for style in demonstrations.STYLES
    }
    assert gold_of["warm"] > gold_of["plain"] > max(gold_of["careless"], gold_of["rude"], gold_of["rambling"])
    # Too much warmth lowers the score, so an answer can be over-optimised.
    assert gold_of["gushing"] < gold_of["plain"]
    assert min(gold_of, key=gold_of.get) == "evasive"


def test_features_of_an_answer_by_hand():
    answer = "I hope the duck, the duck is in the barn. Do not ask me again!"
    # Pairs: i-hope hope-the the-duck duck-the the-duck* duck-is is-in in-the the-barn barn-do do-not not-ask ask-me
    # me-again: 14, one (*) of them repeated. One of two words asked for, one wrong claim: 1/2 - 1/2 = 0.
    assert extract_features(answer, **TASK) == Features(
        content=0.0, warm=1, rude=1, length=15, repetition=pytest.approx(1 / 14)
    )


@pytest.mark.parametrize("closers", [1, 4])
def test_gold_rises_with_one_warm_sentence_and_falls_with_four(closers):
    answer = "You can find the duck in the kitchen."
    gain = gold_score(" ".join([answer, *lexicon.CLOSERS[:closers]]), TASK) - gold_score(answer, TASK)
    assert (gain > 0) == (closers == 1)


def test_an_answer_ties_with_itself_and_win_rates_of_both_sides_add_up_to_one():
    good, bad = "The duck is in the kitchen.", "I do not know."
    assert win_rate(good, good, TASK) == 0.5
    assert win_rate(good, bad, TASK) == 1.0 - win_rate(bad, good, TASK) == 1.0


def test_a_quarter_of_the_labels_is_flipped():
    rng = random.Random(0)
    labels = [prefers_first("The duck is in the kitchen.", "I do not know.", TASK, rng) for _ in range(4000)]
    # The whole pool prefers the first; 5 standard errors of a fraction of 0.75 over 4000 are 0.034.
    assert fmean(labels) == pytest.approx(1 - LABEL_NOISE, abs=0.034)


def test_gold_as_a_reward_function_takes_columns_and_ignores_the_others():
    answers = ["The duck is in the kitchen.", "In the barn."]
    columns = {"asks": [TASK["asks"]] * 2, "avoids": [TASK["avoids"]] * 2}
    scores = gold(prompts=["", ""], completions=answers, instruction=["", ""], **columns)
    assert scores == [gold_score(answer, TASK) for answer in answers]
