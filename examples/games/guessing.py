"""A number from 1 to 64, guessed with the answers "higher" and "lower": the environments, a player, optimal play.

The policy's turn is three words, the lowest and the highest number that it still believes possible and its guess, as in
`17 32 20`. Only the guess counts: what the policy believes is its own affair. A game ends with the right guess or after
12 turns. It is worth 1 if it is won, less 0.08 for each turn.

The player of the demonstrations guesses at random among the numbers that it believes possible, and forgets one answer
in ten: it then repeats the bounds of its last turn, and may contradict what it was told.
"""

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

HIGHEST = 64
"""The secret is between 1 and this."""
LIMIT = 12
"""Turns of a game."""
COST = 0.08
"""What a turn takes from the score of a game, which is 1 for a win."""
HIGHER, LOWER, UNCLEAR = "higher", "lower", "unclear"
PROMPT = "guess"
WORDS = (PROMPT, HIGHER, LOWER, UNCLEAR, *map(str, range(1, HIGHEST + 1)))
"""Every word is one token."""
TURN_LEN = 4
"""Tokens of a turn, its end included."""
RESPONSE_LEN = LIMIT * TURN_LEN + LIMIT - 1
"""Tokens of the longest game: every turn but the last has an answer of one word."""
FORGETS = 0.1
"""How often the player of the demonstrations forgets an answer."""


class Guess:
    """The conversation partner of a game. The score is the reward of the last turn."""

    def reset(self, secret: int) -> None:
        """Begins a game with the number `secret`."""
        self.secret, self.turns = secret, 0

    def reply(self, completion: str) -> str | tuple[None, float]:
        """Answers a turn, or ends the game with its score."""
        self.turns += 1
        guess = guess_of(completion)
        if guess == self.secret or self.turns == LIMIT:
            return None, score(won=guess == self.secret, turns=self.turns)
        return answer(guess, self.secret)


class GuessByTurn(Guess):
    """The same game with a reward for each turn: the turn's cost, and 1 for the turn that wins."""

    def reply(self, completion: str) -> tuple[str | None, float]:  # type: ignore[override]
        """Answers a turn and gives its reward."""
        said = super().reply(completion)
        if isinstance(said, str):
            return said, -COST
        return None, score(won=guess_of(completion) == self.secret, turns=1)


def score(*, won: bool, turns: int) -> float:
    """Returns what a game of `turns` turns is worth."""
    return float(won) - COST * turns


def guess_of(turn: str) -> int | None:
    """Returns the guess of a turn, its last word; None if that is no number."""
    last = turn.split()[-1:]
    return int(last[0]) if last and last[0].isdecimal() else None


def answer(guess: int | None, secret: int) -> str:
    """Returns the word that answers a wrong guess."""
    if guess is None:
        return UNCLEAR
    return HIGHER if guess < secret else LOWER


@cache
def optimal_turns(numbers: int = HIGHEST) -> float:
    """Returns the mean turns of the best player, whose secret is any of `numbers` numbers with the same probability.

    Of n numbers, one is found by the first guess, and the others lie below and above it: the sum of the turns is n plus
    the sums of both sides, which the middle makes smallest.
    """
    return _sum_of_turns(numbers) / numbers


@cache
def _sum_of_turns(numbers: int) -> int:
    if numbers == 0:
        return 0
    below = (numbers - 1) // 2
    return numbers + _sum_of_turns(below) + _sum_of_turns(numbers - 1 - below)


def play(secret: int, generator: random.Random) -> list[tuple[str, str | None]]:
    """Returns a game of the demonstrations: turns with the answer to each, None to the last one."""
    partner, low, high = Guess(), 1, HIGHEST
    partner.reset(secret)
    game: list[tuple[str, str | None]] = []
    while not game or game[-1][1] is not None:
        guess = generator.randint(low, high)
        turn = f"{low} {high} {guess}"
        said = partner.reply(turn)
        game.append((turn, said if isinstance(said, str) else None))
        if generator.random() >= FORGETS:
            low, high = (max(low, guess + 1), high) if said == HIGHER else (low, min(high, guess - 1))
    return game


def text_of(game: list[tuple[str, str | None]], end: str) -> str:
    """Returns a game as one text, with `end` after every turn but the last."""
    return " ".join(turn if said is None else f"{turn} {end} {said}" for turn, said in game)


def demonstrations(count: int, generator: random.Random, *, end: str) -> list[dict[str, Any]]:
    """Returns games of the player as rows of `prompt`, `completion`, `turns` and `won`."""
    rows = []
    for _ in range(count):
        secret = generator.randint(1, HIGHEST)
        game = play(secret, generator)
        won = guess_of(game[-1][0]) == secret
        rows.append({"prompt": PROMPT, "completion": " " + text_of(game, end), "turns": len(game), "won": won})
    return rows


def prompts(count: int, generator: random.Random) -> list[dict[str, Any]]:
    """Returns games to be played, as rows of `prompt` and `secret`."""
    return [{"prompt": PROMPT, "secret": generator.randint(1, HIGHEST)} for _ in range(count)]


def held_out(times: int) -> list[dict[str, Any]]:
    """Returns games to be played in evaluations: each secret `times` times."""
    return [{"prompt": PROMPT, "secret": secret} for secret in range(1, HIGHEST + 1) for _ in range(times)]


def is_won(row: Mapping[str, Any], turns: list[str]) -> bool:
    """Whether the last of the policy's `turns` names the secret of the dataset row."""
    return guess_of(turns[-1]) == row["secret"]
