"""`failed_rewards: mask`: a step goes on without the rewards of responses that could not be scored."""

import os
import signal
import threading
import types

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.ppo import failed_rewards
from alpaca_ppo.rewards import RewardError
from alpaca_ppo.rewards.batch import RowFailure, make_reward_batch
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_trainer, weights, with_advantages

MASK = {"failed_rewards": "mask"}


def judge(completions, completion_ids, prompts):
    """Scores the even tokens, and has no answer for responses with an odd token first and prompts of one word."""
    if any(fails(prompt, ids) for prompt, ids in zip(prompts, completion_ids, strict=True)):
        raise TimeoutError("no answer")
    return count_even(prompts, completions, completion_ids)


def fails(prompt, ids):
    return ids[0] % 2 == 1 and " " not in prompt


def trainer_of(folder, reward=judge, **overrides):
    given = {"reward_funcs": reward, **overrides.pop("trainer_arguments", {})}
    return tiny_trainer(folder, trainer_arguments=given, **overrides)


def advantages_of(trainer, step=0):
    return with_advantages(trainer, trainer.prompt_batches(step))


@pytest.mark.parametrize(("options", "advice"), [(MASK, ""), ({}, r" \(or failed_rewards: mask\)")])
def test_a_run_without_any_reward_ends_without_advice_that_it_follows(tmp_path, options, advice):
    trainer = trainer_of(tmp_path, lambda completions, **columns: [None] * len(completions), **options)
    with pytest.raises(RewardError, match=f"returned None; a row needs a score from some source{advice}, on row 0"):
        trainer.train()


def test_the_rollouts_keep_every_response_and_say_which_are_learned_from(tmp_path, capsys):
    whole = trainer_of(tmp_path / "whole", count_even, num_return_sequences=3)
    expected = whole.rollout(whole.prompt_batches(0))
    failed = (expected["responses"][:, 0] % 2 == 1) & (expected["query_attn_masks"].sum(dim=1) == 1)
    assert 3 <= failed.sum() <= 8
    trainer = trainer_of(tmp_path / "kept", num_return_sequences=3, **MASK)
    capsys.readouterr()
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert rollouts.keys() == expected.keys() | {"trained_rows"}
    assert rollouts["trained_rows"].tolist() == (~failed).tolist()
    for key, value in expected.items():
        assert_close(rollouts[key][~failed], value[~failed])
    assert not rollouts["scores"][failed].any() and not rollouts["rewards"][failed].any()
    assert rollouts["scores_by_source"][failed].isnan().all()
    said = capsys.readouterr().out
    assert f"{failed.sum()} of 30 responses" in said
    assert said.count("'judge' raised TimeoutError: no answer, on row") == failed.sum()


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "gdpo"])
def test_an_update_is_that_of_the_other_responses_alone(whiten, estimator, tmp_path):
    """What the others learn does not depend on the failed ones, which learn nothing."""
    settings = {"whiten_advantages": whiten, "whiten_rewards": whiten} if estimator == "gae" else {}
    settings |= {"num_return_sequences": 3, "adv_estimator": estimator, "dtype": torch.float64, "ppo_epochs": 1}
    settings |= {"step_batch_size": 30, "adam_epsilon": 0.1, "kl_coef": 0.0}
    trainer = trainer_of(tmp_path / "mask", **settings, **MASK)
    rollouts = advantages_of(trainer)
    kept = rollouts["trained_rows"]
    assert 0 < int((~kept).sum()) < len(kept)
    assert not rollouts["advantages"][~kept].any()
    others = {key: value[kept] for key, value in rollouts.items()}
    again = trainer._estimate_advantage(
        others["shaped_rewards"],
        others.get("values"),
        others["response_mask"],
        scores=others["rewards"],
        prompt_ids=others["prompt_ids"],
        scores_by_source=others["scores_by_source"],
    )
    for name, value in again.items():
        assert_close(rollouts[name][kept], value, rtol=1e-12, atol=1e-12)
    before = weights(trainer)
    trainer.step_with_rollouts(rollouts)
    alone = trainer_of(tmp_path / "alone", **settings, **MASK)
    alone.step_with_rollouts(others)
    moved = weights(trainer)
    assert any(not torch.equal(moved[name], before[name]) for name in before)
    for name, value in weights(alone).items():
        assert_close(moved[name], value, rtol=1e-9, atol=1e-12)


def test_without_the_option_the_run_ends_with_the_error_and_counts_nothing(tmp_path):
    with pytest.raises(RewardError, match="'judge' raised TimeoutError: no answer, on row"):
        trainer_of(tmp_path / "ends").train()
    trainer_of(tmp_path / "none", count_even).train()
    assert not any("masked" in name for line in metric_lines(tmp_path / "none") for name in line)


