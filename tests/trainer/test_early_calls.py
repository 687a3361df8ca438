"""Runs whose reward functions are called while other responses are sampled: the same run to the last bit."""

import asyncio
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch

from alpaca_ppo import PPOTrainer
from alpaca_ppo.checkpoint.directory import newest_checkpoint
from alpaca_ppo.ppo import rollouts
from alpaca_ppo.rewards import RewardError
from alpaca_ppo.rewards.early_calls import EarlyCalls
from tests.distributed.test_preemption import signal_at, slow_async_judge, slow_judge
from tests.tiny_runs import count_even, metric_lines, tiny_trainer, weights

pytestmark = pytest.mark.usefixtures("deadline")


class AfterSampling(PPOTrainer):
    """Calls every function after the sampling, since it may score in another way."""

    def _score(self, samples, rows):
        return super()._score(samples, rows)


def noisy(completions, completion_ids, **columns):
    return [score + random.random() for score in count_even([], completions, completion_ids)]


async def noisy_judge(completions, **columns):
    drawn = [float(torch.rand(())) for _ in completions]
    await asyncio.sleep(0)
    return drawn


RUN = {"score_chunk_prompts": 2, "trainer_arguments": {"reward_funcs": [noisy, noisy_judge]}}


def trained(folder, **run):
    trainer = tiny_trainer(folder, **{**RUN, **run})
    trainer.train()
    return weights(trainer)


def test_a_run_is_the_same_whether_functions_are_called_early_or_late_and_across_interruptions(tmp_path, monkeypatch):
    late = trained(tmp_path / "late", trainer_class=AfterSampling)
    early = trained(tmp_path / "early")
    parts = tmp_path / "parts"
    for attempt in itertools.count(1):
        trainer = tiny_trainer(parts, **RUN)
        signal_at(trainer, monkeypatch, check=attempt * 31)
        try:
            trainer.train(resume_from_checkpoint=newest_checkpoint(parts) is not None)
            break
        except SystemExit:
            continue
    assert attempt > 1, "there was an interruption"
    lines = metric_lines(tmp_path / "late")
    assert metric_lines(tmp_path / "early") == lines == metric_lines(parts)
    for name, value in late.items():
        assert torch.equal(early[name], value) and torch.equal(weights(trainer)[name], value), name


def test_the_same_responses_are_dropped_whether_functions_are_called_early_or_late(tmp_path):
    def rollout(trainer_class, seconds):
        calls = []

        def failing(completions, completion_ids, **columns):
            calls.append(completion_ids)
            if len(calls) % 3 == 1 or any(ids[0] % 2 for ids in completion_ids):
                raise TimeoutError("no answer")
            return [random.random() for _ in completions]

        async def judge(completions, **columns):
            await asyncio.sleep(seconds)
            return [0.0 for _ in completions]

        run = {"score_chunk_prompts": 2, "reward_retries": 1, "reward_retry_pause": 0.0, "failed_rewards": "drop"}
        folder = tmp_path / f"{trainer_class.__name__}-{seconds}"
        functions = {"reward_funcs": [failing, judge]}
        trainer = tiny_trainer(folder, trainer_class=trainer_class, **run, trainer_arguments=functions)
        random.seed(3)
        return trainer.rollout(trainer.prompt_batches(0)), trainer.counts.dropped_rows, calls

    late, dropped, calls = rollout(AfterSampling, 0.0)
    assert 0 < dropped < 10 and len(late["responses"]) == 10 - dropped
    for seconds in (0.0, 0.02):
        early, *others = rollout(PPOTrainer, seconds)
        assert others == [dropped, calls] and early.keys() == late.keys()
        for name, value in late.items():
            assert torch.equal(early[name], value), name


@pytest.mark.parametrize(
    ("backend", "asynchronous", "fails"),
    [("slots", False, False), ("slots", True, True), ("decode", True, False), ("decode", False, True)],
)
def test_the_first_chunk_is_judged_before_the_last_response_is_sampled(
    backend, asynchronous, fails, tmp_path, monkeypatch
):
    finished, judged, begun = [], [], threading.Event()
    report = EarlyCalls.on_finished

    def judge(completions, **columns):
        judged.append(len(completions))
        begun.set()
        if fails:
            raise TimeoutError("no answer")
        return [0.0] * len(completions)

    async def async_judge(completions, **columns):
        return judge(completions)

    def on_finished(self, rows, samples):
        # Of ten responses of at most five tokens, two at once: the first two are among the first six.
        finished.extend(rows)
        while fails and len(finished) > 6 and self._failure is None:
            time.sleep(0.001)
        if len(finished) == 10:
            assert begun.wait(20)
        report(self, rows, samples)

    async_judge.__name__ = "judge"
    monkeypatch.setattr(EarlyCalls, "on_finished", on_finished)
    monkeypatch.setattr(rollouts, "chunks_by_length", lambda lengths, rows: [[2, 9], [1, 0], [3, 4], [5, 8], [6, 7]])
    run = {"generation_backend": backend, "rollout_per_device_batch_size": 2, "score_chunk_prompts": 2}
    functions = {"trainer_arguments": {"reward_funcs": async_judge if asynchronous else judge}}
    trainer = tiny_trainer(tmp_path / "run", **run, **functions)
    if not fails:
        trainer.rollout(trainer.prompt_batches(0))
        assert sorted(finished) == list(range(10)) and judged == [2] * 5
        return
    with pytest.raises(RewardError) as found:
        trainer.rollout(trainer.prompt_batches(0))
    assert len(finished) < 10
    late = tiny_trainer(tmp_path / "late", trainer_class=AfterSampling, **run, **functions)
    with pytest.raises(RewardError) as expected:
        late.rollout(late.prompt_batches(0))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("judge", [slow_judge, slow_async_judge])
def test_a_signal_ends_the_wait_for_a_function_in_another_thread(judge, tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, score_chunk_prompts=5, trainer_arguments={"reward_funcs": judge})
    wait = trainer.collector.scorer.next_early

    def interrupted(early):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return wait(early)

    monkeypatch.setattr(trainer.collector.scorer, "next_early", interrupted)
    start = time.monotonic()
    with pytest.raises(SystemExit):
        trainer.train()
    assert time.monotonic() - start < 30
    assert newest_checkpoint(tmp_path).name == "checkpoint-0"
