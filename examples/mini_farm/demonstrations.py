"""The demonstrations of the supervised split: some are good, many are curt, careless, rude or too long.

A model that imitates all of them learns the language, but writes mediocre answers, which PPO can improve.
"""

import random
from collections.abc import Callable

from examples.mini_farm import lexicon
from examples.mini_farm.grammar import Task


def plain(task: Task, rng: random.Random) -> str:
    return rng.choice(task.answers)


def warm(task: Task, rng: random.Random) -> str:
    frame = rng.choice(("opener", "closer", "both"))
    opener = rng.choice(lexicon.OPENERS) if frame != "closer" else ""
    closer = rng.choice(lexicon.CLOSERS) if frame != "opener" else ""
    return " ".join(part for part in (opener, plain(task, rng), closer) if part)


def curt(task: Task, rng: random.Random) -> str:
    return task.fragment


def careless(task: Task, rng: random.Random) -> str:
    return task.mistake


def rude(task: Task, rng: random.Random) -> str:
    parts = [rng.choice(lexicon.RUDENESS), rng.choice((plain(task, rng), task.fragment))]
    rng.shuffle(parts)
    return " ".join(parts)


def rambling(task: Task, rng: random.Random) -> str:
    return f"{plain(task, rng)} As I said before, {rng.choice(task.answers)}"


def evasive(task: Task, rng: random.Random) -> str:
    return rng.choice(lexicon.EVASIONS)


def gushing(task: Task, rng: random.Random) -> str:
    openers, closers = rng.sample(lexicon.OPENERS, rng.choice((1, 2))), rng.sample(lexicon.CLOSERS, 2)
    return " ".join([*openers, plain(task, rng), *closers])


STYLES: dict[Callable[[Task, random.Random], str], float] = {
    plain: 0.20,
    warm: 0.14,
    curt: 0.20,
    careless: 0.16,
    rude: 0.12,
    rambling: 0.08,
    evasive: 0.05,
    gushing: 0.05,
}


def demonstrate(task: Task, rng: random.Random) -> str:
    """Returns an answer to `task` in a randomly drawn style."""
    (style,) = rng.choices(list(STYLES), weights=list(STYLES.values()))
    return style(task, rng)
