"""The generation backends, which sample responses; `register_generation_backend` adds one.

The built-in ones sample from the model that training holds, and choose each token by the same numbers, so they sample
the same tokens.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.generation.hf_generate import sample_with_generate
from alpaca_ppo.generation.responses import Generation, SamplingHooks
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.slots import sample_in_slots, slot_problem
from alpaca_ppo.generation.turns import Turns
from alpaca_ppo.models.policy import Policy
from alpaca_ppo.registry import GENERATION_BACKENDS
from alpaca_ppo.types import PromptBatch


class Backend:
    """Samples the responses of a run.

    Args:
        args: of the run; None outside of one.
    """

    takes_turns = False
    """Whether responses can go on after a turn (`generation.turns`)."""
    takes_stop_strings = False
    """Whether the token that completes one of `params.stop_strings.strings` ends a response."""
    has_own_weights = False
    """Whether it samples from weights of its own, which `sync` brings up to date, instead of from `model`."""
    name = ""
    """The value of `generation_backend` that selects it."""
    version: int | None = None
    """Of the weights at the last `sync`."""

    def __init__(self, args: PPOConfig | None = None) -> None:
        self.args = args

    def generate(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        params: SamplingParams,
        *,
        rows_at_once: int | None,
        turns: Turns | None,
        hooks: SamplingHooks,
    ) -> Generation:
        """Returns `params.num_return_sequences` responses to each prompt, on any device.

        To sample the tokens of the built-in backends, draw the random numbers from
        `params.random_keys(prompts["prompt_ids"])`.

        Args:
            model: the policy's language model, in eval mode, with all of its parameters.
            prompts: on the device of `model`, without columns that are padding in every row.
            params: how tokens are chosen and what ends a response.
            rows_at_once: the most responses to sample at a time; None sets no limit.
            turns: who is asked at the end of a turn; None unless the backend takes turns.
            hooks: a slow backend should call `before_token` regularly, so that a signal ends the sampling.
        """
        raise NotImplementedError

    def sync(self, policy: Policy) -> None:
        """Takes over the weights of `policy`; called on every process, before the first responses and whenever the
        weights have changed since, with all parameters at hand.
        """

    def wake(self) -> None:
        """Called before responses are sampled."""

    def sleep(self) -> None:
        """Called after that: memory that only sampling needs can be freed."""


_B = TypeVar("_B", bound=Callable[..., Backend])


def register_generation_backend(name: str) -> Callable[[_B], _B]:
    """Returns a decorator that adds a subclass of `Backend`, or a function of the run's `PPOConfig` that returns one,
    as the generation backend `name`.

    Raises:
        ValueError: if the name is taken, or contains a space, comma or colon.
        TypeError: if it cannot be called.
    """
    return GENERATION_BACKENDS.register(name)  # type: ignore[return-value]


def make_backend(name: str, args: PPOConfig | None = None) -> Backend:
    """Returns a new backend; `auto` takes slots where the model allows it, else `model.generate`.

    Raises:
        ValueError: for an unknown name.
    """
    GENERATION_BACKENDS.check(name)
    backend: Backend = GENERATION_BACKENDS.get(name)(args)
    backend.name = name
    return backend


@GENERATION_BACKENDS.implement("generate")
class GenerateBackend(Backend):
    """`model.generate`, one batch of prompts of similar length after the other."""

    takes_stop_strings = True

    def generate(self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **how: Any) -> Generation:
        return sample_with_generate(model, prompts, params, rows_at_once=how["rows_at_once"], hooks=how["hooks"])


@GENERATION_BACKENDS.implement("slots")
class SlotsBackend(Backend):
    """The slot loop, in which waiting prompts take the places of ended rows."""

    takes_turns = takes_stop_strings = True

    def generate(self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **how: Any) -> Generation:
        if problem := slot_problem(model):
            remedy = "set generation_backend: auto" if how["turns"] is None else "several turns need slots"
            raise ValueError(
                f"generation_backend is {self.name}, but {type(model).__name__} cannot be sampled in slots: {problem}; "
                f"{remedy}"
            )
        return sample_in_slots(model, prompts, params, **how)


@GENERATION_BACKENDS.implement("auto")
class AutoBackend(SlotsBackend):
    """Slots for models that allow them, `model.generate` for the others."""

    fallback: str | None = None
    """Why nothing is sampled in slots, where a process has found that the policy cannot be."""

    def generate(self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **how: Any) -> Generation:
        if how["turns"] is None and (self.fallback or slot_problem(model)):
            return sample_with_generate(model, prompts, params, rows_at_once=how["rows_at_once"], hooks=how["hooks"])
        return super().generate(model, prompts, params, **how)
