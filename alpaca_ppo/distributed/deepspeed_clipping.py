"""Clips policy and critic under DeepSpeed by a norm of their own; by itself DeepSpeed clips all parameters by one norm,
so that a large value loss would shrink the policy's step.

The code follows DeepSpeed 0.19.8.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

Role = Literal["policy", "critic"]


class DeepSpeedClipping:
    """The gradient norms and the clipping of a ZeRO optimizer, for policy and critic.

    A ZeRO optimizer's `step` computes the norm of each of its groups, in their order, combines them into one that tells
    whether the step is skipped, and then passes that to `unscale_and_clip_grads` for each group, in the same order.
    DeepSpeed has no option to clip groups on their own (https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/
    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py), so these methods are wrapped; delete this class once it has.

    Args:
        zero: DeepSpeed's ZeRO optimizer; its methods are replaced on the instance.
        roles: of each group of the torch optimizer inside, all of whose parameters have that role.
        limits: the largest norm of each role.
        stage: of ZeRO, 1 to 3.
    """

    def __init__(self, zero: Any, roles: Sequence[Role], limits: Mapping[Role, float], *, stage: int) -> None:
        self._zero, self._limits = zero, limits
        # Stage 3 divides an optimizer group into sub-groups.
        self._roles = (
            [roles[zero.sub_group_to_group_id[i]] for i in range(len(zero.fp16_groups))] if stage == 3 else roles
        )
        self._group_norms: list[Tensor] = []
        self._clipped = 0
        # The second takes the place of the first if the optimizer is offloaded.
        for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
            setattr(zero, name, self._recorded(getattr(zero, name)))
        self._clip = zero.unscale_and_clip_grads
        zero.unscale_and_clip_grads = self._clip_next
        if stage != 3:
            # In bfloat16 these stages look for inf and NaN before the norm, which would end the step without telling
            # whose gradient it was. The norm of such a gradient is not finite and ends it too.
            zero.check_overflow = lambda partition_gradients: None

    @contextmanager
    def of_one_step(self) -> Iterator[dict[Role, float]]:
        """A block in which the ZeRO optimizer takes one step; the yielded norms, before clipping, are filled in at its
        end. A norm is inf if the gradient is not finite.
        """
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norms: dict[Role, float] = {}
        self._group_norms, self._clipped = [], 0
        yield norms
        assert len(self._group_norms) == len(self._roles)
        for role in self._limits:
            of_role = self._norms_of(role)
            norms[role] = float(combine_grad_norm_groups(of_role)) / self._zero.loss_scale if of_role else 0.0
        assert self._clipped == (0 if self._zero.overflow else len(self._roles))

    def _norms_of(self, role: Role) -> list[Tensor]:
        return [norm for norm, of in zip(self._group_norms, self._roles, strict=True) if of == role]

    def _recorded(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(*arguments: Any) -> Tensor:
            self._group_norms.append(compute(*arguments))
            return self._group_norms[-1]

        return recorded

    def _clip_next(self, gradients: Any, total_norm: Tensor) -> None:
        """Clips the group (its gradients, or its number under stage 3) whose turn it is, by the norm of its role."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        role = self._roles[self._clipped]
        self._clipped += 1
        self._zero.clip_grad = self._limits[role]
        self._clip(gradients, combine_grad_norm_groups(self._norms_of(role)))
