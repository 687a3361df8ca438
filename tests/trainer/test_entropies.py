"""Entropies are computed in the steps that log them and where the loss needs them, and nowhere else."""

import pytest
import torch

from alpaca_ppo.models import policy
from alpaca_ppo.ppo import metrics
from tests.tiny_runs import metric_lines, prompts, tiny_trainer, weights

ENTROPIES = ("objective/entropies", "objective/ref_entropies", "ppo/policy/entropy")
RUN = {"rollout_batch_size": 4, "total_episodes": 12, "old_policy": "recompute"}


@pytest.fixture
def asked(monkeypatch):
    """Whether each call of `chunked_logprobs` was to give entropies, in order."""
    calls, plain = [], policy.chunked_logprobs

    def counting(*inputs, with_entropy, **how):
        calls.append((with_entropy, torch.is_grad_enabled()))
        return plain(*inputs, with_entropy=with_entropy, **how)

    monkeypatch.setattr(policy, "chunked_logprobs", counting)
    return calls


def written(folder):
    """Of each step, which of the three metrics it has."""
    return [tuple(name in line for name in ENTROPIES) for line in metric_lines(folder)]


def test_three_steps_log_entropies_as_often_as_asked_and_learn_the_same(tmp_path, asked, monkeypatch):
    trained, calls = [], []
    for every in (1, 2, 10):
        monkeypatch.setattr(metrics, "ENTROPY_STEPS", every)
        trainer = tiny_trainer(tmp_path / str(every), **RUN)
        trainer.check_sampler()
        asked.clear()
        trainer.train()
        trained.append(weights(trainer))
        calls.append([sum(with_entropy for with_entropy, update in asked if update == part) for part in (False, True)])
    yes, no = (True, True, True), (False, False, False)
    assert [written(tmp_path / name) for name in ("1", "2", "10")] == [[yes] * 3, [yes, yes, no], [yes, no, no]]
    # In a step a pass of the policy and one of the reference, and the micro-batches of the update.
    assert [passes for passes, _ in calls] == [6, 4, 2]
    assert calls[0][1] > calls[1][1] > calls[2][1] > 0
    for other in trained[1:]:
        assert all(torch.equal(other[name], value) for name, value in trained[0].items())


def test_the_bonus_gets_entropies_in_every_step_and_the_rollouts_do_not(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(metrics, "ENTROPY_STEPS", 10)
    tiny_trainer(tmp_path, entropy_coef=0.1, **RUN).train()
    assert all(with_entropy for with_entropy, in_update in asked if in_update)
    assert written(tmp_path)[1:] == [(False, False, True)] * 2
    assert all("ppo/loss/entropy" in line for line in metric_lines(tmp_path))


def test_an_evaluation_computes_none(tmp_path, asked):
    trainer = tiny_trainer(tmp_path, trainer_arguments={"eval_dataset": prompts(4)}, **RUN)
    trainer.evaluate()
    assert asked and not any(with_entropy for with_entropy, _ in asked)
