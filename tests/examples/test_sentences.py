"""The task of `make real`: which forms of a word count, what is a sentence, and which topics are held out."""

import pytest

from examples.sentences.task import BROKEN, HELD_OUT, TRAINING, all_used, draw_prompts, share_used, used, words_of

ASKED = "Write one short sentence that uses all of these words: dog, run, park."
PROMPTS = [f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n", [{"role": "user", "content": ASKED}]]
"""The text of a chat template, and a message."""


@pytest.mark.parametrize(
    ("word", "form"),
    [
        ("dog", "Dogs"),
        ("bake", "baking"),
        ("stop", "stopped"),
        ("carry", "carries"),
        ("cry", "crying"),
        ("play", "played"),
        ("box", "boxes"),
        ("wolf", "wolves"),
        ("write", "written"),
        ("visit", "visitor's visit"),
    ],
)
def test_a_word_counts_in_each_of_its_forms(word, form):
    assert used(word, f"He said {form}, twice.")


@pytest.mark.parametrize(
    ("word", "other"), [("car", "carpet"), ("toy", "to"), ("win", "window"), ("ice", "icy"), ("star", "staring")]
)
def test_another_word_with_the_same_beginning_does_not_count(word, other):
    assert not used(word, f"It was {other}, then.")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The dog ran through the park.", 1.0),
        ("The dog slept in the park.", 2 / 3),
        ("dog, run, park.", BROKEN),
        ("A dog, a run, and a park.", BROKEN),
        ("Dog run park.", BROKEN),
        ("Dogs and runs and a park.", BROKEN),
        ("These words: dog - run - park.", BROKEN),
        ("The words dog run park.", BROKEN),
        ("Running dogs are in the park and happy.", 1.0),
        ("A dog runs a park.", 1.0),
        ("A dog run parks there.", 1.0),
        ("The dog ran through the park. It was happy.", BROKEN),
        ("The dog ran through the park and", BROKEN),
        (f"The dog ran through the park{' and so on' * 20}.", BROKEN),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_share_of_the_words_in_one_whole_sentence(text, score):
    message = [{"role": "assistant", "content": text}]
    assert share_used(PROMPTS, [text, message]) == pytest.approx([score, score])
    assert all_used(PROMPTS[:1], [text]) == [float(score == 1)]


def test_held_out_prompts_are_of_other_topics_and_no_prompt_is_drawn_twice():
    rows = {split: draw_prompts(1000, split=split, seed=1) for split in (TRAINING, HELD_OUT)}
    drawn = {split: {frozenset(row["words"]) for row in rows[split]} for split in rows}
    assert [len(drawn[split]) for split in rows] == [1000, 1000]
    assert not drawn[TRAINING] & drawn[HELD_OUT]
    assert rows[TRAINING] == draw_prompts(1000, split=TRAINING, seed=1) != draw_prompts(1000, split=TRAINING, seed=2)
    assert all(words_of(row["prompt"]) == row["words"] for split in rows.values() for row in split)
