"""The generation backends, which run the model for `generate`; `register_generation_backend` adds one.

The built-in backends choose each token by the same numbers, so they sample the same tokens.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.generation.hf_generate import sample_with_generate
from alpaca_ppo.generation.responses import Generation
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.slot_probe import slot_problem
from alpaca_ppo.generation.slots import OnFinished, sample_in_slots
from alpaca_ppo.generation.turns import Turns
from alpaca_ppo.registry import GENERATION_BACKENDS

Backend = Callable[..., Generation]
"""A backend; see `register_generation_backend`."""


def register_generation_backend(
    name: str,
    *,
    refills: bool = False,
    takes_turns: bool = False,
    takes_stop_strings: bool = False,
) -> Callable[[Backend], Backend]:
    """Returns a decorator that adds the generation backend `name`.

    A backend is a function

        backend(model, queries, query_attn_masks, *, sampling_params, prompt_ids, before_token) -> Generation

    that samples `sampling_params.num_return_sequences` responses to each prompt. `model` is in eval mode and computes
    no gradients; `queries` (B, Q) int64, left-padded, `query_attn_masks` (B, Q) int64 and `prompt_ids` (B,) are on its
    device. `before_token` is that of `generate`; a slow backend should call it regularly. To sample the same tokens as
    the built-in backends, draw the random numbers from `sampling_params.random_keys(prompt_ids)`.

    Args:
        name: the value of `generation_backend` that selects it.
        refills: the backend also gets `slots`, how many rows to sample at once (None: all), and `on_finished`, to be
            called once for each row with `generate`'s arguments, or None; a rollout then passes it all its prompts.
            Otherwise a rollout calls the backend with chunks of prompts.
        takes_turns: the backend also gets `turns`, the `generation.Turns` of the call or None, and lets responses go on
            as `generation.turns` describes. Otherwise a call with turns is refused.
        takes_stop_strings: the backend ends a response with the token that completes one of
            `sampling_params.stop_strings.strings`. Otherwise a call with stop strings is refused.

    Raises:
        ValueError: if the name is taken, or contains a space, comma or colon.
        TypeError: if the backend cannot be called.
    """
    return GENERATION_BACKENDS.register(
        name,
        refills=refills,
        takes_turns=takes_turns,
        takes_stop_strings=takes_stop_strings,
    )


def resolve_backend(name: str, model: PreTrainedModel) -> str:
    """Returns the backend that `name` stands for: `auto` is `slots` if the model allows it, else `generate`."""
    if name != "auto":
        return name
    return "generate" if slot_problem(model) else "slots"


def run_backend(
    model: PreTrainedModel,
    queries: Tensor,
    query_attn_masks: Tensor,
    *,
    sampling_params: SamplingParams,
    prompt_ids: Tensor,
    before_token: Callable[[], Any],
    slots: int | None = None,
    on_finished: OnFinished | None = None,
    turns: Turns | None = None,
) -> Generation:
    """Returns the responses of the backend `sampling_params.backend`.

    Raises:
        ValueError: for an unknown backend, for turns or stop strings that it does not take, or if it does not return a
            `Generation` of the right shapes.
    """
    name, rows = sampling_params.backend, len(queries) * sampling_params.num_return_sequences
    missing = set(range(rows))
    refills, takes_turns = (GENERATION_BACKENDS.trait(name, trait) for trait in ("refills", "takes_turns"))
    if turns is not None and not takes_turns:
        raise ValueError(
            f"generation_backend is {name}, which samples responses of one turn only, but turns were given; set "
            f"generation_backend: slots, or register a backend of your own with takes_turns=True"
        )

    if sampling_params.stop_strings is not None and not GENERATION_BACKENDS.trait(name, "takes_stop_strings"):
        raise ValueError(
            f"stop_strings is {list(sampling_params.stop_strings.strings)}, but generation_backend {name!r} does not "
            "end responses at strings; choose another backend, or register yours with takes_stop_strings=True"
        )

    def report(done: list[int], finished: Generation) -> None:
        assert on_finished is not None
        if wrong := sorted(row for row, times in Counter(done).items() if times > 1 or row not in missing):
            raise ValueError(_wrong_report(name, f"with the rows {wrong}", rows))
        missing.difference_update(done)
        on_finished(done, finished)

    generation = GENERATION_BACKENDS.get(name)(
        model,
        queries,
        query_attn_masks,
        sampling_params=sampling_params,
        prompt_ids=prompt_ids,
        before_token=before_token,
        **({"slots": slots, "on_finished": on_finished and report} if refills else {}),
        **({"turns": turns} if takes_turns else {}),
    )
    generation = _check_generation(generation, name, (rows, sampling_params.max_new_tokens))
    if on_finished is not None and not refills:
        on_finished(list(range(rows)), generation)
    elif on_finished is not None and missing:
        raise ValueError(_wrong_report(name, f"without the rows {sorted(missing)}", rows))
    return generation


def _wrong_report(backend: str, problem: str, rows: int) -> str:
    return (
        f"the generation_backend {backend!r} called on_finished {problem} of {rows}; a backend with refills=True must "
        "call it once for each row"
    )


def _check_generation(generation: Any, backend: str, shape: tuple[int, int]) -> Generation:
    if not isinstance(generation, Generation):
        raise ValueError(
            f"the generation_backend {backend!r} returned a {type(generation).__name__}; it must return a "
            "generation.Generation"
        )
    wanted = {"responses": shape, "response_mask": shape, "logprobs": shape, "stopped": shape[:1]}
    for field, tensor in vars(generation).items():
        if tensor.shape != wanted[field]:
            raise ValueError(
                f"the generation_backend {backend!r} returned {field} of shape {tuple(tensor.shape)}; it must be "
                f"{wanted[field]}: one row per response, max_new_tokens columns"
            )
    return generation


GENERATION_BACKENDS.implement("generate")(sample_with_generate)


@GENERATION_BACKENDS.implement("auto")
def _resolved(
    model: PreTrainedModel, *prompts: Tensor, sampling_params: SamplingParams, turns: Turns | None, **keywords: Any
) -> Generation:
    """The responses of the backend that suits the model; turns leave no choice."""
    params = replace(sampling_params, backend=resolve_backend("auto", model) if turns is None else "slots")
    return run_backend(model, *prompts, sampling_params=params, turns=turns, **keywords)


@GENERATION_BACKENDS.implement("slots")
def _in_slots(model: PreTrainedModel, *prompts: Tensor, turns: Turns | None, **keywords: Any) -> Generation:
    """`sample_in_slots`, for models that support it."""
    problem = slot_problem(model)
    if problem is None:
        return sample_in_slots(model, *prompts, turns=turns, **keywords)
    remedy = "set generation_backend: auto" if turns is None else "responses of several turns need slots"
    raise ValueError(
        f"generation_backend is slots, but {type(model).__name__} (model_type {model.config.model_type!r}) cannot be "
        f"sampled in slots: {problem}; {remedy}"
    )
