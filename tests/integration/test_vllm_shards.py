"""Shards of FSDP2 and ZeRO 3 that do not reach the files for vLLM servers are seen, whichever rank has them."""

from pathlib import Path

import pytest

from tests.fake_vllm import FakeVLLM, ServedInThread
from tests.integration.launching import start

RUN = Path(__file__).with_name("run_vllm_stale.py")


# Three processes have parts of different sizes.
@pytest.mark.parametrize("config", ["fsdp-3", pytest.param("zero3", marks=pytest.mark.proof)])
def test_a_part_of_one_rank_that_is_stale_is_refused_and_current_parts_are_not(tmp_path: Path, config: str) -> None:
    with ServedInThread(FakeVLLM()) as url:
        outcome = start(RUN, tmp_path, url, config=config)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count(": refused") == (9 if config == "fsdp-3" else 6)
