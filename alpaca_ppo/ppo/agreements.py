"""What all processes must do in the same way, though each tries for itself what its models can do: rows without
padding, and sampling in slots.

These trials may end differently where machines, devices or versions of libraries differ. Processes that plan
micro-batches differently would train on different rows and wait for each other forever.
"""

from accelerate import Accelerator

from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.generation import Backend
from alpaca_ppo.models import ActorCritic, CopiedReference, Policy, Reference
from alpaca_ppo.models.actor_critic import Critic


def agree_on_padding(actor_critic: ActorCritic, reference: Reference | None, accelerator: Accelerator) -> str:
    """Lets the rows of policy, critic and copied reference each have padding on every process if they have on any;
    returns which of them have, and why, in words: empty if none has. All ranks must call this.
    """
    models: dict[str, Policy | Critic] = {"policy": actor_critic.policy}
    if actor_critic.critic is not None and actor_critic.critic.backbone is not None:
        # Any other critic reads rows as the policy does.
        models["critic"] = actor_critic.critic
    if isinstance(reference, CopiedReference):
        models["reference"] = reference.policy
    own = {name: model.padding_reason for name, model in models.items() if model.padding_reason is not None}
    by_reason: dict[str, list[str]] = {}
    padded: set[str] = set()
    for rank, found in enumerate(gather_list(own, accelerator)):
        for name in [name for name in models if name in found and name not in padded]:
            padded.add(name)
            by_reason.setdefault(found[name], []).append(name if name in own else f"{name} on process {rank}")
            models[name].padding_reason = found[name]
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def agree_on_backend(backend: Backend, engine: Engine, *, answered: bool) -> str:
    """Lets `backend` use its fallback on every process if it cannot sample from the policy on any (`Backend.problem`);
    returns why, in words: empty if it can. All ranks must call this.

    Raises:
        ValueError: on every rank, if the backend has no fallback, or something answers the policy (`answered`), which
            takes a backend of several turns.
    """
    problem = f"generation_backend {backend.name!r} samples one turn" if answered and not backend.takes_turns else ""
    if not backend.has_own_weights:
        with engine.sampling() as model:
            own = backend.problem(model)
        problem = next((found for found in gather_list(own, engine.accelerator) if found), problem)
    if problem and answered:
        raise ValueError(f"environments answer the policy, which cannot be sampled over several turns: {problem}")
    if problem:
        backend.use_fallback(problem)
    return problem
