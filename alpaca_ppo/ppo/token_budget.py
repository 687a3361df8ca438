"""How many tokens a micro-batch may have, and by how much fewer once a device has run out of memory.

How rows are divided under a budget is in `minibatches`; `updates` makes the optimizer step again after an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.ppo.minibatches import Plan, plan_equal_rows, plan_micro_batches, plan_padded_micro_batches

REMEDIES = (
    "set gradient_checkpointing: true, lower logprob_chunk_size, train adapters (use_peft), or shard with DeepSpeed "
    "ZeRO; alpaca-ppo estimate-memory shows what each saves"
)


class OutOfMemory(NamedTuple):
    """A micro-batch that did not fit on its device."""

    rank: int
    rows: int
    """Its responses."""
    tokens: int
    """What it costs of the budget: its tokens, padding included if the model needs padding."""
    cause: str
    """The first line of torch's message."""


class TokenBudget:
    """The budget of a run's micro-batches.

    Args:
        args: of the run.
        padding_free: whether rows are packed without padding; otherwise a micro-batch costs its rows times the longest
            of them.
        num_ranks: number of processes.
    """

    def __init__(self, args: PPOConfig, *, padding_free: bool, num_ranks: int) -> None:
        self.padding_free, self._num_ranks = padding_free, num_ranks
        self._rows, self._step_rows = args.step_per_device_batch_size, args.step_batch_size
        self._row_tokens = args.longest_row
        # On one process nobody waits for others, and no number moves from what it was without token budgets.
        self._equal_rows = args.max_tokens_per_micro_batch is None and not padding_free and num_ranks == 1
        self.configured = args.micro_batch_tokens
        """What the configuration sets."""
        self.max_tokens = self.configured
        """Tokens that a micro-batch may have now."""

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The micro-batches of each rank, the same on every rank.

        Args:
            lengths: tokens of each row of the optimizer step, in the pass where it has the most.
        """
        if self.padding_free:
            return plan_micro_batches(lengths, num_ranks=self._num_ranks, max_tokens=self.max_tokens)
        if self._equal_rows and self.max_tokens == self.configured:
            # The number of a full step batch, also for a smaller last one.
            return plan_equal_rows(lengths, num_micro_batches=-(-self._step_rows // self._rows))
        return plan_padded_micro_batches(lengths, num_ranks=self._num_ranks, max_tokens=self.max_tokens)

    def cost(self, lengths: Sequence[int]) -> int:
        """What a micro-batch of rows of `lengths` tokens costs of the budget."""
        return sum(lengths) if self.padding_free else len(lengths) * max(lengths, default=0)

    def lower(self, failures: Sequence[OutOfMemory]) -> str:
        """Halves the budget after `failures` (at least one; the same on every rank); returns the message for the user.

        The new budget is half of the tokens that did not fit, so that the next plan is another one.

        Raises:
            torch.OutOfMemoryError: if a single response did not fit, or a micro-batch without any.
        """
        least = min(failures, key=lambda failure: (failure.rows > 1, failure.tokens, failure.rank))
        what = f"process {least.rank} ran out of memory in a micro-batch of"
        if least.rows == 0:
            raise torch.OutOfMemoryError(_without_rows(least))
        if least.rows == 1:
            raise torch.OutOfMemoryError(
                f"{what} one response ({least.tokens} tokens), so smaller micro-batches cannot help; {REMEDIES}, or "
                f"lower query_len or response_len. {least.cause}"
            )
        before, self.max_tokens = self.max_tokens, least.tokens // 2
        text = (
            f"{what} {least.rows} responses ({least.tokens} tokens): micro-batches now have at most {self.max_tokens} "
            f"tokens instead of {before}, and the optimizer step is made again, with the same numbers up to rounding"
        )
        if self.max_tokens < self._row_tokens:
            return text
        return f"{text}. To start with that, set max_tokens_per_micro_batch: {self.max_tokens}"

    def unrepeatable(self, failure: OutOfMemory) -> torch.OutOfMemoryError:
        """The error where the optimizer step cannot be made again, because ranks have exchanged parts of a gradient."""
        if failure.rows == 0:
            return torch.OutOfMemoryError(_without_rows(failure))
        smaller = max(failure.tokens // 2, self._row_tokens)
        return torch.OutOfMemoryError(
            f"process {failure.rank} ran out of memory in a micro-batch of {failure.rows} responses "
            f"({failure.tokens} tokens), and under DeepSpeed ZeRO an optimizer step cannot be made again with smaller "
            f"ones, because gradients are exchanged within its backward passes; set max_tokens_per_micro_batch: "
            f"{smaller} and resume from the last checkpoint, or {REMEDIES}. {failure.cause}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The budget if it has been lowered, with the one that was configured; else nothing."""
        if self.max_tokens == self.configured:
            return {}
        return {"token_budget": {"configured": self.configured, "max_tokens": self.max_tokens}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a lowered budget, unless the run has been configured with another one since."""
        budget = state.get("token_budget", {})
        if budget.get("configured") == self.configured:
            self.max_tokens = budget["max_tokens"]


def _without_rows(failure: OutOfMemory) -> str:
    return (
        f"process {failure.rank} ran out of memory in a micro-batch without responses, which it makes because others "
        "have more of them; its memory is taken by something else, such as weights, the optimizer's state, a captured "
        f"sampler or another program: smaller micro-batches cannot help; {REMEDIES}. {failure.cause}"
    )