def row_by_row(answers):
    """Called for each row after the whole batch has failed; None is a row without a score."""

    def fixed(completions, prompts, **columns):
        if len(completions) > 1:
            raise TimeoutError
        return [answers.pop(0)]

    return fixed


def test_groups_are_compared_without_the_failed_responses(tmp_path, capsys):
    """rloo: 3 samples with the scores 4, _, 1 are 4 - 1 = 3 and 1 - 4 = -3; of _, _, 5 nothing is left to compare."""
    settings = {"num_return_sequences": 3, "rollout_batch_size": 2, "adv_estimator": "rloo", "kl_coef": 0.0}
    trainer = trainer_of(tmp_path, row_by_row([4.0, None, 1.0, None, None, 5.0]), **settings, **MASK)
    capsys.readouterr()
    rollouts = advantages_of(trainer)
    assert rollouts["trained_rows"].tolist() == [True, False, True, False, False, False]
    assert rollouts["scores"].tolist() == [4.0, 0.0, 1.0, 0.0, 0.0, 5.0]
    assert_close(rollouts["advantages"][:, 0], torch.tensor([3.0, 0.0, -3.0, 0.0, 0.0, 0.0]))
    said = capsys.readouterr().out
    assert "3 of 6 responses" in said and "and 1 because no other response" in said
    stats = trainer.record_step_stats({}, rollouts, 1)
    # Means over the two that are learned from.
    assert (stats["objective/masked_rows"], stats["objective/scores"]) == (4.0, 2.5)


@pytest.mark.parametrize("answers", [[4.0, None, None, 1.0], [None] * 4])
def test_if_nobody_is_left_to_compare_the_run_ends_with_the_first_error(answers, tmp_path):
    settings = {"num_return_sequences": 2, "rollout_batch_size": 2, "adv_estimator": "grpo", "total_episodes": 2}
    with pytest.raises(RewardError, match=f"returned None.*, on row {answers.index(None)}"):
        trainer_of(tmp_path, row_by_row([*answers]), **settings, **MASK).train()


def test_responses_whose_greedy_baseline_failed_give_no_gradient(tmp_path):
    """remax calls the source for the samples of the 10 prompts first, and then for their greedy responses."""
    batches = []

    def baseline_fails(completions, prompts, **columns):
        if len(completions) > 1:
            batches.append(prompts)
        if len(batches) == 2 and bad in prompts:
            raise TimeoutError("no baseline")
        return [1.0] * len(completions)

    trainer = trainer_of(tmp_path, baseline_fails, adv_estimator="remax", num_return_sequences=2, **MASK)
    given = trainer.prompt_batches(0)
    bad = given[0]["rows"][4]["prompt"]
    rollouts = trainer.rollout(given)
    assert len(batches[0]) == 20 and len(batches[1]) == 10
    kept = [row["prompt"] != bad for row in given[0]["rows"] for _ in range(2)]
    assert rollouts["trained_rows"].tolist() == kept and not all(kept)


def test_an_evaluation_is_over_the_other_prompts(tmp_path):
    def by_prompt(prompts, **columns):
        if any(prompt.count(" ") == 1 for prompt in prompts):
            raise TimeoutError
        return [float(prompt.count(" ")) for prompt in prompts]

    # Eight prompts of 1, 2, 3, 4, 1, 2, 3, 4 words; those of two words fail.
    trainer = trainer_of(tmp_path, by_prompt, trainer_arguments={"eval_dataset": prompts(8)}, **MASK)
    stats = trainer.evaluate()
    # (0 + 2 + 3) * 2 / 6
    assert (stats["eval/masked_rows"], stats["eval/scores"]) == (2.0, pytest.approx(10 / 6))
    assert len((tmp_path / "eval/step_000000.jsonl").read_text().splitlines()) == 6


def test_an_outage_in_an_evaluation_leaves_its_metrics_empty_and_the_run_goes_on(tmp_path, capsys):
    def down_while_evaluating(completions, completion_ids, prompts):
        if trainer.state.global_step == 1 and set(prompts) <= evaluated:
            raise TimeoutError("the judge is down")
        return count_even(prompts, completions, completion_ids)

    evaluated = set(prompts(3)["prompt"])
    settings = {"eval_steps": 1, "metric_for_best_model": "eval/scores", "save_steps": 1, **MASK}
    trainer = trainer_of(tmp_path, down_while_evaluating, trainer_arguments={"eval_dataset": prompts(3)}, **settings)
    trainer.train()
    assert "3 of 3 responses" in capsys.readouterr().out
    start, first, second = metric_lines(tmp_path)
    assert [line["eval/masked_rows"] for line in (start, first, second)] == [0.0, 3.0, 0.0]
    rest = {name for name in start if name.startswith("eval/")} - {"eval/masked_rows"}
    assert {first[name] for name in rest} == {None} and None not in {second[name] for name in rest}
    assert first["objective/masked_rows"] == 0.0 and (tmp_path / "checkpoint-1").is_dir()
    assert (tmp_path / "eval/step_000001.jsonl").read_text() == ""
    assert trainer.state.best_global_step == 2


