"""Do learned critics recover a known law of the return? A run of PPOTrainer for each kind of critic answers.

    python -m examples.critics.return_laws        (a minute and a half on one core)

Three prompts, each with a score drawn from a law of its own whatever the response; two of the laws have the same mean.
The policy stands still (`critic_warmup_steps`), gamma and lambda are 1 and nothing is taken off for the KL, so the
return from every state of a response is its score, and the truth is known. Writes a table and a figure.

How a policy makes use of such a critic is not here.
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
from examples.critics.laws import LAWS, QUARTILES, TAIL, Reading, Readings
from examples.critics.plots import plot_laws

STEPS, DRAWS = 80, 240
_RATES = {"scalar": 0.005, "c51": 0.01, "quantile": 0.005, "iqn": 0.005}
KINDS = tuple(_RATES)
_WORDS = ("<pad>", "<eos>", "<unk>", "play", "steady", "gamble", "costly", *(f"w{i}" for i in range(9)))


class LawReward:
    """A reward function that draws each score from the law that the prompt's last word names."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """One draw for each prompt, by inversion."""
        names = [prompt.split()[-1] for prompt in prompts]
        levels = torch.rand(len(names), generator=self.generator, dtype=torch.float64)
        scores = torch.zeros_like(levels)
        for name in set(names):
            mine = torch.tensor([other == name for other in names])
            scores[mine] = LAWS[name].quantiles(levels[mine])
        return [float(score) for score in scores]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, sixteen words."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_policy(seed: int) -> LlamaForCausalLM:
    """A random Llama of one layer."""
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
    """Of a run in which only a critic of `kind` learns, from `draws` returns a prompt in each of `steps` steps."""
    rows = len(LAWS) * draws
    settings: dict[str, Any] = {"query_len": 2, "response_len": 2, "report_to": ["none"], "num_logged_rollouts": 0}
    settings |= {"rollout_batch_size": len(LAWS), "num_return_sequences": draws, "step_batch_size": rows // 12}
    settings |= {"rollout_per_device_batch_size": rows, "step_per_device_batch_size": rows, "ppo_epochs": 1}
    settings |= {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.0, "critic_warmup_steps": steps, "total_epochs": steps}
    settings |= {"num_quantiles": 64, "c51_v_min": -8.0, "c51_v_max": 8.0, "num_atoms": 129}
    # Well below the laws' deviations: in the square zone a quantile is drawn towards the mean.
    settings |= {"quantile_huber_kappa": 0.1, "cliprange_value": None, "vf_coef": 1.0}
    # A rate that falls to 0 averages over the last draws.
    settings |= {"critic_learning_rate": _RATES[kind], "lr_scheduler_type": "cosine", "adam_epsilon": 1e-8}
    return PPOConfig(output_dir=str(output), critic=kind, seed=seed, use_cpu=True, **settings)


def train_critic(kind: str, output: Path, *, seed: int, steps: int = STEPS, draws: int = DRAWS) -> Critic:
    """The critic that `PPOTrainer` leaves after `steps` steps; the run's files are in `output`."""
    trainer = PPOTrainer(
        model=tiny_policy(seed),
        reward_funcs=LawReward(seed),
        args=configuration(kind, output, seed=seed, steps=steps, draws=draws),
        train_dataset=Dataset.from_list([{"prompt": f"play {name}"} for name in LAWS]),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    critic = trainer.actor_critic.critic
    assert critic is not None
    return critic


@torch.no_grad()
def read_critic(critic: Critic, name: str) -> Reading:
    """What `critic` says before the first token of a response to the prompt of the law `name`."""
    assert critic.backbone is not None
    head, ids = critic.head, tiny_tokenizer()(f"play {name}", return_tensors="pt").input_ids
    state = critic.backbone(input_ids=ids).last_hidden_state[:, -1]
    head.risk_level = None if head.kind == "scalar" else TAIL
    tail_means, means, predictions = (part[0] for part in head(state))
    if head.kind == "scalar":
        return Reading(float(means))
    if head.kind == "c51":
        bounds = head.settings()
        atoms = c51_atoms(len(predictions), v_min=bounds["v_min"], v_max=bounds["v_max"])
        levels = predictions.softmax(dim=0).cumsum(dim=0)
        return Reading(float(means), float(tail_means), None, atoms.tolist(), levels.tolist())
    # Not sorted: a quantile counts at its own level.
    levels, quartiles = quantile_midpoints(len(predictions)), [_between(predictions, level) for level in QUARTILES]
    return Reading(float(means), float(tail_means), quartiles, predictions.tolist(), levels.tolist())


def _between(quantiles: Tensor, level: float) -> float:
    """The quantile at `level`, interpolated between those at the midpoints."""
    place = level * len(quantiles) - 0.5
    low = int(place)
    return float(torch.lerp(quantiles[low], quantiles[low + 1], place - low))


def row(name: str, kind: str, what: str, true: float, learned: Sequence[float], scale: float) -> str:
    """A line of the table; the errors are in parts of `scale`, the largest over the seeds last."""
    mean = sum(learned) / len(learned)
    spread = f"{min(learned):7.3f} .. {max(learned):7.3f}"
    worst = max(abs(value - true) for value in learned) / scale
    return f"{name:8}{kind:10}{what:12}{true:8.3f}{mean:9.3f}   {spread}{(mean - true) / scale:+9.1%}{worst:8.1%}"


def table(readings: Readings) -> str:
    """True and learned mean, tail mean and quartiles, averaged over the seeds, with the range over them.

    The error of a mean or a tail mean is in parts of the true one, that of a quartile in standard deviations.
    """
    lines = [f"{'law':8}{'critic':10}{'':12}{'true':>8}{'learned':>9}   {'over the seeds':>18}{'error':>9}{'worst':>8}"]
    for name, law in LAWS.items():
        mean, tail_mean, deviation = law.tail_mean(1.0), law.tail_mean(TAIL), law.deviation()
        quartiles = law.quantiles(torch.tensor(QUARTILES, dtype=torch.float64)).tolist()
        for kind in KINDS:
            mine = readings[kind, name]
            lines.append(row(name, kind, "mean", mean, [r.mean for r in mine], abs(mean)))
            if tails := [r.tail_mean for r in mine if r.tail_mean is not None]:
                lines.append(row(name, kind, f"{TAIL:.0%} CVaR", tail_mean, tails, abs(tail_mean)))
            for i, level in enumerate(QUARTILES):
                if said := [r.quartiles[i] for r in mine if r.quartiles is not None]:
                    lines.append(row(name, kind, f"{level:.0%} level", quartiles[i], said, deviation))
    return "\n".join(lines)


def run(*, seeds: int, steps: int = STEPS, draws: int = DRAWS) -> Readings:
    """What a critic of each kind says of each law after training, for each seed; (kind, law) to readings."""
    readings: Readings = {(kind, name): [] for kind in KINDS for name in LAWS}
    for kind in KINDS:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                critic = train_critic(kind, Path(folder), seed=seed, steps=steps, draws=draws)
            for name in LAWS:
                readings[kind, name].append(read_critic(critic, name))
    return readings


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, prints the table, and writes it and the figure into `--output`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path, default=Path("outputs/return_laws"), help="Folder of table and figure.")
    parser.add_argument("--seeds", type=int, default=3, help="Runs of each critic.")
    parser.add_argument("--steps", type=int, default=STEPS, help="Rollouts of a run.")
    given = parser.parse_args(arguments)
    readings = run(seeds=given.seeds, steps=given.steps)
    given.output.mkdir(parents=True, exist_ok=True)
    text = table(readings)
    (given.output / "return_laws.txt").write_text(text + "\n", encoding="utf-8")
    plot_laws(readings, given.output / "return_laws.png")
    print(text)
    print(f"figure: {given.output / 'return_laws.png'}")


if __name__ == "__main__":
    main()
