"""Prompts go into slots: each is computed once for all its samples, and what several begin with once for all of these:
a system prompt, the first lines of a chat template, examples.

Where samples of a prompt, or prompts of one beginning, go into slots at different times, the states that they share
wait in a slot of the cache that takes no part in steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.generation.slot_passes import NewTokens, SlotCache, extend

MIN_COMMON = 16
"""A common beginning that is shorter than this is not worth a pass of its own, in tokens."""


@dataclass(frozen=True)
class PromptGroup:
    """Prompts that begin with the same tokens."""

    prompts: list[int]
    """Their indices, in ascending order."""
    common: int
    """How many tokens are computed once for all of them; 0 for a group of one."""

    @property
    def saved(self) -> int:
        """Tokens that need not be computed."""
        return (len(self.prompts) - 1) * self.common


def group_prompts(prompts: Sequence[Sequence[int]]) -> list[PromptGroup]:
    """Returns groups that save many tokens, ordered by their first prompts; each prompt is in one.

    Each prompt goes on after the common tokens, whose last one is therefore never the prompt's last.
    """
    order = sorted(range(len(prompts)), key=lambda i: list(prompts[i]))
    # Prompts with a common beginning are neighbours in this order.
    shared = [_common(prompts[a], prompts[b]) for a, b in pairwise(order)]
    # A tree of beginnings, of which this is the path to the last prompt: for each beginning its length, and the groups
    # of the prompts with it, those with longer ones included.
    path: list[tuple[int, list[PromptGroup]]] = [(0, [])]
    for i, common in zip(order, [*shared, 0], strict=True):
        groups = [PromptGroup([i], 0)]
        while True:
            if common > path[-1][0]:
                path.append((common, groups))
            else:
                path[-1][1].extend(groups)
            if path[-1][0] == common:
                break
            # The next prompt does not begin with this.
            groups = _joined(prompts, *path.pop())
    return sorted(path[0][1], key=lambda group: group.prompts[0])


def _joined(prompts: Sequence[Sequence[int]], common: int, groups: list[PromptGroup]) -> list[PromptGroup]:
    """The groups of prompts with `common` tokens in common, and those joined whose own save fewer tokens a prompt."""
    joins = [group.saved < common * len(group.prompts) for group in groups]
    members = sorted(i for group in compress(groups, joins) for i in group.prompts)
    joined = PromptGroup(members, common)
    mean = sum(len(prompts[i]) for i in members) / max(1, len(members))
    # A short beginning, or one that is a small share of the prompts, does not pay for a pass.
    worth = common >= max(MIN_COMMON, mean / 8) and joined.saved > sum(group.saved for group in compress(groups, joins))
    return [group for group, join in zip(groups, joins, strict=True) if not join] + [joined] if worth else groups


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with, and go on after."""
    most = min(len(one), len(other)) - 1
    return next((i for i in range(most) if one[i] != other[i]), most)


class SlotPrompts:
    """Reads prompts into slots.

    They come in the order of their groups, all samples of a prompt one after the other, so that one slot is enough for
    the beginning of a group, and one for a prompt.

    Args:
        model: the language model.
        cache: with `extra_slots` slots beyond those of the steps.
        prompts: token ids of each prompt.
        groups: which of them begin alike.
        samples: n, rows of each prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SlotCache,
        prompts: list[list[int]],
        groups: Sequence[PromptGroup],
        samples: int,
    ) -> None:
        self._model, self._cache, self._prompts = model, cache, prompts
        self._group = {prompt: group for group in groups for prompt in group.prompts}
        self._beginning_slot, self._split_slot = cache.slots - 1, cache.slots - self.extra_slots(groups, samples)
        self._split: tuple[int, Tensor] | None = None
        """A prompt whose other samples wait, and the logits (V,) after it."""

    @staticmethod
    def extra_slots(groups: Sequence[PromptGroup], samples: int) -> int:
        """How many slots beyond those of the steps are needed: one for a beginning, one for a prompt whose other
        samples wait.
        """
        return int(any(group.common for group in groups)) + int(samples > 1)

    def read(
        self, placed: dict[int, list[int]], appended: Sequence[NewTokens], next_prompt: int | None
    ) -> dict[int, Tensor]:
        """Reads prompts into slots, and what was appended to other rows; returns the logits (V,) after each slot.

        Args:
            placed: the slots of each prompt that is read now.
            appended: the new tokens of rows that go on.
            next_prompt: the prompt of the first row that waits after those; None if none does.
        """
        logits: dict[int, Tensor] = {}
        new = list(placed)
        if new and self._split is not None:
            # Its other samples are the first that waited.
            prompt, known = self._split
            assert new.pop(0) == prompt, "rows wait in the order of their prompts"
            self._cache.copy(self._split_slot, placed[prompt], len(self._prompts[prompt]))
            logits |= dict.fromkeys(placed[prompt], known)
            self._split = self._split if prompt == next_prompt else None
        slots = {prompt: placed[prompt][0] for prompt in new}
        whole, rests = [], list(appended)
        for prompt, slot in slots.items():
            tokens, group = self._prompts[prompt], self._group[prompt]
            if group.common:
                rests.append(NewTokens(slot, group.common, tokens[group.common :]))
            if not group.common or prompt == group.prompts[0]:
                whole.append(NewTokens(slot, 0, tokens[: group.common or len(tokens)]))
        # Tokens without earlier ones are a pass of their own: their attention needs no padding.
        logits |= self._extend(whole)
        self._share_beginnings(slots, next_prompt)
        logits |= self._extend(rests)
        for prompt in new:
            first, *others = placed[prompt]
            self._cache.copy(first, others, len(self._prompts[prompt]))
            logits |= dict.fromkeys(others, logits[first])
        if new and new[-1] == next_prompt:
            slot = slots[next_prompt]
            self._cache.copy(slot, [self._split_slot], len(self._prompts[next_prompt]))
            self._split = next_prompt, logits[slot].clone()
        return logits

    def _share_beginnings(self, slots: dict[int, int], next_prompt: int | None) -> None:
        """Copies the beginnings of groups to the slots of their prompts, and keeps that of the prompt that waits next.

        It was computed in the slot of the group's first prompt, now or earlier.
        """
        for prompt, slot in slots.items():
            group = self._group[prompt]
            source = slots.get(group.prompts[0], self._beginning_slot)
            if group.common and source != slot:
                self._cache.copy(source, [slot], group.common)
        if next_prompt is not None:
            group = self._group[next_prompt]
            if group.common and group.prompts[0] in slots:
                self._cache.copy(slots[group.prompts[0]], [self._beginning_slot], group.common)

    def _extend(self, new: list[NewTokens]) -> dict[int, Tensor]:
        if not new:
            return {}
        logits = extend(self._model, self._cache, new)
        return {entry.slot: logits[i] for i, entry in enumerate(new)}
