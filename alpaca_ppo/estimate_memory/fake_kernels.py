"""What transformers and torch do with fake tensors otherwise than in a run, put right for the planner's passes."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils


def one_sequence_a_row() -> Any:
    """Inside, models that get no mask take each row for one sequence, as they do in a run.

    transformers reads it off the position ids, but of fake tensors it assumes several, and makes a mask of all pairs of
    tokens (https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py). To go when it
    takes fake tensors for what they are.
    """
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(states, weights)
        return states.new_empty(states.size(0), weights.size(2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in pairs)


def experts_of_any_dtype() -> Any:
    """Inside, the product of states (S, K) with the weights (experts, K, N) of each one's expert is there in any dtype.

    Of fake tensors torch takes bfloat16 alone
    (https://github.com/pytorch/pytorch/blob/main/torch/_meta_registrations.py). To go when it takes float32 too.
    """

    def grouped(states: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        return _GroupedProduct.apply(states, weights)  # type: ignore[no-any-return]

    # Versions of torch without it have no kernel of their own either.
    return mock.patch.object(functional, "grouped_mm", grouped, create=True)
