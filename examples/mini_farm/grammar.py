"""A seeded grammar: eight families of instructions, with answers and the words that a good answer contains.

Every draw is a `Task`. It carries the words that an answer must have (`asks`) and must not have (`avoids`), so that
annotators can judge any text. The styles of the demonstrations are in `demonstrations`.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from examples.mini_farm import lexicon


@dataclass(frozen=True)
class Task:
    """One instruction, with what is needed to write or to judge an answer to it."""

    family: str
    instruction: str
    input: str
    answers: tuple[str, ...]
    """Complete, correct answers in different words."""
    fragment: str
    """The shortest correct answer: curt and incomplete."""
    mistake: str
    """A fluent answer with a wrong or missing fact."""
    asks: tuple[str, ...]
    """Words that a good answer contains."""
    avoids: tuple[str, ...] = ()
    """Words that only a wrong answer contains."""


def locate(rng: random.Random) -> Task:
    animals, rooms = rng.sample(lexicon.ANIMALS, 3), rng.sample(lexicon.ROOMS, 3)
    facts = [f"The {animal} is in the {room}." for animal, room in zip(animals, rooms, strict=True)]
    at = rng.randrange(3)
    animal, room, elsewhere = animals[at], rooms[at], rooms[at - 1]
    return Task(
        "locate",
        f"Where is the {animal}?",
        " ".join(facts),
        (f"The {animal} is in the {room}.", f"You can find the {animal} in the {room}."),
        f"In the {room}.",
        f"The {animal} is in the {elsewhere}.",
        (animal, room),
        tuple(other for other in rooms if other != room),
    )


def describe(rng: random.Random) -> Task:
    building, (first, second) = rng.choice(lexicon.BUILDINGS), rng.sample(lexicon.QUALITIES, 2)
    landmark = rng.choice(lexicon.LANDMARKS)
    return Task(
        "describe",
        f"Describe the {building}.",
        f"{first}, {second}, near the {landmark}",
        (
            f"The {building} is {first} and {second}, and it stands near the {landmark}.",
            f"Near the {landmark} you can see the {building}, which is {first} and {second}.",
        ),
        f"It is {first}.",
        f"The {building} is {first}, and it stands near the {rng.choice(lexicon.LANDMARKS)}.",
        (building, first, second, landmark),
    )


def thank(rng: random.Random) -> Task:
    name, colour, gift = rng.choice(lexicon.NAMES), rng.choice(lexicon.COLOURS), rng.choice(lexicon.GIFTS)
    return Task(
        "thank",
        rng.choice((f"Write a note to thank {name}.", f"Thank {name} for a gift.")),
        f"a {colour} {gift}",
        (
            f"Dear {name}, thank you for the {colour} {gift}.",
            f"Thank you for the {colour} {gift}, {name}, it looks very good in my room.",
        ),
        f"Thanks, {name}.",
        f"Dear {name}, thank you for the {rng.choice(lexicon.GIFTS)}.",
        (name, "thank", colour, gift),
    )


def advise(rng: random.Random) -> Task:
    name, trouble, occasion = (
        rng.choice(lexicon.NAMES),
        rng.choice(list(lexicon.TROUBLES)),
        rng.choice(lexicon.OCCASIONS),
    )
    (remedy, keyword), (wrong, _) = lexicon.TROUBLES[trouble], lexicon.TROUBLES[rng.choice(list(lexicon.TROUBLES))]
    return Task(
        "advise",
        rng.choice((f"Give {name} some advice.", f"What should {name} do?")),
        f"{name} is {trouble} {occasion}.",
        (f"{name} should {remedy}.", f"If {name} is {trouble}, it is best to {remedy}."),
        f"{remedy.capitalize()}.",
        f"{name} should {wrong}.",
        (name, keyword),
    )


def compare(rng: random.Random) -> Task:
    superlative, order = rng.choice(list(lexicon.SUPERLATIVES.items()))
    animals = rng.sample(lexicon.ANIMALS, 3)
    best, *others = sorted(animals, key=order.index)
    return Task(
        "compare",
        f"Which animal is the {superlative}?",
        f"{animals[0]}, {animals[1]}, {animals[2]}",
        (f"The {best} is the {superlative}.", f"Of the three animals the {best} is the {superlative}."),
        f"The {best}.",
        f"The {others[0]} is the {superlative}.",
        (best, superlative),
        tuple(others),
    )


def pick(rng: random.Random) -> Task:
    category = rng.choice(list(lexicon.CATEGORIES))
    wanted = rng.sample(lexicon.CATEGORIES[category], 2)
    unwanted = [rng.choice(words) for other, words in lexicon.CATEGORIES.items() if other != category]
    listed = rng.sample(wanted + unwanted, 4)
    first, second = (word for word in listed if word in wanted)
    return Task(
        "pick",
        f"Name the {category}.",
        ", ".join(listed),
        (
            f"The {category} are the {first} and the {second}.",
            f"There are two {category}, the {first} and the {second}.",
        ),
        f"The {first}.",
        f"The {category} are the {first} and the {unwanted[0]}.",
        (category, first, second),
        tuple(unwanted),
    )


def cook(rng: random.Random) -> Task:
    name, vegetable, dish = rng.choice(lexicon.NAMES), rng.choice(lexicon.VEGETABLES), rng.choice(list(lexicon.DISHES))
    (method, verb), (wrong, _) = lexicon.DISHES[dish], lexicon.DISHES[rng.choice(list(lexicon.DISHES))]
    return Task(
        "cook",
        rng.choice((f"Tell {name} how to make it.", f"Explain the recipe to {name}.")),
        f"{vegetable} {dish}",
        (
            f"{name}, first wash the {vegetable}, then {method}.",
            f"To make {vegetable} {dish}, {name} has to wash the {vegetable} and {method}.",
        ),
        f"{method.capitalize()}.",
        f"{name}, first wash the {rng.choice(lexicon.VEGETABLES)}, then {wrong}.",
        (name, vegetable, verb),
    )


def invite(rng: random.Random) -> Task:
    name, event, day = rng.choice(lexicon.NAMES), rng.choice(lexicon.EVENTS), rng.choice(lexicon.DAYS)
    room = rng.choice(lexicon.ROOMS)
    return Task(
        "invite",
        f"Invite {name} to a {event}.",
        f"{day}, in the {room}",
        (
            f"Dear {name}, please come to the {event} in the {room} on {day}.",
            f"{name}, on {day} there is a {event} in the {room}, and you should be there.",
        ),
        f"Come on {day}.",
        f"Dear {name}, please come to the {event} on {rng.choice(lexicon.DAYS)}.",
        (name, event, room, day),
    )


FAMILIES: dict[str, Callable[[random.Random], Task]] = {
    draw.__name__: draw for draw in (locate, describe, thank, advise, compare, pick, cook, invite)
}


MAX_REDRAWS = 10_000


def tasks(seed: int) -> Iterator[Task]:
    """Yields tasks without end, cycling through the families; no pair of instruction and input occurs twice.

    Raises:
        ValueError: when a family has no new task, which happens after some twenty thousand tasks.
    """
    rng = random.Random(seed)
    seen: set[tuple[str, str]] = set()
    while True:
        for family, draw in FAMILIES.items():
            fresh = (
                task for task in (draw(rng) for _ in range(MAX_REDRAWS)) if (task.instruction, task.input) not in seen
            )
            task = next(fresh, None)
            if task is None:
                raise ValueError(
                    f"the family {family!r} has no new task after {len(seen)} tasks of all families; "
                    "ask for fewer rows, or add words to lexicon.py"
                )
            seen.add((task.instruction, task.input))
            yield task
