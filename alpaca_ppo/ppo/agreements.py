"""Makes all processes choose the same: rows with or without padding, sampling in slots or by `model.generate`.

Each process tries what its models can do, with results that may differ between machines, devices and versions of
libraries. Processes with different micro-batches would wait for each other forever.
"""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.generation import Backend
from alpaca_ppo.models import ActorCritic, CopiedReference, Critic, Policy


def agree_on_padding(actor_critic: ActorCritic, frozen: Mapping[str, Any], accelerator: Accelerator) -> str:
    """Pads the rows of policy, critic or a copied model among the `frozen` ones on every process if the model needs it
    on any process.

    Returns which models have padding and why, as text; empty if none has. Every rank must call it.
    """
    models: dict[str, Policy | Critic] = {"policy": actor_critic.policy}
    if actor_critic.critic is not None and actor_critic.critic.backbone is not None:
        # Any other critic reads the policy's rows.
        models["critic"] = actor_critic.critic
    models |= {name: model.policy for name, model in frozen.items() if isinstance(model, CopiedReference)}
    local = {name: model.padding_reason for name, model in models.items() if model.padding_reason is not None}
    first_reasons: dict[str, tuple[int, str]] = {}
    for rank, reasons in enumerate(gather_list(local, accelerator)):
        for name, reason in reasons.items():
            first_reasons.setdefault(name, (rank, reason))
    by_reason: dict[str, list[str]] = {}
    for name, (rank, reason) in first_reasons.items():
        models[name].padding_reason = reason
        by_reason.setdefault(reason, []).append(name if name in local else f"{name} on process {rank}")
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def agree_on_backend(backend: Backend, engine: Engine, *, multi_turn: bool) -> str:
    """Makes the backend use its fallback on every process if it cannot sample the policy on any (`Backend.problem`).

    Returns why it cannot, as text; empty if it can. Every rank must call it.

    Raises:
        ValueError: on every rank, if it cannot, and has no fallback or responses have several turns.
    """
    problem = f"generation_backend {backend.name!r} samples one turn" if multi_turn and not backend.takes_turns else ""
    if not backend.has_own_weights:
        with engine.sampling() as model:
            local = backend.problem(model)
        problem = next((reason for reason in gather_list(local, engine.accelerator) if reason), problem)
    if problem and multi_turn:
        raise ValueError(f"environments answer the policy, which cannot be sampled over several turns: {problem}")
    if problem:
        backend.use_fallback(problem)
    return problem
