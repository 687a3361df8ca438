"""The states of the policy that a critic of the layout `cached` reads, from the rollout to the end of its passes."""

from collections.abc import Sequence
from itertools import count, islice

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models.state_reader import StateReader
from alpaca_ppo.ppo.batch_packing import Plan, plan_micro_batches
from alpaca_ppo.ppo.device_rows import upload


class StateCache:
    """States of this rank's responses of the step in progress, in host memory and the dtype they were computed in.

    A response is found by its key: the rank that has its states, and its number, used once in a process. Keys travel
    with the rollouts and states do not, so a critic's step trains each row on the rank that sampled it.
    """

    def __init__(self, accelerator: Accelerator, reader: StateReader | None) -> None:
        self._rank, self._num_ranks = accelerator.process_index, accelerator.num_processes
        self._shape = () if reader is None else reader.state_shape
        self._step = -1
        self._numbers = count()
        self._rows: dict[int, Tensor] = {}

    def begin(self, step: int) -> None:
        """Drops the states of other steps than `step`."""
        if step != self._step:
            self._step, self._rows = step, {}

    def add(self, states: Tensor, response_mask: Tensor) -> Tensor:
        """Keeps `states` (N, layers, H), of the N tokens under `response_mask` (B, R); returns the keys (B, 2), int64,
        of the rows.
        """
        kept = states
        if states.device.type != "cpu":
            kept = torch.empty(states.shape, dtype=states.dtype, pin_memory=states.device.type == "cuda").copy_(states)
        rows = kept.split(response_mask.sum(dim=1).tolist())
        numbers = list(islice(self._numbers, len(rows)))
        self._rows |= zip(numbers, rows, strict=True)
        return torch.tensor([[self._rank, number] for number in numbers], dtype=torch.long).view(-1, 2)

    def states(self, keys: Tensor, device: torch.device, lengths: Sequence[int] | None = None) -> Tensor:
        """The states (N, layers, H) of the rows with these `keys`, all of this rank, on `device`.

        Raises:
            ValueError: for a row of an earlier step, or of another number of tokens than in `lengths`.
        """
        numbers = keys[:, 1].tolist()
        if any(number not in self._rows for number in numbers):
            problem = "a cached critic has no states of these rollouts any more, because a later step was sampled"
            raise ValueError(f"{problem}; update on them before the next rollout, or set critic_layout: separate")
        kept = [self._rows[number] for number in numbers]
        if lengths is not None and (found := [len(row) for row in kept]) != list(lengths):
            problem = f"response_mask has {list(lengths)} tokens in rows of which the policy's states have {found}"
            raise ValueError(f"{problem}; leave the mask as sampled, or set critic_layout: separate")
        # Row by row: a copy of them all would not be in pinned memory.
        rows = [upload(row, device) for row in kept]
        return torch.cat(rows) if rows else torch.empty(0, *self._shape, device=device)

    def plan(self, keys: Tensor, lengths: Sequence[int], args: PPOConfig) -> Plan:
        """The micro-batches of each rank, of its rows among those with these `keys`, by the tokens in `lengths`."""
        plan: Plan = []
        for rank in range(self._num_ranks):
            rows = (keys[:, 0] == rank).nonzero().flatten().tolist()
            (own,) = plan_micro_batches([lengths[row] for row in rows], args, padding_free=True, num_ranks=1)
            plan.append([[rows[i] for i in batch] for batch in own])
        most = max(map(len, plan))
        return [own + [[] for _ in range(most - len(own))] for own in plan]
