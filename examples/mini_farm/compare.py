"""A comparison of algorithms: `python -m examples.mini_farm.compare` adds a table to RESULTS.md.

Every algorithm runs with several seeds on the same models, and samples as many answers as the preset. The result is for
this small language and one setting of each option; no algorithm is tuned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from alpaca_ppo.config.parser import parse_args, read_yaml
from examples.mini_farm.evaluation import Summary
from examples.mini_farm.pipeline import Lab, LabArguments
from examples.mini_farm.plots import Metrics, read_metrics
from examples.mini_farm.quickstart import summaries_of
from examples.mini_farm.report import SECTIONS, machine, write_section
from examples.mini_farm.results import WINDOW, ResultsArguments

GROUP = 4
"""Answers to a prompt for the group estimators."""
BASELINE = "scalar critic (GAE)"
WITHOUT_CRITIC: dict[str, Any] = {
    "init_value_with_reward": False,
    "critic_learning_rate": None,
    "lam_critic": None,
    "vf_coef": 0.1,
}
"""The defaults of the preset's options that an estimator without a critic refuses."""
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "c51 critic": {"critic": "c51", "value_support": [-4.0, 4.0]},
    "hl_gauss critic": {"critic": "hl_gauss", "value_support": [-4.0, 4.0]},
    "quantile critic": {"critic": "quantile", "quantile_huber_kappa": 0.1},
    "iqn critic": {"critic": "iqn", "quantile_huber_kappa": 0.1},
    "k3 KL in the loss": {"kl_coef": 0.0, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "loss_agg_mode": "token-mean"},
    "GRPO": {"adv_estimator": "grpo", **WITHOUT_CRITIC},
    "RLOO": {"adv_estimator": "rloo", **WITHOUT_CRITIC},
}
"""The options that each line of the table changes in the preset."""
SHORT = 20
"""Tokens of a response in the second table. The supervised model's have 11 in the mean, and a tenth of them more than
this; trained policies write longer ones."""
SHORT_VARIANTS: dict[str, dict[str, Any]] = {
    f"{SHORT} tokens": {},
    f"{SHORT} tokens, penalty_reward_value": {"penalty_reward_value": -4.0},
    f"{SHORT} tokens, mask_truncated": {"mask_truncated": True},
    f"{SHORT} tokens, overlong_buffer_len": {"overlong_buffer_len": 8},
}
"""The options that each line of the second table changes, with `response_len` at `SHORT`."""
COLUMNS = {"gold": "gold score", "win_rate": "win-rate over SFT (%)", "kl": "KL to SFT (nats)"}


@dataclass(frozen=True)
class Outcome:
    """The results of one run."""

    gold: float
    win_rate: float
    kl: float
    explained_variance: float | None
    """Mean over the last steps; None without a critic."""
    seconds: float
    """Time of rollouts, scoring and updates."""
    truncated: float
    """Share of sampled responses that were truncated, in percent, over the last steps."""


