"""Over-optimisation: `python -m examples.mini_farm.overopt` trains long under a weak KL penalty and draws what happens.

The reward model's score keeps rising, the annotators' rises and then falls (Gao et al., arXiv:2210.10760; AlpacaFarm,
arXiv:2305.14387, section 4.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from alpaca_ppo.config import parse_args
from examples.mini_farm.pipeline import Lab, LabArguments
from examples.mini_farm.plots import GOLD, KL, PROXY, plot_overoptimisation, read_metrics, smooth


@dataclass(frozen=True)
class OveroptArguments:
    """How long and how weakly held."""

    episodes: int = field(default=25600, metadata={"help": "Prompts of the run."})
    kl_coef: float = field(default=0.002, metadata={"help": "Weight of the KL penalty."})
    seed: int = field(default=1, metadata={"help": "Seed of PPO."})


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is not there yet, writes overopt.png and prints the best and the last step of each score."""
    arguments, lab_arguments = parse_args([OveroptArguments, LabArguments], argv)
    lab = Lab(lab_arguments)
    overrides = {"total_episodes": arguments.episodes, "kl_coef": arguments.kl_coef}
    metrics = read_metrics(lab.ppo("overopt", seed=arguments.seed, overrides=overrides))
    plot_overoptimisation(metrics, lab.root / "overopt.png")
    for key, name in ((PROXY, "proxy reward"), (GOLD, "gold score"), (KL, "KL")):
        means = smooth([row[key] for row in metrics])
        best = max(range(len(means)), key=means.__getitem__)
        highest = f"highest {means[best]:6.2f} at step {metrics[best]['step']}"
        print(f"{name:<13} first {means[0]:6.2f}   {highest:<28} last {means[-1]:6.2f}")
    print(f"Figure: {lab.root / 'overopt.png'}")


if __name__ == "__main__":
    main()
