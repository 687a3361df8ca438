"""What a run achieved, the table of a game's rows, and what the table says."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from examples.games.pipeline import DEMONSTRATIONS, Experiment, Row, best_of_groups, table_of
from examples.games.rows import BEST, GRPO, MAIN
from examples.games.train import read_rows
from examples.mini_farm.base import EOS
from examples.mini_farm.stages import MARKER

TURNS, SCORES, EXPLAINED = "objective/turns", "objective/scores", "ppo/val/explained_variance"
PLAYER, IMITATION, CHOSEN, OPTIMAL = "the demonstrations", "imitation of them", "best of 8 of its games", "optimal play"


@dataclass(frozen=True)
class Play:
    """How games went."""

    won: float
    """Games won, or questions answered rightly, in %."""
    turns: float
    """Turns of a game, in the mean; a lost one counts with the turns that it had."""
    kl: float | None = None
    """To the model of the demonstrations, in nats per game; None for what no model played."""


@dataclass(frozen=True)
class Outcome:
    """The results of one run."""

    play: Play
    """Of the held-out games after the run."""
    curve: list[tuple[float, float]]
    """Mean score and turns of the games of each step; empty without steps."""
    explained_variance: float | None
    """Of the returns by the critic, mean over the last quarter of the steps; None without a critic."""
    seconds: float
    """Time of rollouts and updates; without steps, of the games and their imitation."""


def turns_of(row: Row) -> list[str]:
    """Returns the texts of the policy's turns in a row of an evaluation's table."""
    parts = row.get("turns", [{"role": "policy", "text": row["response"]}])
    return [part["text"].removesuffix(EOS).strip() for part in parts if part["role"] == "policy"]


def play_of(experiment: Experiment, rows: Sequence[Row]) -> Play:
    """Returns how the games of an evaluation's table went."""
    played = [turns_of(row) for row in rows]
    won = [experiment.game.is_won(row["columns"], turns) for row, turns in zip(rows, played, strict=True)]
    return Play(won=100 * fmean(won), turns=fmean(map(len, played)), kl=fmean(row["kl"] for row in rows))


def demonstrated(experiment: Experiment) -> tuple[Play, float]:
    """Returns how the player of the demonstrations plays, and the standard error of its turns."""
    rows = read_rows(experiment.data / DEMONSTRATIONS)
    turns = [row["turns"] for row in rows]
    return Play(won=100 * fmean(row["won"] for row in rows), turns=fmean(turns)), stdev(turns) / len(turns) ** 0.5


def imitated(experiment: Experiment, seed: int) -> Play:
    """Returns how the model of the demonstrations plays."""
    return play_of(experiment, table_of(experiment.run(GRPO, seed=seed), 0))


def chosen(experiment: Experiment, seed: int) -> Play:
    """Returns how the best games of each group of the model of the demonstrations went."""
    return play_of(experiment, best_of_groups(table_of(experiment.samples(seed), -1)))


