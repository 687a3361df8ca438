"""Metrics against values worked out by hand: sums, means and their weights, and that padding never counts."""

import math
import time
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator

from alpaca_ppo import PPOConfig
from alpaca_ppo.ppo import metrics
from alpaca_ppo.ppo.metrics import BatchStats, StatsAccumulator, StepStats


def tensors(**values: float) -> dict[str, torch.Tensor]:
    return {name.replace("__", "/"): torch.tensor(value) for name, value in values.items()}


def test_losses_add_up_means_are_weighted_by_tokens_and_extremes_are_kept():
    one, two = StatsAccumulator(), StatsAccumulator()
    one.add(tensors(loss__total=0.5, clipfrac=0.25, ratio_min=0.9, ratio_max=1.1), tokens=4)
    one.add(tensors(loss__total=0.25, clipfrac=1.0, ratio_min=0.8, ratio_max=1.0), tokens=2)
    # A dummy micro-batch has no tokens: its zeros must not change the means or the extremes.
    two.add(tensors(loss__total=0.0, clipfrac=0.0, ratio_min=0.0, ratio_max=9.0), tokens=0)
    two.add(tensors(loss__total=0.125, clipfrac=0.5, ratio_min=0.95, ratio_max=1.3), tokens=2)
    one.merge(two)
    # loss: 0.5 + 0.25 + 0 + 0.125; clipfrac: (1 + 2 + 1) / 8
    stats = one.compute()
    assert stats["loss/total"] == 0.875
    assert stats["clipfrac"] == 0.5
    assert stats["ratio_min"] == pytest.approx(0.8)
    assert stats["ratio_max"] == pytest.approx(1.3)


def test_the_first_ratio_is_off_by_the_larger_of_both_ends_and_losses_are_means_over_what_was_counted():
    def batch(part, taken, **values):
        stats.add(BatchStats(tensors(**values), tokens=1, lengths=[1], padded=False))
        stats.end_update(part, stopped=not taken)

    stats = StepStats()
    batch("critic", True, val__loss=0.0, loss__value=1.0)
    batch("critic", True, val__loss=0.0, loss__value=2.0)
    batch("policy", True, loss__policy=3.0, policy__ratio_max=1.1, policy__ratio_min=0.75)
    batch("policy", False, loss__policy=6.0, policy__ratio_max=1.0, policy__ratio_min=0.25)
    reduced = stats.reduce(Accelerator(cpu=True), with_critic=True)
    # 1 - 0.75; later ratios are those of a policy that has moved.
    assert reduced["policy/first_ratio_error_max"] == 0.25
    # (1 + 2) / 2; the batch at which the KL ended the update has a loss too: (3 + 6) / 2.
    assert (reduced["loss/value"], reduced["loss/policy"]) == (1.5, 4.5)
    assert (reduced["policy/optimizer_steps"], reduced["val/optimizer_steps"]) == (1.0, 2.0)


def test_a_loss_that_logs_one_end_of_the_ratio_has_no_first_error_and_nan_at_either_end_is_kept():
    def first_error(**ratios):
        stats = StepStats()
        stats.add(BatchStats({f"policy/{name}": value for name, value in ratios.items()}, 1, [1], padded=False))
        return stats.update.compute().get("policy/first_ratio_error_max")

    assert first_error(ratio_max=torch.tensor(1.5)) is None
    assert first_error(ratio_min=torch.tensor(0.5)) is None
    # A loss may log plain numbers: 1.25 - 1 > 1 - 0.875.
    assert first_error(ratio_max=1.25, ratio_min=0.875) == 0.25
    assert math.isnan(first_error(ratio_max=torch.tensor(1.5), ratio_min=torch.tensor(math.nan)))
    assert math.isnan(first_error(ratio_max=torch.tensor(math.nan), ratio_min=torch.tensor(0.5)))


def test_a_statistic_that_is_a_number_is_not_rounded_to_float32():
    stats = StatsAccumulator()
    stats.add({"policy/grad_norm": 0.1, "loss/policy": 0.3, "ratio_max": 1.1}, tokens=1)
    assert stats.compute() == {"loss/policy": 0.3, "policy/grad_norm": 0.1, "ratio_max": 1.1}


@pytest.mark.parametrize("ratios", [(math.nan, 1.0), (1.0, math.nan)])
def test_an_extreme_that_is_nan_is_kept_in_any_order(ratios):
    stats, others = StatsAccumulator(), StatsAccumulator()
    stats.add({"ratio_min": ratios[0], "ratio_max": ratios[0]}, tokens=1)
    others.add({"ratio_min": ratios[1], "ratio_max": ratios[1]}, tokens=1)
    stats.merge(others)
    assert all(map(math.isnan, stats.compute().values()))


