"""Reads prompts into slots: each is computed once for all its samples, and a beginning that several prompts share, such
as a system prompt or examples, once for all of them.

As samples go into slots at different times, shared states are kept in slots that take no part in steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix

from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.generation.slot_passes import NewTokens, SlotCache, extend

# Tokens; a pass over a shorter common beginning costs more than it saves.
MIN_COMMON = 16


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that begin with the same tokens.

    Attributes:
        prompts: their indices, in ascending order.
        common: how many tokens are computed once for all of them; 0 for a group of one.
    """

    prompts: list[int]
    common: int

    @property
    def saved(self) -> int:
        """Tokens that need not be computed."""
        return (len(self.prompts) - 1) * self.common


def group_prompts(prompts: Sequence[list[int]]) -> list[PromptGroup]:
    """Returns groups that save many tokens, ordered by their first prompts; each prompt is in one, and has at least one
    token after the common ones.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i])
    # Prompts with a common beginning are neighbours in this order.
    shared = [_common(prompts[a], prompts[b]) for a, b in pairwise(order)]
    # Beginnings form a tree. This is the path to the latest prompt: the length of each beginning, and the groups so far
    # of prompts with this beginning, except those further down the path.
    path: list[tuple[int, list[PromptGroup]]] = [(0, [])]
    for i, common in zip(order, [*shared, 0], strict=True):
        groups = [PromptGroup([i], 0)]
        # The next prompt lacks the beginnings that are longer than `common`, so their groups are complete.
        while common < path[-1][0]:
            length, longer_groups = path.pop()
            groups = _joined(prompts, length, longer_groups + groups)
        if common > path[-1][0]:
            path.append((common, groups))
        else:
            path[-1][1].extend(groups)
    return sorted(path[0][1], key=lambda group: group.prompts[0])


def _joined(prompts: Sequence[list[int]], common: int, groups: list[PromptGroup]) -> list[PromptGroup]:
    """Joins the groups that save fewer than `common` tokens per prompt, if they save more as one group. The prompts of
    all `groups` have `common` tokens in common. Returns the groups that result.
    """
    kept = [group for group in groups if group.saved >= common * len(group.prompts)]
    replaced = [group for group in groups if group.saved < common * len(group.prompts)]
    joined = PromptGroup(sorted(i for group in replaced for i in group.prompts), common)
    # `replaced` may be empty.
    mean_length = sum(len(prompts[i]) for i in joined.prompts) / max(1, len(joined.prompts))
    # A pass over a beginning that is a small share of the prompts costs more than it saves.
    long_enough = common >= max(MIN_COMMON, mean_length / 8)
    if long_enough and joined.saved > sum(group.saved for group in replaced):
        return [*kept, joined]
    return groups


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with, at least one token before the end of each."""
    return min(len(commonprefix([one, other])), len(one) - 1, len(other) - 1)


class SlotPrompts:
    """Reads prompts, each for n rows, into slots of `columns` tokens: `slots` for the steps, and extra ones.

    Prompts come in the order of their `groups`, and all samples of a prompt one after the other. So one extra slot is
    enough to keep the beginning of a group, and one to keep a prompt whose samples wait.

    Attributes:
        groups: prompts by their common beginnings, in order.
        cache: all slots, those for the steps first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        n: int,
        *,
        slots: int,
        columns: int,
        output_layers: Sequence[nn.Module],
    ) -> None:
        self._model, self._prompts = model, prompts
        self.groups = group_prompts(prompts)
        self._group = {prompt: group for group in self.groups for prompt in group.prompts}
        extra_slots = int(any(group.common for group in self.groups)) + int(n > 1)
        self.cache = SlotCache(slots + extra_slots, columns, output_layers)
        self._split_slot, self._beginning_slot = slots, slots + extra_slots - 1
        # A prompt with samples that wait, and the logits (V,) after it.
        self._split: tuple[int, Tensor] | None = None

    def read(
        self, placed: dict[int, list[int]], appended: Sequence[NewTokens], next_prompt: int | None
    ) -> dict[int, Tensor]:
        """Reads each prompt of `placed` into its slots there, and the tokens `appended` to rows that go on. Returns the
        logits (V,) after the last token of each slot. `next_prompt` is the prompt of the first row that still waits.
        """
        logits: dict[int, Tensor] = {}
        if placed and self._split is not None:
            # Samples that waited, of a prompt that was read earlier.
            prompt, split_logits = self._split
            assert next(iter(placed)) == prompt, "rows wait in the order of their prompts"
            self.cache.copy(self._split_slot, placed[prompt], len(self._prompts[prompt]))
            logits |= dict.fromkeys(placed[prompt], split_logits)
            if prompt != next_prompt:
                self._split = None
        first_slots = {prompt: slots[0] for prompt, slots in placed.items() if slots[0] not in logits}
        without_past, with_past = [], list(appended)
        for prompt, slot in first_slots.items():
            tokens, group = self._prompts[prompt], self._group[prompt]
            if group.common:
                with_past.append(NewTokens(slot, group.common, tokens[group.common :]))
            if not group.common or prompt == group.prompts[0]:
                without_past.append(NewTokens(slot, 0, tokens[: group.common or len(tokens)]))
        # In a separate pass, because attention without earlier tokens needs no padding.
        logits |= extend(self._model, self.cache, without_past)
        self._share_beginnings(first_slots, next_prompt)
        logits |= extend(self._model, self.cache, with_past)
        for prompt, slot in first_slots.items():
            others, length = placed[prompt][1:], len(self._prompts[prompt])
            self.cache.copy(slot, others, length)
            logits |= dict.fromkeys(others, logits[slot])
            if prompt == next_prompt:
                self.cache.copy(slot, [self._split_slot], length)
                self._split = prompt, logits[slot].clone()
        return logits

    def _share_beginnings(self, slots: dict[int, int], next_prompt: int | None) -> None:
        """Copies the beginning of each group from the slot of its first prompt to those of its other prompts, and keeps
        that of `next_prompt` in `_beginning_slot`.
        """
        for prompt, slot in slots.items():
            group = self._group[prompt]
            source = slots.get(group.prompts[0], self._beginning_slot)
            if group.common and source != slot:
                self.cache.copy(source, [slot], group.common)
        if next_prompt is not None:
            group = self._group[next_prompt]
            if group.common and group.prompts[0] in slots:
                self.cache.copy(slots[group.prompts[0]], [self._beginning_slot], group.common)
