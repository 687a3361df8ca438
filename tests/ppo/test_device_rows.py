"""Batches of a rollout's rows, which a `compute_loss` may change in place."""

from unittest import mock

import pytest
import torch

from alpaca_ppo.ppo.device_rows import device_batches, upload


@pytest.mark.parametrize("source", ["cpu", "cuda"])
def test_only_a_tensor_of_the_cpu_is_pinned_on_its_way_to_a_gpu(source):
    tensor, gpu = mock.Mock(device=torch.device(source)), torch.device("cuda")
    pinned = tensor.pin_memory.return_value
    assert upload(tensor, gpu) is (pinned if source == "cpu" else tensor).to.return_value
    assert tensor.pin_memory.called == (source == "cpu")


def test_what_is_changed_in_a_batch_reaches_neither_the_rollouts_nor_another_batch():
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    rows = {"advantages": torch.arange(6.0).reshape(3, 2), "response_mask": mask.clone()}
    seen = []
    for batch in device_batches(rows, [[2], [], [0, 1], []], torch.device("cpu")):
        seen.append(batch.device["advantages"].tolist())
        batch.device["advantages"].zero_()
        batch.device["response_mask"].zero_()
    # A batch without rows has the first row.
    assert seen == [[[4.0, 5.0]], [[0.0, 1.0]], [[0.0, 1.0], [2.0, 3.0]], [[0.0, 1.0]]]
    assert rows["advantages"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert torch.equal(rows["response_mask"], mask)