def test_a_hook_that_scores_by_itself_may_say_which_rows_are_learned_from(tmp_path):
    class Constant(PPOTrainer):
        def _score(self, samples, rows):
            zeros = torch.zeros(len(rows))
            return {"scores": zeros, "rewards": zeros, "scores_by_source": zeros.unsqueeze(1), **self.extra(zeros)}

    def extra(zeros):
        return {"trained_rows": torch.arange(len(zeros)) > 1}

    trainer = trainer_of(tmp_path, trainer_class=Constant)
    trainer.extra = extra
    trainer.train()
    assert [line["objective/masked_rows"] for line in metric_lines(tmp_path)] == [2.0, 2.0]


def test_a_signal_in_the_pause_before_a_retry_ends_the_run_at_once(tmp_path):
    calls, timer = [], threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))

    def down(**columns):
        calls.append(len(calls))
        if len(calls) == 1:
            timer.start()
        raise TimeoutError

    trainer = trainer_of(tmp_path, down, reward_retries=4, **MASK)
    with pytest.raises(Interrupted) as caught:
        trainer.train()
    assert caught.value.code == 128 + signal.SIGTERM and len(calls) < 5
    assert (tmp_path / "checkpoint-0").is_dir()
    # The judge is back.
    resumed = trainer_of(tmp_path, count_even, total_episodes=10, ignore_changes=["reward"])
    resumed.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(tmp_path)] == [1]


ALONE = types.SimpleNamespace(process_index=0, num_processes=1)


def failure(text):
    return RowFailure("judge", text, make_reward_batch(["p"], ["c"], [[1]], [{"prompt": "p"}]), 0)


def test_only_some_of_many_failures_are_named():
    rollouts = {"trained_rows": torch.arange(20) > 11}
    failures = [failure(f"raised {i}.") for i in range(12)]
    text = failed_rewards.leave_out_failures(rollouts, failures, ALONE, compares_group=False, may_fail=False)
    assert "12 of 20" in text and "raised 7." in text and "raised 8." not in text


def test_a_response_is_left_alone_by_failures_only_and_an_empty_one_is_no_company():
    """Of prompt 7 one failed; of 9 one failed and one has no tokens; of 8 two have no tokens, and nothing failed."""
    rollouts = {
        "prompt_ids": torch.tensor([7, 7, 9, 9, 9, 8, 8, 8]),
        "response_mask": torch.tensor([1, 1, 1, 0, 1, 0, 1, 0]).bool().unsqueeze(1),
        "trained_rows": torch.tensor([False, True, False, True, True, True, True, True]),
    }
    whole = dict(rollouts)
    failed_rewards.leave_out_failures(whole, [failure("raised")], ALONE, compares_group=False, may_fail=False)
    assert torch.equal(whole["trained_rows"], rollouts["trained_rows"])
    failed_rewards.leave_out_failures(rollouts, [failure("raised")], ALONE, compares_group=True, may_fail=False)
    assert rollouts["trained_rows"].tolist() == [False, False, False, True, False, True, True, True]


def test_a_rank_without_a_failure_of_its_own_raises_the_text_of_the_others(monkeypatch):
    monkeypatch.setattr(failed_rewards, "gather_list", lambda item, accelerator: [[failure("raised A")], item])
    with pytest.raises(ValueError, match=r"(?s)1 of 1 responses.*raised A"):
        rollouts = {"trained_rows": torch.tensor([False])}
        failed_rewards.leave_out_failures(rollouts, [], ALONE, compares_group=False, may_fail=False)


def test_rewards_that_all_failed_take_the_shape_of_other_ranks_rewards(monkeypatch):
    """A rank on which nobody scored tokens, because nothing was scored."""
    rows = {"rewards": torch.zeros(2), "response_mask": torch.ones(2, 3).bool(), "trained_rows": torch.zeros(2).bool()}
    for per_token, shape in ((True, (2, 3)), (False, (2,))):
        monkeypatch.setattr(failed_rewards, "any_rank", lambda flag, accelerator, found=per_token: found)
        assert failed_rewards.rewards_shaped_alike(rows, ALONE)["rewards"].shape == shape
    assert (
        failed_rewards.rewards_shaped_alike({}, ALONE) == {}
        and failed_rewards.rewards_shaped_alike(None, ALONE) is None
    )


def test_a_function_that_is_given_by_name_may_fail_too(tmp_path):
    tiny_trainer(tmp_path, trainer_arguments={"reward_funcs": "tests.tiny_runs:count_even"}, reward_retries=1, **MASK)
