"""What all processes do alike, though each has tried for itself what its models can do: rows without padding, and
sampling in slots.

The trials may end differently where machines, devices or versions of libraries differ. Processes with other plans of
micro-batches would train on other rows and wait for each other forever.
"""

from collections.abc import Mapping
from dataclasses import replace

from accelerate import Accelerator

from alpaca_ppo.distributed.collectives import any_rank, gather_list
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.generation.backends import resolve_backend
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models.actor_critic import Critic
from alpaca_ppo.models.policy import Policy


def agree_on_padding(models: Mapping[str, Policy | Critic], accelerator: Accelerator) -> str:
    """Lets the rows of a model have padding on every process if they have on any; returns which of `models` have, and
    why, in words: empty if none has.
    """
    own = {
        name: model.padding_reason or f"{type(model).__name__} reads padded rows"
        for name, model in models.items()
        if not model.padding_free
    }
    reasons: dict[str, str] = {}
    for rank, found in enumerate(gather_list(own, accelerator)):
        for name in found.keys() - reasons.keys():
            place = "" if name in own else f" on process {rank}"
            reasons[name] = f"{name}{place}: {found[name]}"
            models[name].padding_free = False
    return "; ".join(reasons[name] for name in models if name in reasons)


def agree_on_backend(sampling_params: SamplingParams, engine: Engine) -> SamplingParams:
    """`sampling_params` with the backend `decode` instead of `auto` if the policy cannot be sampled in slots on every
    process. All ranks must call this.
    """
    if sampling_params.backend != "auto" or engine.accelerator.num_processes == 1:
        return sampling_params
    with engine.sampling() as (model, sharded):
        backend = resolve_backend("auto", model, sharded)
    if any_rank(backend != "slots", engine.accelerator):
        return replace(sampling_params, backend="decode")
    return sampling_params
