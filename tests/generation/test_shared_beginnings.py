"""Groups of prompts that begin alike, worked out by hand and beside all divisions of a few prompts."""

import pytest

from alpaca_ppo.generation.slot_prompts import group_prompts

SYSTEM = list(range(100))


def groups_of(prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    return [(group.prompts, group.common) for group in group_prompts(prompts)]


def test_a_prompt_without_the_system_prompt_leaves_the_others_theirs() -> None:
    prompts = [SYSTEM + [200 + i] for i in range(31)]
    prompts.insert(4, [7, 8])
    assert groups_of(prompts) == [([i for i in range(32) if i != 4], 100), ([4], 0)]


def test_each_system_prompt_is_a_group_though_a_template_opens_them_all() -> None:
    template = list(range(300, 320))
    one, other = template + SYSTEM, template + SYSTEM[::-1]
    # Twenty tokens for four prompts would save 60; 120 for two of them and for two others save 240.
    assert groups_of([one + [1], other + [2], one + [3], other + [4]]) == [([0, 2], 120), ([1, 3], 120)]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1] * 16 + [2], [1] * 16 + [3]], [([0, 1], 16)]),
        ([[1] * 15 + [2], [1] * 15 + [3]], [([0], 0), ([1], 0)]),
        # Each prompt keeps a token of its own.
        ([[1] * 17, [1] * 17, [1] * 30], [([0, 1, 2], 16)]),
        ([[1] * 16, [1] * 17 + [2]], [([0], 0), ([1], 0)]),
        # 16 tokens are less than an eighth of the mean of 129.
        ([[1] * 16 + [2] * 113, [1] * 16 + [3] * 113], [([0], 0), ([1], 0)]),
        ([[1] * 16 + [2] * 112, [1] * 16 + [3] * 112], [([0, 1], 16)]),
        ([[5]], [([0], 0)]),
    ],
)
def test_short_beginnings_are_not_shared(prompts: list[list[int]], expected: list[tuple[list[int], int]]) -> None:
    assert groups_of(prompts) == expected


def test_prompts_that_share_only_the_template_share_it_beside_groups_of_longer_beginnings() -> None:
    template = list(range(300, 320))
    long = template + SYSTEM
    prompts = [template + [1], long + [2], template + [3], template + [4], long + [5]]
    # 2 * 20 for the three and 120 for the two; all five would save 4 * 20.
    assert groups_of(prompts) == [([0, 2, 3], 20), ([1, 4], 120)]


def test_prompts_that_each_begin_with_the_one_before_are_one_group() -> None:
    # More of them than Python lets functions call each other. The last m have 2199 - m tokens in common, so that
    # (m - 1) * (2199 - m) are saved; it grows up to m = 1100, the number of all.
    prompts = [[1] * length for length in range(1100, 2200)]
    assert groups_of(prompts) == [(list(range(1100)), 1099)]
