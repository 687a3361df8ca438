"""Which prompts begin alike, so that their common beginning is computed once: a system prompt, the first lines of a
chat template, examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

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
