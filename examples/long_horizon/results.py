"""What a run achieved, the table of all rows, and what the table says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from examples.long_horizon.pipeline import evaluations_of, metrics_of
from examples.long_horizon.rows import ABLATIONS, MAIN, OTHERS, PPO, VAPO
from examples.long_horizon.task import right_steps, share_right

GRADE, KL, EXPLAINED = "objective/scores/grades", "eval/kl_sum_seq", "ppo/val/explained_variance"
RIVALS = (PPO, *(name for name in MAIN if name.startswith("GRPO")))
"""Rows that the recipe has to beat."""


@dataclass(frozen=True)
class Outcome:
    """The results of one run."""

    curve: list[float]
    """Right steps of the sampled responses in %, by step."""
    right_before: float
    """Right steps in % on the held-out prompts, sampled at temperature 1, before the run."""
    right: float
    """The same after it."""
    kl: float
    """KL to the pretrained model after the run, in nats per response."""
    explained_variance: float | None
    """Of the returns by the critic, mean over the last quarter of the steps; None without a critic."""
    seconds: float
    """Time of rollouts, scoring and updates."""
    tokens: float
    """Tokens sampled, those of discarded responses included."""

    @property
    def mean_right(self) -> float:
        """The mean of `curve`: how soon a run learns."""
        return fmean(self.curve)

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step."""
        return self.seconds / len(self.curve)


def outcome_of(run: Path) -> Outcome:
    """Returns the results of the run in the folder `run`."""
    _, *steps = metrics_of(run)
    before, *_, after = ([right_steps(row["prompt"], row["response"]) for row in rows] for rows in evaluations_of(run))
    explained = [row[EXPLAINED] for row in steps[-max(1, len(steps) // 4) :] if EXPLAINED in row]
    return Outcome(
        curve=[100 * share_right(row[GRADE]) for row in steps],
        right_before=100 * fmean(map(fmean, before)),
        right=100 * fmean(map(fmean, after)),
        kl=steps[-1][KL],
        explained_variance=fmean(explained) if explained else None,
        seconds=sum(row["time/step"] for row in steps),
        tokens=sum(row["tokens/sampled"] + row.get("tokens/discarded", 0.0) for row in steps),
    )


def table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Returns a table of mean ± standard deviation over the seeds, with a line for each main row and ablation."""
    columns = ("seeds", "right after the run (%)", "right during the run (%)", "KL (nats)", "explained variance")
    lines = ["| | " + " | ".join((*columns, "seconds", "seconds a step")) + " |", "|---" * (len(columns) + 3) + "|"]
    for name, runs in outcomes.items():
        if name in OTHERS:
            continue
        cells = [
            str(len(runs)),
            _spread([run.right for run in runs], 1),
            _spread([run.mean_right for run in runs], 1),
            _spread([run.kl for run in runs], 1),
            _explained(runs),
            _spread([run.seconds for run in runs], 0),
            _spread([run.seconds_per_step for run in runs], 2),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reading(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Returns what the table says: the recipe against its rivals, and what each of its parts is worth."""
    recipe, sentences = outcomes[VAPO], []
    for name in (*MAIN, *ABLATIONS):
        if name != VAPO and name in outcomes:
            gain, error = _difference(recipe, outcomes[name])
            sentences.append(f"against {name}: {gain:+.1f} ± {error:.1f}")
    known = [_difference(recipe, outcomes[name]) for name in RIVALS if name in outcomes]
    beaten = sum(gain > 2 * error for gain, error in known)
    return (
        "The right steps after the run of VAPO, in points, less those of each other row, with the standard error of "
        "the difference of the two means:\n\n"
        + "\n".join(f"- {sentence}" for sentence in sentences)
        + f"\n\nVAPO is ahead of {beaten} of {len(known)} of the rows of plain PPO and GRPO by more than two standard "
        "errors."
    )


def table_of_others(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Returns a table of the rows of `OTHERS`: mean ± standard deviation, and the difference to the row that each one
    changes, with its standard error.
    """
    lines = [
        "| | beside | right after the run (%) | difference (points) | KL (nats) | explained variance | tokens sampled "
        "(thousands) | seconds |",
        "|---" * 8 + "|",
    ]
    for name, (beside, _) in OTHERS.items():
        if name in outcomes and beside in outcomes:
            runs, (gain, error) = outcomes[name], _difference(outcomes[name], outcomes[beside])
            cells = [
                beside,
                _spread([run.right for run in runs], 1),
                f"{gain:+.1f} ± {error:.1f}",
                _spread([run.kl for run in runs], 1),
                _explained(runs),
                _spread([run.tokens / 1000 for run in runs], 0),
                _spread([run.seconds for run in runs], 0),
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _explained(runs: Sequence[Outcome]) -> str:
    known = [run.explained_variance for run in runs if run.explained_variance is not None]
    return _spread(known, 2) if known else "no critic"


def _difference(one: Sequence[Outcome], other: Sequence[Outcome]) -> tuple[float, float]:
    """Returns the difference of the means of `right`, and its standard error."""
    numbers = [[run.right for run in runs] for runs in (one, other)]
    error = sum(stdev(part) ** 2 / len(part) for part in numbers) ** 0.5
    return fmean(numbers[0]) - fmean(numbers[1]), error


def _spread(numbers: Sequence[float], digits: int) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{fmean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}"