def test_the_padding_fraction_is_over_all_positions():
    stats = StatsAccumulator()
    stats.add_padding([4, 2], padded=True)
    stats.add_padding([10], padded=True)
    stats.add_padding([], padded=True)
    # 2 of 8 + 10 positions are padding; then 2 of 18 + 6, of which none are.
    assert stats.compute()["padding_fraction"] == pytest.approx(2 / 18)
    stats.add_padding([5, 1], padded=False)
    assert stats.compute()["padding_fraction"] == pytest.approx(2 / 24)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    returns = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.nan, math.nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    assert metrics.explained_variance(returns, returns, mask) == 1.0
    assert metrics.explained_variance(torch.full((2, 3), 5.0), returns, mask) == pytest.approx(0.0)
    # The errors 1, 0, -1 have variance 2/3, and so do the returns.
    assert metrics.explained_variance(returns - torch.tensor([[1.0, 0, 0], [-1, 0, 0]]), returns, mask) == 0.0
    assert metrics.explained_variance(returns, torch.ones(2, 3), mask) == 0.0


def test_equal_scores_and_returns_have_no_variance():
    # The float32 mean of 4096 times 1000.7 is not 1000.7: a variance of that error would be explained, or not at all.
    returns, values = torch.full((512, 8), 1000.7), torch.linspace(0, 1, 4096).view(512, 8)
    assert metrics.explained_variance(values, returns, torch.ones(512, 8, dtype=torch.bool)) == 0.0
    assert metrics.standard_deviation(returns[:, 0]) == 0.0
    # 1000 and 1000.25 are 1/8 from their mean
    assert metrics.standard_deviation(torch.tensor([1000.0, 1000.25])) == 0.125


