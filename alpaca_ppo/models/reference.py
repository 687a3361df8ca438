"""The reference policy: a frozen copy, one that waits in host memory, or the trained model with its adapter off."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from alpaca_ppo.models.policy import Policy


class Reference(Protocol):
    """What lends a policy for a pass over the rollouts."""

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[Policy]:
        """Inside, the reference policy, on `device`."""
        ...


class CopiedReference:
    """A frozen copy.

    Args:
        policy: the copy.
        offloaded: True keeps it in host memory, and on the device only while it is present.
    """

    def __init__(self, policy: Policy, *, offloaded: bool = False) -> None:
        self.policy, self.offloaded = policy.requires_grad_(False), offloaded

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[Policy]:
        """Inside, the copy, on `device`."""
        self.policy.to(device)
        try:
            yield self.policy
        finally:
            if self.offloaded:
                self.policy.to("cpu")


class AdapterReference:
    """The policy's own model under another adapter, or without any: no second copy of the base.

    Args:
        policy: with adapters.
        adapter: the adapter that is the reference; None = the base alone.
    """

    def __init__(self, policy: Policy, adapter: str | None) -> None:
        assert policy.adapters is not None
        self.policy, self.adapter, self.adapters = policy, adapter, policy.adapters

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[Policy]:
        """Inside, the policy's module speaks for the reference."""
        with self.adapters.active(self.adapter):
            yield self.policy


def frozen_copy(policy: PreTrainedModel) -> Policy:
    """A reference policy: a copy that no optimizer and no later update of `policy` touches."""
    return Policy(copy.deepcopy(policy).eval()).requires_grad_(False)


def frozen_start(policy: Policy) -> Policy:
    """A reference policy: a copy of what the training of `policy` starts from, with the same numbers to the last bit.

    An adapter that training starts from stays one in the copy: merged, it would be rounded to the base's precision, and
    KL would not be 0 at step 0.
    """
    if policy.adapters is None or policy.adapters.starting_point is None:
        return Policy(without_adapters(policy).eval()).requires_grad_(False)
    peft: Any = copy.deepcopy(policy.adapters.peft).eval()
    start = policy.adapters.starting_point
    peft.set_adapter(start)
    for name in [name for name in peft.peft_config if name != start]:
        peft.delete_adapter(name)
    return Policy(peft.get_base_model()).requires_grad_(False)


def without_adapters(policy: Policy) -> PreTrainedModel:
    """A copy of the language model that the training of `policy` starts from, without any adapter in its layers; all
    of it trainable.
    """
    if policy.adapters is None:
        return copy.deepcopy(policy.model)
    peft: Any = copy.deepcopy(policy.adapters.peft)
    start = policy.adapters.starting_point
    plain: PreTrainedModel = peft.unload() if start is None else peft.merge_and_unload(adapter_names=[start])
    return plain.requires_grad_(True)
