"""The trainer under test on a tiny model in float64, and what the independent PPO needs of its run.

From the trainer come the sampled tokens, the sampler's log-probs and the weights at the start; from the package the
rows of each optimizer step and the quantile levels of iqn. Scores are computed here, from the tokens.
"""

import copy
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

from alpaca_ppo import PPOTrainer
from alpaca_ppo.functional.rng import seeded_generator
from alpaca_ppo.models import CopiedReference
from alpaca_ppo.ppo.teacher import TeacherModel
from alpaca_ppo.ppo.update_plan import plan_updates
from alpaca_ppo.trainer import setup
from tests.independent.cases import SOURCES, Case
from tests.independent.networks import Networks, Row, Weights
from tests.independent.ppo_step import IndependentPPO, Randomness, Samples
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_trainer

STEPS = 2
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_hidden_layers": 1},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    # Its logits are capped: 2 tanh(logits / 2).
    "gemma3": {**SMALL, "num_hidden_layers": 1, "layer_types": ["full_attention"], "final_logit_softcapping": 2.0},
    "mixtral": {**SMALL, "num_hidden_layers": 1, "num_local_experts": 3},
    "qwen2": {**SMALL, "num_hidden_layers": 3},
}
TARGETS = ["q_proj", "v_proj", "down_proj"]
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 6, "lora_dropout": 0.1, "target_modules": TARGETS}


def _norm_in_own_dtype(self: Any, states: Tensor) -> Tensor:
    return self.weight * states * torch.rsqrt((states**2).mean(dim=-1, keepdim=True) + self.variance_epsilon)


def _gemma_norm_in_own_dtype(self: Any, states: Tensor) -> Tensor:
    return (1 + self.weight) * states * torch.rsqrt((states**2).mean(dim=-1, keepdim=True) + self.eps)


@functools.cache
def _language_model(family: str) -> PreTrainedModel:
    """A model of `family`. Norms that round to float32 in between stay in float64: a rounding error of 1e-16 in one of
    the runs would sometimes turn into one of 1e-8.
    """
    model = tiny_causal_lm(family, dtype=torch.float64, **SIZES[family])
    if family == "mixtral":
        # The default kernel for mixtures has no float64.
        model.set_experts_implementation("eager")
    _norm_whole(model, _gemma_norm_in_own_dtype if family == "gemma3" else _norm_in_own_dtype)
    return model


def _norm_whole(model: nn.Module, forward: Callable[..., Tensor]) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = type("RMSNorm", (type(module),), {"forward": forward})


def _small_transformer(width: int, depth: int) -> LlamaModel:
    """What a `cached` critic reads states with; its embedding has no weights."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
    ids = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None}
    model = LlamaModel(LlamaConfig(**sizes, **ids, num_attention_heads=width // 64))
    model.embed_tokens = nn.Identity()
    _norm_whole(model, _norm_in_own_dtype)
    return model


class Recorder(PPOTrainer):
    """Keeps what each rollout drew and learned from, and makes holes or a mismatch if the case asks for them."""

    case: Case

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drawn: list[dict[str, Any]] = []
        self.learned_from: list[Any] = []

    def _generate(self, prompts: Any, sampling_params: Any) -> dict[str, Tensor]:
        samples = super()._generate(prompts, sampling_params)
        mask, logprobs = samples["response_mask"], samples["rollout_logprobs"]
        if self.case.holes:
            # The first token of every third row of two or more tokens, and the third of all rows of four or more.
            mask[::3, 0] &= ~mask[::3, 1]
            mask[:, 2] &= ~mask[:, 3]
            written = ~mask & (mask.flip(1).cumsum(1).flip(1) > 0)
            samples["responses"][written] = 7
            logprobs[~mask] = 0
        if self.case.mismatch:
            noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            samples["rollout_logprobs"] = logprobs + self.case.mismatch * noise * mask
        kept = {key: value.clone() for key, value in samples.items()}
        self.drawn.append({**kept, "n": sampling_params.num_return_sequences, "prompt_ids": prompts["prompt_ids"]})
        return samples

    def step_with_rollouts(self, rollouts: Any) -> dict[str, float]:
        self.learned_from.append({key: value.clone() for key, value in rollouts.items()})
        return super().step_with_rollouts(rollouts)


class BothRuns(NamedTuple):
    """A case that was trained twice, by the trainer and by the independent PPO."""

    trainer: Any
    independent: IndependentPPO
    experiences: list[Any]
    """The independent PPO's, of each PPO step."""
    samples: list[Samples]
    before: Weights
    after: Weights
    """The trainer's weights at the start and at the end, by the independent PPO's names."""

    def independent_with(self, **options: Any) -> IndependentPPO:
        """The independent PPO on the same tokens with other options, at its end."""
        return _trained(self.independent, self.before, {**self.independent.config, **options}, self.samples)[0]


def run_both(folder: Path, case: Case) -> BothRuns:
    """Trains the trainer for two PPO steps, and then the independent PPO on the same tokens."""
    trainer, networks = _trainer(folder, case)
    before = _weights(trainer)
    with warnings.catch_warnings():
        # A mismatch that is made on purpose, and returns beyond a narrow support.
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            trainer.step(trainer.prompt_batches(step))
    args = trainer.args
    config = dataclasses.asdict(args)
    start = IndependentPPO(
        networks, before, config, _randomness(trainer), total_steps=args.total_episodes // args.rollout_batch_size
    )
    samples = _samples(trainer, case)
    independent, experiences = _trained(start, before, config, samples)
    return BothRuns(trainer, independent, experiences, samples, before, _weights(trainer))


