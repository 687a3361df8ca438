"""The cache of the slot loop holds each row's tokens in the row's own columns, by hand."""

import torch
from torch import Tensor

from alpaca_ppo.generation.slot_passes import SlotCache, visible_columns


def states(tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Keys (1, 2, N, 1) of a packed pass that are 10 * token + head, and values (1, 2, N, 2) of the same, negative."""
    keys = torch.tensor([[[10 * token + head] for token in tokens] for head in (0, 1)], dtype=torch.float64)[None]
    return keys, -keys.expand(-1, -1, -1, 2)


def filled() -> SlotCache:
    """Tokens 1, 2 in slot 0 and 3, 4, 5 in slot 2 of four columns, in layer 1."""
    cache = SlotCache(slots=3, columns=4)
    cache.start_extend(torch.tensor([2, 2, 2, 0, 0]), torch.tensor([0, 1, 2, 0, 1]), read_slots=None, read_columns=0)
    keys, values = states([3, 4, 5, 1, 2])
    new = cache.update(keys, values, 1)
    assert new[0] is keys and new[1] is values
    return cache


def read(cache: SlotCache, columns: int = 4) -> list[list[int]]:
    """The tokens in the first columns of each slot, 0 where nothing was written; heads and values must agree."""
    keys, values = (kept[:, :, :columns] for kept in cache._storage[1])
    written = keys[:, 0] > 0
    assert torch.equal(keys[:, 1], keys[:, 0] + written) and torch.equal(values, -keys.expand(-1, -1, -1, 2))
    return (keys[:, 0, :, 0] / 10).int().tolist()


def test_packed_tokens_go_to_their_slots_and_columns() -> None:
    assert read(filled()) == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 0]]


def test_a_step_writes_at_each_row_s_length_and_reads_the_first_slots_and_columns() -> None:
    cache = filled()
    # An idle slot may be longer than what is read.
    cache.start_step(torch.tensor([2, 3]), columns=3)
    keys, values = (packed.transpose(0, 2) for packed in states([6, 7]))
    seen = cache.update(keys, values, 1)
    assert read(cache) == [[1, 2, 6, 0], [0, 0, 0, 7], [3, 4, 5, 0]]
    assert seen[0].shape == (2, 2, 3, 1) and seen[1].shape == (2, 2, 3, 2)
    assert seen[0][:, 0, :, 0].tolist() == [[10.0, 20.0, 60.0], [0.0] * 3]


def test_appended_tokens_are_read_with_those_of_their_slot() -> None:
    cache = filled()
    cache.start_extend(
        torch.tensor([2, 0, 0]), torch.tensor([3, 2, 3]), read_slots=torch.tensor([2, 0]), read_columns=4
    )
    seen = cache.update(*states([6, 7, 8]), 1)
    assert seen[0][:, 1, :, 0].tolist() == [[31.0, 41.0, 51.0, 61.0], [11.0, 21.0, 71.0, 81.0]]
    assert read(cache) == [[1, 2, 7, 8], [0, 0, 0, 0], [3, 4, 5, 6]]


def test_slots_are_copied_and_the_cache_grows_with_what_it_holds() -> None:
    cache = filled()
    cache.copy(2, [0, 1], columns=2)
    assert read(cache) == [[3, 4, 0, 0], [3, 4, 0, 0], [3, 4, 5, 0]]
    cache.reserve(3)
    assert cache.columns == 4
    cache.reserve(6)
    assert cache.columns == 6 and read(cache, 6) == [[3, 4, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0]]
    cache.start_step(torch.tensor([5]), columns=6)
    cache.update(*(packed.transpose(0, 2) for packed in states([9])), 1)
    assert read(cache, 6) == [[3, 4, 0, 0, 0, 9], [3, 4, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0]]


def test_two_slots_change_places_in_the_columns_that_they_use() -> None:
    cache = filled()
    cache.swap(0, 2, columns=3)
    assert read(cache) == [[3, 4, 5, 0], [0, 0, 0, 0], [1, 2, 0, 0]]


def test_memory_is_what_the_estimate_counts() -> None:
    # 2 * slots * columns * kv_heads * d numbers a layer, in the dtype of the states.
    cache = SlotCache(slots=5, columns=7)
    cache.start_step(torch.zeros(5, dtype=torch.long), columns=1)
    for layer in range(3):
        cache.update(torch.ones(5, 2, 1, 4, dtype=torch.bfloat16), torch.ones(5, 2, 1, 4, dtype=torch.bfloat16), layer)
    kept = [tensor for storage in cache._storage.values() for tensor in storage]
    assert sum(tensor.nbytes for tensor in kept) == 5 * 7 * 3 * 2 * 2 * 4 * 2


def test_a_token_sees_the_columns_up_to_its_own_and_within_its_window() -> None:
    def shown(window: int | None) -> list[str]:
        mask = visible_columns(torch.tensor([[0, 3], [4, 9]]), 5, sliding_window=window)
        return ["".join("x" if visible else "." for visible in row) for row in mask.flatten(0, 1).tolist()]

    assert shown(None) == ["x....", "xxxx.", "xxxxx", "xxxxx"]
    # Column 9 is beyond the five that are read: the slot is idle, and sees what a token in column 4 sees.
    assert shown(2) == ["x....", "..xx.", "...xx", "...xx"]
    assert shown(1) == ["x....", "...x.", "....x", "....x"]