def settings_of(name: str, preset: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of the variant `name`, with as many answers and the same KL coefficient as `preset`."""
    if name in SHORT_VARIANTS:
        return {"response_len": SHORT, **SHORT_VARIANTS[name]}
    settings = dict(VARIANTS[name])
    if settings.get("kl_loss_coef"):
        settings["kl_loss_coef"] = preset["kl_coef"]
    if "adv_estimator" in settings:
        settings["num_return_sequences"] = GROUP
        settings["rollout_batch_size"] = preset["rollout_batch_size"] // GROUP
        settings["total_episodes"] = preset["total_episodes"] // GROUP
    return settings


def outcome(summary: Summary, metrics: Metrics) -> Outcome:
    """Returns the results of one run, from its held-out answers and its metrics."""
    variances = [row["ppo/val/explained_variance"] for row in metrics[-WINDOW:] if "ppo/val/explained_variance" in row]
    return Outcome(
        gold=summary.gold,
        win_rate=100 * summary.win_rate,
        kl=summary.kl,
        explained_variance=fmean(variances) if variances else None,
        seconds=sum(row["time/step"] for row in metrics),
        truncated=100 * fmean(row["objective/truncated_fraction"] for row in metrics[-WINDOW:]),
    )


def outcomes_of(lab: Lab, folders: dict[str, Path]) -> list[Outcome]:
    """Returns the results of the PPO runs in `folders`, in the same order."""
    return [outcome(line, read_metrics(folders[line.method])) for line in summaries_of(lab, folders)[2:]]


def table(outcomes: Mapping[str, Sequence[Outcome]], **others: str) -> str:
    """Returns a table of mean ± standard deviation over the seeds, with a line for each variant.

    Its columns are `COLUMNS` and `others`, attributes of `Outcome` with their titles; by default explained variance and
    seconds.
    """
    columns = COLUMNS | (others or {"explained_variance": "explained variance", "seconds": "seconds"})
    digits = {"win_rate": 1, "seconds": 0, "truncated": 0}
    lines = ["| | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, runs in outcomes.items():
        cells = [_spread([getattr(run, key) for run in runs], digits.get(key, 2)) for key in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reading(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Returns a comparison of each variant with the scalar critic, in words."""
    base, sentences = outcomes[BASELINE], []
    for name, runs in outcomes.items():
        if name != BASELINE:
            gold = difference([run.gold for run in runs], [run.gold for run in base])
            kl = fmean(run.kl for run in runs) - fmean(run.kl for run in base)
            time_ratio = fmean(run.seconds for run in runs) / fmean(run.seconds for run in base)
            sentences.append(f"{name}: {gold} in gold score, {kl:+.1f} nats, {time_ratio:.2f} times the seconds.")
    return (
        f"Compared with the {BASELINE}, means over {len(base)} seeds; differences in gold score with the standard "
        "error of the difference of the two means:\n\n"
        + "\n".join(f"- {sentence}" for sentence in sentences)
        + "\n\nWith so few seeds, a difference below two standard errors is not significant. A higher gold score at a "
        "higher KL may only reflect a weaker penalty: with k3 in the loss and with GRPO's normalized rewards, the same "
        "coefficient has another effect. The seconds are from one machine, whose speed varies."
    )


def standard_error(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the standard error of the difference of two means, each of at least two numbers."""
    return (stdev(one) ** 2 / len(one) + stdev(other) ** 2 / len(other)) ** 0.5


def difference(one: Sequence[float], other: Sequence[float], digits: int = 2) -> str:
    """Returns the difference of two means with its standard error, which single numbers do not have."""
    gap = f"{fmean(one) - fmean(other):+.{digits}f}"
    return f"{gap} ± {standard_error(one, other):.{digits}f}" if min(len(one), len(other)) > 1 else gap


def _spread(numbers: Sequence[float | None], digits: int) -> str:
    known = [number for number in numbers if number is not None]
    return f"{fmean(known):.{digits}f} ± {stdev(known):.{digits}f}" if known else "no critic"


def main(argv: Sequence[str] | None = None) -> dict[str, list[Outcome]]:
    """Runs the missing stages, writes the report's section, and returns the results of each variant."""
    arguments, lab_arguments = parse_args([ResultsArguments, LabArguments], argv)
    lab, preset = Lab(lab_arguments), read_yaml(lab_arguments.ppo_preset)
    if lab_arguments.ppo_episodes is not None:
        preset["total_episodes"] = lab_arguments.ppo_episodes
    outcomes, short = (
        {
            name: outcomes_of(lab, {f"{name} {seed}": _run(lab, name, seed, preset) for seed in arguments.seeds})
            for name in variants
        }
        for variants in (VARIANTS, SHORT_VARIANTS)
    )
    text = (
        f"Written by `make compare`: {len(VARIANTS)} algorithms, {len(arguments.seeds)} seeds each, on the same "
        f"supervised and reward models, {preset['total_episodes']} answers per run; mean ± standard deviation over the "
        f"seeds. GRPO and RLOO sample {GROUP} answers to each of a quarter of the prompts. Explained variance: mean of "
        f"the last {WINDOW} steps.\n\n{table(outcomes)}\n\n{reading(outcomes)}\n\n"
        f"### Responses of at most {SHORT} tokens\n\nThe same with `response_len: {SHORT}`, where the reward model "
        "scores texts that break off, and does not mind: a policy learns never to stop. Held-out answers may have 48 "
        f"tokens. Truncated: share of the sampled responses in the last {WINDOW} steps.\n\n"
        f"{table(short, truncated='truncated (%)')}\n\nMade on {machine()}."
    )
    write_section(Path(arguments.report), SECTIONS[2], text)
    print(f"\n{text}\n\nWritten: {arguments.report}")
    return outcomes


def _run(lab: Lab, name: str, seed: int, preset: Mapping[str, Any]) -> Path:
    if name == BASELINE:
        return lab.ppo(f"ppo_seed_{seed}", seed=seed)
    folder = "_".join(name.lower().replace(",", "").split())
    return lab.ppo(f"{folder}_seed_{seed}", seed=seed, overrides=settings_of(name, preset))


if __name__ == "__main__":
    main()