def outcome_of(experiment: Experiment, row: str, seed: int) -> Outcome:
    """Returns the results of the run of `row` with `seed`, which is made if it is missing."""
    run = experiment.run(row, seed=seed)
    play = play_of(experiment, table_of(run, -1))
    if row == BEST:
        stages = experiment.samples(seed), experiment.best_imitated(seed)
        return Outcome(play, [], None, sum(_seconds_of(stage) for stage in stages))
    steps = [line for line in read_rows(run / "metrics.jsonl") if TURNS in line]
    explained = [line[EXPLAINED] for line in steps[-max(1, len(steps) // 4) :] if EXPLAINED in line]
    return Outcome(
        play=play,
        curve=[(line[SCORES], line[TURNS]) for line in steps],
        explained_variance=fmean(explained) if explained else None,
        seconds=sum(line["time/step"] for line in steps),
    )


def table(experiment: Experiment, outcomes: Mapping[str, Sequence[Outcome]], seeds: Sequence[int]) -> str:
    """Returns a table of mean ± standard deviation over the seeds, with a line for each row, and for what came before
    it and what is best.
    """
    optimal, counts_turns = experiment.game.optimal_turns, experiment.game.counts_turns
    columns = ["seeds", experiment.game.success, "turns", *(["from optimal play (turns)"] if counts_turns else [])]
    columns += ["KL (nats)", "explained variance", "seconds"]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]

    def line(name: str, plays: Sequence[Play], *others: str) -> str:
        turns = [play.turns for play in plays]
        kl = [play.kl for play in plays if play.kl is not None]
        cells = [
            str(len(plays)) if kl else "",
            _spread([play.won for play in plays], 1),
            _spread(turns, 2),
            *([_spread([number - optimal for number in turns], 2)] if counts_turns else []),
            _spread(kl, 1) if kl else "",
            *(others or ("", "")),
        ]
        return f"| {name} | " + " | ".join(cells) + " |"

    lines.append(line(PLAYER, [demonstrated(experiment)[0]]))
    lines.append(line(IMITATION, [imitated(experiment, seed) for seed in seeds]))
    if BEST in outcomes:
        lines.append(line(CHOSEN, [chosen(experiment, seed) for seed in seeds]))
    for name, runs in outcomes.items():
        explained = [run.explained_variance for run in runs if run.explained_variance is not None]
        seconds = _spread([run.seconds for run in runs], 0)
        lines.append(
            line(name, [run.play for run in runs], _spread(explained, 2) if explained else "no critic", seconds)
        )
    lines.append(line(OPTIMAL, [Play(won=100.0, turns=optimal)]))
    return "\n".join(lines)


def reading(experiment: Experiment, outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Returns what the table says: each row against the demonstrations, and the main row against the others."""
    player, error = demonstrated(experiment)
    sentences = [f"Ahead of {PLAYER}, with the standard error of the difference of the two means:", ""]
    for name, runs in outcomes.items():
        won, of_won = _difference(runs, player.won, _won)
        turns, of_turns = _difference(runs, player.turns, _turns)
        of_turns = (of_turns**2 + error**2) ** 0.5
        sentences.append(f"- {name}: {_gain(experiment, (won, of_won), (turns, of_turns))}")
    best = MAIN[experiment.name]
    sentences += ["", f"{best}, less each other row:", ""]
    for name, runs in outcomes.items():
        if name != best:
            gains = [_between(outcomes[best], runs, measure) for measure in (_won, _turns)]
            sentences.append(f"- {name}: {_gain(experiment, *gains)}")
    return "\n".join(sentences)


def margin(experiment: Experiment, runs: Sequence[Outcome]) -> float:
    """Returns by how many standard errors `runs` need fewer turns than the demonstrations."""
    player, error = demonstrated(experiment)
    turns, of_turns = _difference(runs, player.turns, _turns)
    return -turns / (of_turns**2 + error**2) ** 0.5


def _won(play: Play) -> float:
    return play.won


def _turns(play: Play) -> float:
    return play.turns


def _gain(experiment: Experiment, won: tuple[float, float], turns: tuple[float, float]) -> str:
    """A difference of games won, and of turns where they count."""
    text = f"{won[0]:+.1f} ± {won[1]:.1f} points"
    return text + (f"; {turns[0]:+.2f} ± {turns[1]:.2f} turns" if experiment.game.counts_turns else "")


def _mean(runs: Sequence[Outcome], measure: Callable[[Play], float]) -> tuple[float, float]:
    """The mean over the seeds, and its standard error."""
    numbers = [measure(run.play) for run in runs]
    return fmean(numbers), stdev(numbers) / len(numbers) ** 0.5


def _difference(runs: Sequence[Outcome], other: float, measure: Callable[[Play], float]) -> tuple[float, float]:
    mean, error = _mean(runs, measure)
    return mean - other, error


def _between(
    runs: Sequence[Outcome], others: Sequence[Outcome], measure: Callable[[Play], float]
) -> tuple[float, float]:
    mean, of_others = _mean(others, measure)
    gain, error = _difference(runs, mean, measure)
    return gain, (error**2 + of_others**2) ** 0.5


def _spread(numbers: Sequence[float], digits: int) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{fmean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}"


def _seconds_of(stage: Path) -> float:
    seconds: float = json.loads((stage / MARKER).read_text(encoding="utf-8"))["seconds"]
    return seconds
