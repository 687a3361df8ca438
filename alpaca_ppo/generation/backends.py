"""`generate`, the entry point of the sampler, and `Backend`, the interface of what samples for it.

The backends of this package are in `generation.built_in_backends`; `register_generation_backend` adds one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.generation.responses import Generation, SamplingHooks, SamplingParams
from alpaca_ppo.generation.turns import Turns
from alpaca_ppo.models.policy import Policy, eval_mode
from alpaca_ppo.registry import GENERATION_BACKENDS
from alpaca_ppo.types import PromptBatch

# `Engine.policy_weights`: yields name and whole tensor of each weight of the policy; with adapters, those of the
# policy's adapter, or with `base=True` all but adapters.
PolicyWeights = Callable[..., Iterator[tuple[str, Tensor]]]


class GenerateOptions(TypedDict):
    """The further arguments of `Backend.generate`, as those of `generate`. `turns` is None where the backend takes
    none. A slow backend should call `hooks.before_token` regularly, so that a signal ends the sampling.
    """

    rows_at_once: int | None
    turns: Turns | None
    hooks: SamplingHooks


class Backend(ABC):
    """Samples the responses of a run.

    Args:
        args: of the run; None outside of one.

    Attributes:
        takes_turns: whether responses can go on after a turn (`generation.turns`).
        takes_stop_strings: whether the token that completes one of `params.stop_strings` ends a response.
        has_own_weights: whether it samples from a copy of the weights, which `sync` updates, instead of from `model`.
        half_precision: whether that copy computes in less than 32 bits; known after the first `sync`.
        returns_states: whether it returns `Generation.states`. A subclass must set it anew: it may change responses.
        name: the value of `generation_backend` that selects it.
        version: of the weights at the last `sync`.
        poll: to be called now and then where `sync`, `wake` or `sleep` waits; raises if a signal ends the run.
    """

    takes_turns = takes_stop_strings = has_own_weights = half_precision = returns_states = False
    name = ""
    version: int | None = None
    poll: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, args: PPOConfig | None = None) -> None:
        self.args = args

    @abstractmethod
    def generate(
        self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Returns `params.num_return_sequences` responses to each prompt, on any device.

        With random numbers of `params.random_keys(prompts["prompt_ids"])` a backend can sample the same tokens as the
        built-in ones.

        Args:
            model: the policy's language model in eval mode, with all parameters unless the backend `has_own_weights`.
            prompts: on the device of `model`, without columns that are padding in every row.
            params: already checked.
        """

    def problem(self, model: PreTrainedModel) -> str | None:
        """Why it cannot sample from `model`, or None; asked once, unless it `has_own_weights`."""
        return None

    def use_fallback(self, problem: str) -> None:
        """Called on every process if `problem` found one on any; from then on all sample in another way.

        Raises:
            ValueError: if there is no other way.
        """
        raise ValueError(f"generation_backend {self.name} cannot sample the policy: {problem}; set it to auto")

    def sync(self, policy: Policy, weights: PolicyWeights) -> None:  # noqa: B027
        """Copies the weights of `policy`, whose parameters may be sharded; called on every process before responses
        are sampled from new weights.

        Every process must take all tensors of `weights()`, and copy each before it takes the next.
        """

    def wake(self) -> None:  # noqa: B027
        """Called before responses are sampled."""

    def sleep(self) -> None:  # noqa: B027
        """Called after that, to free memory that only sampling needs."""


_B = TypeVar("_B", bound=Callable[..., Backend])


def register_generation_backend(name: str) -> Callable[[_B], _B]:
    """Returns a decorator that adds a subclass of `Backend`, or a function of the run's `PPOConfig` that returns one,
    as the generation backend `name`.

    Raises:
        ValueError: if the name is a built-in one, or contains a space, comma or colon.
    """
    return GENERATION_BACKENDS.register(name)  # type: ignore[return-value]


def make_backend(name: str, args: PPOConfig | None = None) -> Backend:
    """Returns a new backend.

    Raises:
        ValueError: for an unknown name.
    """
    backend: Backend = GENERATION_BACKENDS.get(name)(args)
    backend.name = name
    return backend


