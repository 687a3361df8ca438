"""A problem small enough to list every response, and a trainer on it: expectations are finite sums, not estimates.

Three tokens, responses of at most three of them. Probabilities come from the model's own logits, not from the code of
the package, and exact gradients from differentiating sums over them. Everything is float64 (GPT-2's layers stay in it;
Llama's norms compute in float32).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from alpaca_ppo import PPOTrainer
from alpaca_ppo.ppo.rollouts import ForwardRows, forward_responses
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import acting, loss_of, tiny_trainer

VOCABULARY, STOP = 3, 0
PROMPT = torch.tensor([1, 2])


class Problem(NamedTuple):
    """All N responses with a reward for each, arbitrary but fixed; R is the longest."""

    responses: Tensor
    """(N, R) int64."""
    mask: Tensor
    """(N, R) bool."""
    rewards: Tensor
    """(N,) float64."""


def every_response(*, stops: bool, length: int = 3) -> Problem:
    """The 3^length responses of `length` tokens; with `stops` those that token 0 may end early: 15 for length 3."""
    responses = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * length).view(-1, length)
    mask = torch.ones_like(responses, dtype=torch.bool)
    if stops:
        ends = (responses == STOP).long()
        mask = ends.cumsum(dim=1) - ends == 0
        # Of the rows that differ only after the stop token, the one that is 0 there.
        once = ((responses == 0) | mask).all(dim=1)
        responses, mask = responses[once], mask[once]
    rewards = torch.randn(len(responses), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return Problem(responses, mask, rewards)


def enumerable_policy(seed: int) -> PreTrainedModel:
    """A random one-layer model of three tokens, none of which is nearly certain."""
    fields: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "tie_word_embeddings": False}
    fields |= {"eos_token_id": STOP, "pad_token_id": None, "dtype": torch.float64, "seed": seed}
    model = tiny_causal_lm("gpt2", vocab_size=VOCABULARY, **fields)
    # Policy compares logits on the ids 1, 2 and 3. An embedding that nothing else reads lets it; the head has 3 rows.
    embedding = model.get_input_embeddings()
    rows = torch.cat([embedding.weight.data, torch.zeros(1, 16, dtype=torch.float64)])
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(rows, freeze=False))
    # Biases of about 1 would make the states of all prefixes nearly alike.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    model.lm_head.weight.data *= 0.6
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Of the words a, b, c; a ends a response."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", padding_side="left")


def enumerable_trainer(
    folder: Any,
    *,
    policy: PreTrainedModel | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    **overrides: Any,
) -> PPOTrainer:
    """A trainer of `enumerable_policy(0)` with `enumerable_policy(1)` as reference. Its critic's values are not 0.

    Advantages are plain returns less values, the loss is the mean over responses of sums over tokens, and the sampler
    may be another model, unless `overrides` say otherwise.
    """
    arguments = {"processing_class": tokenizer(), "ref_model": enumerable_policy(1)}
    arguments |= {"train_dataset": Dataset.from_list([{"prompt": "b c"}] * 10)}
    settings = {"response_len": 3, "lam": 1.0, "gamma": 1.0, "whiten_advantages": False, "kl_coef": 0.0}
    settings |= {"vf_coef": 0.0, "loss_agg_mode": "seq-mean-token-sum", "mismatch_action": "ignore"}
    trainer = tiny_trainer(
        folder,
        model=policy or enumerable_policy(0),
        trainer_arguments={**arguments, **(trainer_arguments or {})},
        **acting({**settings, **overrides}),
    )
    if trainer.actor_critic.critic is not None:
        trainer.actor_critic.critic.head.weight.data.normal_(std=0.2, generator=torch.Generator().manual_seed(5))
    return trainer


def enumerated_rollouts(trainer: PPOTrainer, problem: Problem, sampler: PreTrainedModel | None = None) -> Any:
    """The responses of `problem` as `trainer.rollout` would return them had `sampler` (default: the policy) drawn each
    once, with what depends on `old_policy` as the configuration says.
    """
    count = len(problem.responses)
    # A column of padding, so that places in the row and in the sequence differ.
    queries = torch.cat([torch.zeros(1, dtype=torch.long), PROMPT]).repeat(count, 1)
    samples = {"queries": queries, "query_attn_masks": torch.tensor([[0, 1, 1]]).repeat(count, 1)}
    samples |= {"responses": problem.responses, "response_mask": problem.mask, "rewards": problem.rewards}
    samples |= {"scores": problem.rewards, "prompt_ids": torch.zeros(count, dtype=torch.long)}
    rows = ForwardRows(samples, torch.device("cpu"), per_device_batch_size=64)
    samples |= forward_responses(trainer.model, rows, chunk_size=8, temperature=1.0)
    reference = forward_responses(trainer.collector.reference.policy, rows, chunk_size=8, temperature=1.0)
    samples |= {f"ref_{name}": value for name, value in reference.items()}
    samples["rollout_logprobs"] = token_logprobs(sampler or trainer.actor_critic.policy.model, problem).detach()
    if trainer.args.old_policy == "rollout":
        samples["logprobs"] = samples["rollout_logprobs"].clone()
    return samples


def pairs_of(rollouts: Any) -> tuple[Any, Tensor]:
    """Rollouts of all ordered pairs, two neighbouring rows with a prompt id of their own each, and (pairs, 2) rows."""
    count = len(rollouts["responses"])
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    both = {name: value[pairs.flatten()] for name, value in rollouts.items()}
    return {**both, "prompt_ids": torch.arange(len(pairs)).repeat_interleave(2)}, pairs


def add_advantages(trainer: PPOTrainer, rollouts: Any, **extra: Any) -> Any:
    """`rollouts` with what the trainer's `_shape_reward` and `_estimate_advantage` add, as `step` calls them."""
    names = ("rewards", "responses", "logprobs", "ref_logprobs", "response_mask")
    rollouts |= trainer._shape_reward(**{name: rollouts[name] for name in names})
    rollouts |= trainer._estimate_advantage(
        rewards=rollouts["shaped_rewards"],
        values=rollouts.get("values"),
        response_mask=rollouts["response_mask"],
        scores=rollouts["rewards"],
        prompt_ids=rollouts["prompt_ids"],
        **extra,
    )
    return rollouts


