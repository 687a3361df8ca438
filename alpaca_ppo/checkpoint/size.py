"""How large a checkpoint will be, before there is one."""

from collections.abc import Iterable

from torch import Tensor


def checkpoint_bytes(trained: Iterable[Tensor], *, adamw: bool) -> int:
    """The least number of bytes that a checkpoint of the `trained` parameters has.

    The run trains in float32 or wider. AdamW adds two moments for each weight; of another optimizer only the weights
    count, and the same number is what the final models need at least. The random states, the schedule and the critic's
    head are left out: they are small.

    Args:
        trained: the parameters; on the meta device they count too.
        adamw: whether the checkpoint holds AdamW's state.
    """
    weights = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in trained)
    return weights * (3 if adamw else 1)