def _trained(
    like: IndependentPPO, before: Weights, config: dict[str, Any], samples: list[Samples]
) -> tuple[IndependentPPO, list[Any]]:
    run = IndependentPPO(like.networks, before, config, like.randomness, like.total_steps)
    return run, [run.step(part) for part in samples]


def _trainer(folder: Path, case: Case) -> tuple[Any, Networks]:
    policy = copy.deepcopy(_language_model(case.family))
    plain = copy.deepcopy(policy)
    arguments: dict[str, Any] = {"reward_funcs": [SOURCES[name] for name in case.sources]}
    if case.lora:
        arguments["peft_config"] = LoraConfig(**LORA)
    trainer_class = type("Recorder", (Recorder,), {"case": case})
    teacher = _teacher(case)
    with mock.patch.object(setup, "make_teacher", lambda *args, **sizes: teacher and CopiedReference(teacher)):
        trainer = tiny_trainer(
            folder, model=policy, trainer_class=trainer_class, trainer_arguments=arguments, **case.settings()
        )
    args = trainer.args
    layout = args.critic_layout if args.uses_critic else None
    backbones = {"separate": plain.base_model}
    if layout == "cached":
        _norm_whole(trainer.actor_critic.critic.reader, _norm_in_own_dtype)
        backbones["cached"] = _small_transformer(args.critic_width, args.critic_depth)
    networks = Networks(
        policy=plain,
        backbone=backbones.get(layout),
        reference={name: p.detach().clone() for name, p in plain.named_parameters()},
        layout=layout,
        lora_scale=LORA["lora_alpha"] / LORA["r"] if case.lora else None,
        # By default those at 1/2 and 3/4 of three layers.
        layers=tuple(args.critic_layers or (1, 2)),
        teacher=teacher and {name: p.detach().clone() for name, p in teacher.model.named_parameters()},
    )
    _perturb(trainer)
    return trainer, networks


def _teacher(case: Case) -> TeacherModel | None:
    """A model of the policy's family with other weights, if the case has a teacher."""
    if "teacher_model_name_or_path" not in case.options:
        return None
    model = copy.deepcopy(_language_model(case.family))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return TeacherModel(model.eval())


def _perturb(trainer: Any) -> None:
    """Moves all trained weights: a critic that predicts 0, and a policy equal to its reference, would hide mistakes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in trainer.actor_critic.named_parameters():
            if p.requires_grad:
                size = 0.3 if "head." in name and name.startswith("critic") or "lora_B" in name else 0.05
                p += size * torch.randn(p.shape, generator=generator, dtype=torch.float64)


def _weights(trainer: Any) -> Weights:
    """A copy of everything that is trained, by the independent PPO's names."""
    return {_our_name(n): p.detach().clone() for n, p in trainer.actor_critic.named_parameters() if p.requires_grad}


def _our_name(name: str) -> str:
    if adapter := re.fullmatch(r"policy\.model\.(.+)\.(lora_[AB])\.(\w+)\.weight", name):
        layer, factor, owner = adapter.groups()
        return f"{'critic' if owner == 'value' else 'policy'}.{layer}.{factor}"
    name = re.sub(r"^critic\.(backbone|reader|head)\.", lambda m: "head." if m[1] == "head" else "critic.", name)
    return name.replace("policy.model.", "policy.", 1)


def _randomness(trainer: Any) -> Randomness:
    args = trainer.args
    rows = args.rollout_batch_size * args.num_return_sequences

    def batches(step: int) -> Any:
        plan = plan_updates(rows, args, step, critic_only=False)
        return [(update.key[2], update.rows) for update in plan if update.part != "critic"]

    def critic_batches(step: int) -> Any:
        return [(update.key[2], update.rows) for update in plan_updates(rows, args, step, critic_only=True)]

    def taus(step: int, epoch: int, number: int) -> Tensor | None:
        critic = trainer.actor_critic.critic
        return None if critic is None else critic.head.sample_taus(seeded_generator(args.seed, step, epoch, number))

    return Randomness(batches, critic_batches, taus)


def _samples(trainer: Any, case: Case) -> list[Samples]:
    """Of each rollout; with remax, the greedy responses come after the sampled ones."""
    drawn = [_sample(record, case) for record in trainer.drawn]
    if len(drawn) == STEPS:
        return drawn
    assert len(drawn) == 2 * STEPS
    repeats = trainer.args.num_return_sequences
    return [
        dataclasses.replace(sampled, greedy=_repeated(greedy, repeats))
        for sampled, greedy in zip(drawn[::2], drawn[1::2], strict=True)
    ]


def _repeated(samples: Samples, repeats: int) -> Samples:
    given = (value for value in vars(samples).values() if value is not None)
    return Samples(*([entry for entry in entries for _ in range(repeats)] for entries in given))


def _sample(record: dict[str, Any], case: Case) -> Samples:
    rows, scores = [], []
    ids = record["prompt_ids"].repeat_interleave(record["n"]).tolist()
    parts = (record[name] for name in ("queries", "query_attn_masks", "responses", "response_mask"))
    for prompt, real, response, mask in zip(*parts, strict=True):
        end = int(mask.nonzero()[-1]) + 1
        rows.append(Row(prompt[real.bool()].tolist(), response[:end].tolist(), mask[:end].tolist()))
        scores.append([_score(SOURCES[name], response[mask].tolist()) for name in case.sources])
    logprobs = [row[mask] for row, mask in zip(record["rollout_logprobs"], record["response_mask"], strict=True)]
    return Samples(rows, ids, record["stopped"].tolist(), logprobs, scores)


def _score(source: Callable[..., Any], tokens: list[int]) -> Any:
    return source(prompts=[""], completions=[""], completion_ids=[tokens])[0]