def policy_gradient(loss: Tensor, trainer: PPOTrainer) -> Tensor:
    """The gradient of `loss` with respect to all parameters of the policy, flat; 0 where it does not reach."""
    parameters = list(trainer.actor_critic.policy.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, grads, strict=True)]
    )


def expected_loss_gradient(
    trainer: PPOTrainer, rollouts: Any, probabilities: Tensor, *, denominator: float = 1.0
) -> Tensor:
    """The sum over responses of probability times the gradient of the loss on that response alone."""
    total = torch.zeros((), dtype=torch.float64)
    for row, probability in enumerate(probabilities):
        batch = {name: value[row : row + 1] for name, value in rollouts.items()}
        total = total + probability * loss_of(trainer, {**batch, "denominator": torch.tensor(denominator)})
    return policy_gradient(total, trainer)


def next_token_logprobs(model: PreTrainedModel, problem: Problem) -> Tensor:
    """(N, R, 3): the log-probability of every token at each place of each response."""
    ids = torch.cat([PROMPT.repeat(len(problem.responses), 1), problem.responses], dim=1)
    logits = model(input_ids=ids, use_cache=False).logits
    return logits[:, len(PROMPT) - 1 : -1].log_softmax(dim=-1)


def token_logprobs(model: PreTrainedModel, problem: Problem) -> Tensor:
    """(N, R): the log-probability of each token of each response, 0 outside the mask."""
    logprobs = next_token_logprobs(model, problem)
    return torch.where(problem.mask, logprobs.gather(-1, problem.responses.unsqueeze(-1)).squeeze(-1), 0.0)


def probabilities(model: PreTrainedModel, problem: Problem) -> Tensor:
    """(N,): the probability of each response, without a gradient."""
    return token_logprobs(model, problem).sum(dim=1).exp().detach()


def objective_gradient(trainer: PPOTrainer, problem: Problem, *, kl_coef: float = 0.0) -> Tensor:
    """Of the sum over responses y of pi(y) * (r(y) - kl_coef * log(pi(y) / ref(y))): what an update should climb."""
    log_pi = token_logprobs(trainer.actor_critic.policy.model, problem).sum(dim=1)
    log_ref = token_logprobs(trainer.collector.reference.policy.model, problem).sum(dim=1).detach()
    return policy_gradient((log_pi.exp() * (problem.rewards - kl_coef * (log_pi - log_ref))).sum(), trainer)


def visited_states_gradient(
    trainer: PPOTrainer, problem: Problem, of_logprobs: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Of the expected sum over tokens of `of_logprobs`, the probabilities of getting to each token held fixed.

    `of_logprobs` maps the policy's and the reference's log-probabilities (N, R, 3) to (N, R).
    """
    policy, reference = trainer.actor_critic.policy.model, trainer.collector.reference.policy.model
    terms = of_logprobs(next_token_logprobs(policy, problem), next_token_logprobs(reference, problem).detach())
    weights = probabilities(policy, problem).unsqueeze(1)
    return policy_gradient((weights * torch.where(problem.mask, terms, 0.0)).sum(), trainer)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of `expected`."""
    return float((actual - expected).norm() / expected.norm())
