"""Collectives without processes: how the rows of several ranks become one batch. Real ones: tests/integration."""

import pytest
import torch

from alpaca_ppo.distributed import collectives


class Rank:
    """The attributes of an Accelerator that `collectives` uses."""

    def __init__(self, index: int, count: int) -> None:
        self.process_index, self.num_processes = index, count


def test_what_ends_one_rank_ends_all_with_its_cause(monkeypatch):
    alone = Rank(0, 1)
    with collectives.raise_on_all_ranks(alone):
        pass
    with pytest.raises(OSError, match="no room"), collectives.raise_on_all_ranks(alone):
        raise OSError("no room")
    monkeypatch.setattr(collectives, "gather_list", lambda item, accelerator: ["OSError: no room", item])
    with pytest.raises(RuntimeError, match="process 0 failed, so this process stops too. OSError: no room"):
        with collectives.raise_on_all_ranks(Rank(1, 2)):
            pass
    with pytest.raises(ValueError, match="my own"), collectives.raise_on_all_ranks(Rank(1, 2)):
        raise ValueError("my own")


def test_shares_are_dealt_in_turn():
    assert [collectives.rank_share([5, 6, 7, 8, 9], Rank(r, 2)) for r in range(2)] == [[5, 7, 9], [6, 8]]
    assert collectives.rank_share([5], Rank(1, 2)) == []


def test_gathered_rows_are_in_the_order_of_the_prompts_whatever_the_ranks(monkeypatch):
    prompts = list(range(7))
    for world in (1, 2, 3, 8):
        parts = []
        for rank in range(world):
            share = collectives.rank_share(prompts, Rank(rank, world))
            rows = [(p, s) for p in share for s in range(2)]
            parts.append({"rows": torch.tensor(rows)} if rows else {})
        monkeypatch.setattr(collectives, "gather_list", lambda item, accelerator, parts=parts: parts)
        gathered = collectives.gather_rows(parts[0], Rank(0, world), samples_per_prompt=2)
        assert gathered["rows"].tolist() == [[p, s] for p in prompts for s in range(2)]


def test_the_slowest_rank_decides_a_phase(monkeypatch):
    monkeypatch.setattr(collectives, "gather_list", lambda item, accelerator: [{"a": 1.0}, {"a": 3.0}])
    assert collectives.max_over_ranks({"a": 1.0}, Rank(0, 2)) == {"a": 3.0}


def test_ranks_that_disagree_on_a_shape_are_told_so(monkeypatch):
    parts = [{"rewards": torch.zeros(2)}, {"rewards": torch.zeros(2, 5)}]
    monkeypatch.setattr(collectives, "gather_list", lambda item, accelerator: parts)
    with pytest.raises(ValueError, match=r"rewards differs in shape between processes: \(2,\), \(2, 5\)"):
        collectives.gather_rows(parts[0], Rank(0, 2), samples_per_prompt=1)


def test_rows_that_one_rank_has_given_up_are_none_on_all(monkeypatch):
    monkeypatch.setattr(collectives, "gather_list", lambda item, accelerator: [{"a": torch.zeros(2)}, None])
    assert collectives.gather_rows({"a": torch.zeros(2)}, Rank(0, 2), samples_per_prompt=1) is None
