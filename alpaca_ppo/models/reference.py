"""The reference policy of the KL penalty, without gradients.

It is a frozen copy, which may stay in host memory between passes, or the trained model itself with another adapter or
none. Which one a run uses is decided in `factory`.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from alpaca_ppo.models.policy import Policy


class CopiedReference:
    """A separate frozen model.

    Args:
        policy: the reference; its parameters are frozen here.
        offloaded: True keeps it in host memory, and moves it to the device only inside `on_device`.
    """

    def __init__(self, policy: Policy, *, offloaded: bool = False) -> None:
        self.policy, self.offloaded = policy.requires_grad_(False), offloaded

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[Policy]:
        """Yields the frozen model, on `device` inside the block."""
        self.policy.to(device)
        try:
            yield self.policy
        finally:
            if self.offloaded:
                self.policy.to("cpu")


class AdapterReference:
    """The policy's own base model with another adapter or none, so that there is no second copy of the base.

    Args:
        policy: the policy in training, with adapters.
        adapter: the adapter of the reference; None uses the base model without adapters.
    """

    def __init__(self, policy: Policy, adapter: str | None) -> None:
        assert policy.adapters is not None
        self.policy, self.adapter, self.adapters = policy, adapter, policy.adapters

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[Policy]:
        """Yields the policy, which acts as the reference inside the block."""
        with self.adapters.active(self.adapter):
            yield self.policy


Reference = CopiedReference | AdapterReference
"""Provides the reference policy for a pass over the rollouts."""


def initial_policy(policy: Policy) -> Policy:
    """Returns a copy of the model that the training of `policy` starts from, with bitwise equal outputs.

    A subclass of `Policy` is called with the copied model as its only argument. An adapter that training starts from
    stays an adapter in the copy: merging would round it to the base's precision, and the KL would not be 0 at step 0.
    """
    if policy.adapters is None or policy.adapters.starting_point is None:
        return type(policy)(copy_without_adapters(policy).eval())
    peft: Any = copy.deepcopy(policy.adapters.peft).eval()
    start = policy.adapters.starting_point
    peft.set_adapter(start)
    for name in [name for name in peft.peft_config if name != start]:
        peft.delete_adapter(name)
    return type(policy)(peft.get_base_model())


def copy_without_adapters(policy: Policy) -> PreTrainedModel:
    """Returns a trainable copy of the model that the training of `policy` starts from, without adapter layers.

    An adapter that training starts from is merged into it.
    """
    if policy.adapters is None:
        return copy.deepcopy(policy.model)
    peft: Any = copy.deepcopy(policy.adapters.peft)
    start = policy.adapters.starting_point
    plain: PreTrainedModel = peft.unload() if start is None else peft.merge_and_unload(adapter_names=[start])
    return plain.requires_grad_(True)