# Buffers that a forward pass replaces, such as rotary frequencies, must not become inference tensors.
@torch.inference_mode(False)
@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: PromptBatch,
    params: SamplingParams,
    *,
    backend: str | Backend = "auto",
    rows_at_once: int | None = None,
    turns: Turns | None = None,
    hooks: SamplingHooks | None = None,
) -> Generation:
    """Returns `params.num_return_sequences` responses to each prompt, with the log-prob of each chosen token.

    The random number behind a token is a function of (seed, step, round, prompt id, sample index, position) only. A
    response therefore does not depend on padding, on the other rows or on their order, except through rounding inside
    the model. The model's own generation config is ignored. The model runs in eval mode without gradients, also within
    `torch.inference_mode`.

    Args:
        model: a causal language model of transformers, without a wrapper (for a PEFT model: `get_base_model()`).
        prompts: left-padded; `rows` are not read.
        params: how tokens are chosen and what ends a response.
        backend: one, or its name: "slots" is this package's own loop, "generate" runs `model.generate`, "auto" is slots
            where the model allows it.
        rows_at_once: the most responses to sample at a time; None sets no limit.
        turns: how responses go on; None ends each with its first turn.
        hooks: called during sampling.

    Raises:
        ValueError: for a parameter out of range; without prompts, or for one that is empty or not left-padded; for a
            backend that is unknown, cannot do what is asked or returns other shapes; for logits that are not finite.
    """
    if isinstance(backend, str):
        backend = make_backend(backend)
    hooks = hooks or SamplingHooks()
    params.check()
    for option, given, taken in (
        ("environments or tools", turns, backend.takes_turns),
        ("stop_strings", params.stop_strings, backend.takes_stop_strings),
    ):
        if given is not None and not taken:
            raise ValueError(f"generation_backend is {backend.name!r}, which does not take {option}; set it to auto")
    rows = len(prompts["queries"]) * params.num_return_sequences
    unreported = set(range(rows))

    def report(finished_rows: list[int], finished: Generation) -> None:
        unreported.difference_update(finished_rows)
        if len(bad := (~finished.logprobs.isfinite()).nonzero()):
            row, position = bad[0].tolist()
            raise ValueError(
                f"logits of row {finished_rows[row]} are not finite at response position {position}: the weights have "
                "diverged, or half precision overflows"
            )
        hooks.on_finished(finished_rows, finished)

    trimmed = _trimmed(prompts, model.device)
    with eval_mode(model):
        generation = backend.generate(
            model, trimmed, params, rows_at_once=rows_at_once, turns=turns, hooks=replace(hooks, on_finished=report)
        )
    shape = (rows, params.max_new_tokens)
    wanted = {"responses": shape, "response_mask": shape, "logprobs": shape, "stopped": shape[:1]}
    # A user's backend may have returned anything.
    shapes = {name: tuple(getattr(getattr(generation, name, None), "shape", ())) for name in wanted}
    if shapes != wanted:
        raise ValueError(f"generation_backend {backend.name!r} returned {shapes}; it must be a Generation of {wanted}")
    if unreported:
        remaining = sorted(unreported)
        report(remaining, generation[remaining])
    return generation


def _trimmed(prompts: PromptBatch, device: torch.device) -> PromptBatch:
    """`prompts` on `device`, without the columns that are padding in every row. Raises ValueError without prompts, or
    if one is empty or not left-padded.
    """
    mask = prompts["query_attn_masks"].long()
    if len(mask) == 0:
        raise ValueError("queries has no rows; pass at least one prompt")
    lengths = mask.sum(dim=1)
    if bool((lengths == 0).any()):
        raise ValueError(f"the prompt in row {int(lengths.argmin())} is empty; a prompt needs at least one token")
    width = int(lengths.max())
    left_padded = torch.arange(mask.size(1), device=mask.device) >= mask.size(1) - lengths.unsqueeze(1)
    if not torch.equal(left_padded, mask.bool()):
        row = int((left_padded != mask.bool()).any(dim=1).nonzero()[0])
        raise ValueError(f"query_attn_masks has padding after a token in row {row}; queries must be left-padded")
    return PromptBatch(
        queries=prompts["queries"][:, -width:].to(device),
        query_attn_masks=mask[:, -width:].to(device),
        prompt_ids=prompts["prompt_ids"].to(device),
        rows=prompts["rows"],
    )
