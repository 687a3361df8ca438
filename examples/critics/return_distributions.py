"""Trains scalar, c51, hl_gauss, quantile and iqn critics on known return distributions, and compares what they learned.

    python -m examples.critics.return_distributions        (two minutes on one core)

There are three prompts. The score of a response is drawn from the distribution of its prompt, whatever the response;
two of the distributions have the same mean. The policy is frozen (`critic_pretraining_steps`), gamma and lambda are 1,
and there is no KL penalty, so the return from every state of a response is its score, and the true distribution is
known. Writes a table and a figure.

How a policy uses such a critic is not shown here.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.functional import c51_atoms, quantile_midpoints
from alpaca_ppo.models import Critic
from examples.critics.distributions import DISTRIBUTIONS, QUARTILES, TAIL, Prediction, Predictions
from examples.critics.plots import plot_distributions

STEPS, DRAWS = 80, 240
_RATES = {"scalar": 0.005, "c51": 0.01, "hl_gauss": 0.01, "quantile": 0.005, "iqn": 0.005}
KINDS = tuple(_RATES)
CATEGORICAL = ("c51", "hl_gauss")
_WORDS = ("<pad>", "<eos>", "<unk>", "play", "steady", "gamble", "costly", *(f"w{i}" for i in range(9)))


class DistributionReward:
    """A reward function that draws each score from the distribution named by the prompt's last word."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """Returns a draw for each prompt, by inversion of the distribution function."""
        names = [prompt.split()[-1] for prompt in prompts]
        levels = torch.rand(len(names), generator=self.generator, dtype=torch.float64)
        scores = torch.zeros_like(levels)
        for name in set(names):
            selected = torch.tensor([other == name for other in names])
            scores[selected] = DISTRIBUTIONS[name].quantiles(levels[selected])
        return [float(score) for score in scores]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word, for sixteen words."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_policy(seed: int) -> LlamaForCausalLM:
    """Returns a randomly initialized Llama with one layer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(_WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def configuration(kind: str, output: Path, *, seed: int, steps: int = STEPS, draws: int = DRAWS) -> PPOConfig:
    """Returns the configuration of a run that trains only the critic, on `draws` returns per prompt in each step."""
    rows = len(DISTRIBUTIONS) * draws
    # Far below the standard deviations: in its quadratic zone, the Huber loss pulls quantiles towards the mean: the
    # quartiles of `steady` by 2.4 % of its deviation.
    own: dict[str, Any] = {"quantile_huber_kappa": 0.05, "num_atoms": 64}
    if kind in CATEGORICAL:
        own = {"value_support": [-8.0, 8.0], "num_atoms": 129}
    elif kind == "scalar":
        own = {}
    return PPOConfig(
        output_dir=str(output),
        save_steps=0,
        seed=seed,
        use_cpu=True,
        report_to=["none"],
        num_logged_rollouts=0,
        query_len=2,
        response_len=2,
        rollout_batch_size=len(DISTRIBUTIONS),
        num_return_sequences=draws,
        step_batch_size=rows // 12,
        rollout_per_device_batch_size=rows,
        step_per_device_batch_size=rows,
        ppo_epochs=1,
        critic_epochs=None,
        total_epochs=steps,
        critic_pretraining_steps=steps,
        gamma=1.0,
        lam=1.0,
        kl_coef=0.0,
        critic=kind,
        **own,
        cliprange_value=None,
        vf_coef=1.0,
        critic_learning_rate=_RATES[kind],
        # With a rate that falls to 0, the critic averages over the last draws.
        lr_scheduler_type="cosine",
        adam_epsilon=1e-8,
    )


def train_critic(kind: str, output: Path, *, seed: int, steps: int = STEPS, draws: int = DRAWS) -> Critic:
    """Returns the critic that `PPOTrainer` trained in `steps` steps; the run's files are in `output`."""
    trainer = PPOTrainer(
        model=tiny_policy(seed),
        reward_funcs=DistributionReward(seed),
        args=configuration(kind, output, seed=seed, steps=steps, draws=draws),
        train_dataset=Dataset.from_list([{"prompt": f"play {name}"} for name in DISTRIBUTIONS]),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    critic = trainer.actor_critic.critic
    assert critic is not None
    return critic


@torch.no_grad()
def predict(critic: Critic, name: str) -> Prediction:
    """Returns what `critic` predicts before the first token of a response to the prompt of the distribution `name`."""
    assert critic.backbone is not None
    head, ids = critic.head, tiny_tokenizer()(f"play {name}", return_tensors="pt").input_ids
    state = critic.backbone(input_ids=ids).last_hidden_state[:, -1]
    if head.distributional:
        head.risk_level = TAIL
    tail_means, means, predictions = (part[0] for part in head(state))
    if head.kind == "scalar":
        return Prediction(float(means))
    if head.kind in CATEGORICAL:
        bounds = head.settings()
        # The distribution function is known at an atom, and at the upper edge of a bin.
        edges = len(predictions) + (head.kind == "hl_gauss")
        returns = c51_atoms(edges, v_min=bounds["v_min"], v_max=bounds["v_max"])[-len(predictions) :]
        levels = predictions.softmax(dim=0).cumsum(dim=0)
        return Prediction(float(means), float(tail_means), None, returns.tolist(), levels.tolist())
    # Not sorted: each quantile belongs to its own level.
    levels, quartiles = quantile_midpoints(len(predictions)), [_interpolate(predictions, level) for level in QUARTILES]
    return Prediction(float(means), float(tail_means), quartiles, predictions.tolist(), levels.tolist())


def _interpolate(quantiles: Tensor, level: float) -> float:
    """Returns the quantile at `level`, interpolated between those at the midpoints."""
    position = level * len(quantiles) - 0.5
    low = int(position)
    return float(torch.lerp(quantiles[low], quantiles[low + 1], position - low))


def row(name: str, kind: str, quantity: str, true: float, learned: Sequence[float], scale: float) -> str:
    """Returns a line of the table; the mean and the largest error over the seeds are fractions of `scale`."""
    mean = sum(learned) / len(learned)
    spread = f"{min(learned):7.3f} .. {max(learned):7.3f}"
    worst = max(abs(value - true) for value in learned) / scale
    return f"{name:8}{kind:10}{quantity:12}{true:8.3f}{mean:9.3f}   {spread}{(mean - true) / scale:+9.1%}{worst:8.1%}"


def table(predictions: Predictions) -> str:
    """Returns true and learned mean, tail mean and quartiles as text: the average and the range over the seeds.

    The error of a mean or tail mean is a fraction of the true value, that of a quartile a fraction of the standard
    deviation.
    """
    lines = [
        f"{'returns':8}{'critic':10}{'':12}{'true':>8}{'learned':>9}   {'over the seeds':>18}{'error':>9}{'worst':>8}"
    ]
    for name, distribution in DISTRIBUTIONS.items():
        mean, tail_mean = distribution.tail_mean(1.0), distribution.tail_mean(TAIL)
        deviation = distribution.deviation()
        quartiles = distribution.quantiles(torch.tensor(QUARTILES, dtype=torch.float64)).tolist()
        for kind in KINDS:
            of_critic = predictions[kind, name]
            lines.append(row(name, kind, "mean", mean, [p.mean for p in of_critic], abs(mean)))
            if tails := [p.tail_mean for p in of_critic if p.tail_mean is not None]:
                lines.append(row(name, kind, f"{TAIL:.0%} CVaR", tail_mean, tails, abs(tail_mean)))
            for i, level in enumerate(QUARTILES):
                if learned := [p.quartiles[i] for p in of_critic if p.quartiles is not None]:
                    lines.append(row(name, kind, f"{level:.0%} level", quartiles[i], learned, deviation))
    return "\n".join(lines)


def run(*, seeds: int, steps: int = STEPS, draws: int = DRAWS) -> Predictions:
    """Trains each kind of critic with each seed, and returns what it predicts for each distribution."""
    predictions: Predictions = {(kind, name): [] for kind in KINDS for name in DISTRIBUTIONS}
    for kind in KINDS:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                critic = train_critic(kind, Path(folder), seed=seed, steps=steps, draws=draws)
            for name in DISTRIBUTIONS:
                predictions[kind, name].append(predict(critic, name))
    return predictions


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the critics, prints the table, and writes it and the figure to `--output`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/return_distributions"), help="Folder for table and figure."
    )
    parser.add_argument("--seeds", type=int, default=3, help="Number of runs of each critic.")
    parser.add_argument("--steps", type=int, default=STEPS, help="Steps of a run.")
    given = parser.parse_args(arguments)
    predictions = run(seeds=given.seeds, steps=given.steps)
    given.output.mkdir(parents=True, exist_ok=True)
    text = table(predictions)
    (given.output / "return_distributions.txt").write_text(text + "\n", encoding="utf-8")
    plot_distributions(predictions, given.output / "return_distributions.png")
    print(text)
    print(f"figure: {given.output / 'return_distributions.png'}")


if __name__ == "__main__":
    main()
