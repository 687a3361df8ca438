"""What ZeRO 3 needs of a model beside DeepSpeed's own hooks."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from alpaca_ppo.models import Policy


def empty_shell(policy: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A model of the same modules as `policy`, without memory for weights."""
    memo: dict[int, Any] = {}
    for parameter in policy.parameters():
        empty = torch.empty(0, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    shell = copy.deepcopy(policy, memo)
    torch.nn.Module.to(shell, device)
    return shell


def uses_head(module: nn.Module, policy: Policy) -> None:
    """Tells DeepSpeed that the forward pass of `module` reads the head's parameters, whose own it does not call."""
    import deepspeed

    for parameter in policy.head.parameters():
        deepspeed.zero.register_external_parameter(module, parameter)
