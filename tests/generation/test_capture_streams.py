"""The streams of captures, with stand-ins for CUDA's: one for each device, joined after an error too."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

from alpaca_ppo.generation import graphs


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mock]]:
    """The current stream, and those that are made."""
    found = [Mock(name="current")]
    current = [found[0]]

    def make(device: int) -> Mock:
        found.append(Mock(name=f"of device {device}"))
        return found[-1]

    @contextmanager
    def use(stream: Mock) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    graphs._capture_stream.cache_clear()
    yield found
    graphs._capture_stream.cache_clear()


def test_captures_share_the_stream_of_their_device(streams: list[Mock], monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        graphs.CudaCapture()
    assert len(streams) == 1 + 2


def test_the_steps_after_a_warm_up_that_fails_wait_for_it(streams: list[Mock]) -> None:
    def step() -> None:
        assert torch.cuda.current_stream() is streams[1]
        # No other thread may capture on that stream meanwhile.
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(graphs._capturing.acquire, blocking=False).result()
        raise RuntimeError("a warm-up")

    with pytest.raises(RuntimeError, match="a warm-up"):
        graphs.CudaCapture()(step)
    current, side = streams
    side.wait_stream.assert_called_once_with(current)
    current.wait_stream.assert_called_once_with(side)