def rollouts() -> dict[str, torch.Tensor]:
    """Two responses of 3 and 1 tokens; the second did not stop."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    ones = mask.float()
    return {
        "response_mask": mask,
        "prompt_ids": torch.tensor([0, 1]),
        "query_attn_masks": torch.tensor([[1, 1], [0, 1]]),
        "stopped": torch.tensor([True, False]),
        "rewards": torch.tensor([2.0, -1.0]),
        "scores": torch.tensor([2.0, 4.0]),
        "scores_by_source": torch.tensor([[2.0, math.nan], [4.0, 6.0]]),
        "kl": ones * torch.tensor([[0.1], [0.5]]),
        "shaped_rewards": ones * 0.5,
        "non_score_rewards": ones * -0.25,
        "logprobs": ones * -1.0,
        "ref_logprobs": ones * -1.5,
        "rollout_logprobs": ones * -1.0,
        "recomputed": torch.ones(2, dtype=torch.bool),
        "entropies": ones * torch.tensor([[1.0], [2.0]]),
        "ref_entropies": ones,
        "values": ones,
        "returns": ones * torch.tensor([[1.0, 2.0, 3.0]]),
        "advantages": ones * torch.tensor([[-3.0, 1.0, 1.0]]),
    }


def test_objective_stats_are_over_tokens_or_sequences_and_never_over_padding():
    stats = metrics.objective_stats(rollouts(), source_names=["a", "b"])
    # sums: 0.3 and 0.5; tokens: (3 * 0.1 + 0.5) / 4
    assert stats["objective/kl_sum_seq"] == pytest.approx(0.4)
    assert stats["objective/kl_avg_seq"] == pytest.approx(0.2)
    # entropies: (3 * 1 + 2) / 4
    assert stats["objective/entropies"] == pytest.approx(1.25)
    assert stats["objective/scores"] == 3.0
    assert stats["objective/rewards"] == 0.5
    assert stats["objective/scores/a"] == 3.0
    assert stats["objective/scores/b"] == 6.0
    assert stats["objective/response_length"] == 2.0
    assert stats["objective/truncated_fraction"] == 0.5
    assert stats["mismatch/ratio_max"] == 1.0


def test_a_response_of_its_stop_token_alone_is_empty():
    given = rollouts()
    # The second has one token too, and was cut off.
    assert metrics.response_stats(given)["empty_fraction"] == 0.0
    given["stopped"] = torch.tensor([True, True])
    assert metrics.response_stats(given)["empty_fraction"] == 0.5
    assert metrics.objective_stats(given, source_names=["a", "b"])["objective/empty_fraction"] == 0.5


def test_a_step_without_entropies_or_a_pass_of_the_policy_has_no_such_metrics():
    given = rollouts()
    whole = metrics.objective_stats(given, source_names=["a", "b"])
    del given["entropies"], given["ref_entropies"]
    found = metrics.objective_stats(given, source_names=["a", "b"])
    assert set(whole) - set(found) == {"objective/entropies", "objective/ref_entropies"}
    del given["recomputed"]
    sampled = metrics.objective_stats(given, source_names=["a", "b"])
    assert not any(name.startswith("mismatch/") for name in sampled)


def test_the_first_step_and_every_tenth_log_entropies():
    assert [step + 1 for step in range(30) if metrics.logs_entropies(step)] == [1, 10, 20, 30]


def test_mismatch_stats_compare_the_log_probs_of_sampler_and_trainer():
    batch = rollouts()
    batch["rollout_logprobs"] = batch["logprobs"] - torch.tensor([[math.log(2.0), 0.0, 0.0], [0.0, 0.0, 0.0]])
    stats = metrics.objective_stats(batch, source_names=["a", "b"])
    assert stats["mismatch/ratio_max"] == pytest.approx(2.0)
    assert stats["mismatch/logprob_abs_mean"] == pytest.approx(math.log(2.0) / 4)
    # k3 of d = log 2: 1/2 - 1 + log 2
    assert stats["mismatch/k3"] == pytest.approx((math.log(2.0) - 0.5) / 4)


def test_advantage_and_critic_stats_are_over_masked_tokens():
    stats = metrics.advantage_stats(rollouts(), PPOConfig())
    # returns 1 2 3 1: mean 7/4, variance (1 + 4 + 9 + 1)/4 - 49/16 = 11/16
    assert stats["ppo/returns/mean"] == pytest.approx(1.75)
    assert stats["ppo/returns/var"] == pytest.approx(11 / 16)
    assert stats["ppo/val/var"] == 0.0
    assert stats["ppo/advantages/abs_max"] == 3.0


def test_advantage_and_critic_stats_leave_out_responses_that_give_no_gradient():
    given = rollouts()
    given["stopped"] = torch.tensor([False, True])
    given["advantages"][1, 0] = -2.0
    stats = metrics.advantage_stats(given, PPOConfig(mask_truncated=True))
    # One token: its return is 1, its value 1.
    assert stats["ppo/returns/mean"] == 1.0 and stats["ppo/returns/var"] == 0.0 and stats["ppo/val/mean"] == 1.0
    assert stats["ppo/advantages/mean"] == -2.0 and stats["ppo/advantages/abs_max"] == 2.0
    # The first response's returns 1, 2, 3 vary around its values as they do around their mean.
    given["stopped"], given["values"][1, 0] = torch.tensor([True, False]), 5.0
    assert metrics.advantage_stats(given, PPOConfig(mask_truncated=True))["ppo/val/explained_variance"] == 0.0
    # Errors 0, 1, 2 and -4 of variance 83/16, of 11/16.
    explained = metrics.advantage_stats(given, PPOConfig())["ppo/val/explained_variance"]
    assert explained == pytest.approx(1 - 83 / 11)
    given["stopped"] = torch.tensor([False, False])
    assert not any(metrics.advantage_stats(given, PPOConfig(mask_truncated=True)).values())


def test_evaluation_stats_sum_the_kl_over_a_response():
    stats = metrics.evaluation_stats(rollouts())
    # 0.5 a token, 3 and 1 tokens
    assert stats["kl_sum_seq"] == pytest.approx(1.0)
    assert stats["scores"] == 3.0


def test_throughput_does_not_count_padding():
    stats = metrics.throughput_stats(rollouts(), {"rollout": 2.0, "update": 2.0, "memory/peak_gib": 1.5})
    # 4 response and 3 prompt tokens in 4 seconds.
    assert stats["tokens/sampled"] == 4.0
    assert stats["tokens/per_second"] == 7 / 4
    assert stats["tokens/sampled_per_second"] == 2.0
    assert stats["time/step"] == 4.0
    assert stats["memory/peak_gib"] == 1.5


def test_group_stats_count_equal_responses_and_groups_of_one_score():
    # Prompt 3 has equal responses but for what is behind the mask; those of 5 differ; 8 has one response.
    responses = torch.tensor([[1, 2], [1, 9], [4, 5], [6, 7], [1, 2]])
    mask = torch.tensor([[1, 0], [1, 0], [1, 1], [1, 1], [1, 1]], dtype=torch.bool)
    given = {"prompt_ids": torch.tensor([3, 3, 5, 5, 8]), "responses": responses, "response_mask": mask}
    # Of four responses in groups two are equal; one of two groups has one score, up to rounding.
    scores = torch.tensor([0.3, 0.3 + 3e-8, 1.0, 2.0, 1.0])
    assert metrics.group_stats({**given, "scores": scores}) == {
        "objective/identical_responses": 0.5,
        "objective/uniform_groups": 0.5,
    }
    alone = {key: value[[0, 2, 4]] for key, value in {**given, "scores": scores}.items()}
    assert metrics.group_stats(alone) == {}


def test_seconds_add_up_by_phase_and_memory_is_in_gib(monkeypatch: pytest.MonkeyPatch):
    ticks = iter([1.0, 3.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    record = metrics.StepRecord(lambda phase, parts: nullcontext())
    for phase in ("score", "update", "score"):
        with record.measure(phase):
            pass
    assert record.seconds == {"score": 3.0, "update": 0.5}
    assert 0.05 < metrics.peak_memory_gib(torch.device("cpu")) < 50
