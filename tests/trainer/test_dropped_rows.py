"""`failed_rewards: drop`: a step goes on without the responses whose reward failed."""

import json
import os
import signal
import threading
import time
import types

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.ppo import dropped_rows
from alpaca_ppo.ppo.dropped_rows import gather_kept_rows
from alpaca_ppo.rewards import RewardError
from alpaca_ppo.rewards.batch import RowFailure, make_reward_batch
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_trainer, weights

DROP = {"failed_rewards": "drop"}


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


def failing_rows(trainer, rollouts):
    words = rollouts["query_attn_masks"].sum(dim=1)
    return (rollouts["responses"][:, 0] % 2 == 1) & (words == 1)


def test_the_rollouts_are_those_of_the_other_responses(tmp_path, capsys):
    whole = trainer_of(tmp_path / "whole", count_even, num_return_sequences=3)
    expected = whole.rollout(whole.prompt_batches(0))
    failed = failing_rows(whole, expected)
    assert 3 <= failed.sum() <= 8
    trainer = trainer_of(tmp_path / "kept", num_return_sequences=3, **DROP)
    capsys.readouterr()
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert rollouts.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(rollouts[key], value[~failed])
    said = capsys.readouterr().out
    assert f"{failed.sum()} of 30 responses dropped, because their reward failed:" in said
    assert said.count("'judge' raised TimeoutError: no answer, on row") == failed.sum()


def test_a_pause_before_a_retry_is_a_day_at_most(tmp_path):
    with pytest.raises(ValueError, match="reward_retry_pause"):
        trainer_of(tmp_path, reward_retry_pause=1e12)


def test_only_some_of_many_dropped_rows_are_named(capsys):
    errors = [f"error {i}" for i in range(11)]
    text = str(dropped_rows.DroppedRows(12, 20, errors))
    assert text.startswith("12 of 20 responses dropped") and "- error 7\nand 4 more" in text and "error 8" not in text


@pytest.mark.parametrize(
    "settings",
    [
        {"num_return_sequences": 2, "adv_estimator": "grpo"},
        # Every step has fewer rows than a step batch.
        {"old_policy": "correct", "critic": "quantile", "step_batch_size": 10},
    ],
)
def test_a_run_trains_on_the_rest_and_counts_what_it_dropped(settings, tmp_path):
    trainer = trainer_of(tmp_path, num_logged_rollouts=100, **settings, **DROP)
    before = weights(trainer)
    trainer.train()
    lines = metric_lines(tmp_path)
    per_step = 10 * settings.get("num_return_sequences", 1)
    for line in lines:
        table = (tmp_path / f"rollouts/step_{line['step']:06d}.jsonl").read_text().splitlines()
        rows = [json.loads(row) for row in table]
        assert line["objective/dropped_rows"] == per_step - len(rows)
        assert line["objective/scores"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
        assert not any(fails(row["prompt"], [row["tokens"][0]["id"]]) for row in rows)
    assert sum(line["objective/dropped_rows"] for line in lines) > 0
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_without_the_option_the_run_ends_with_the_error_and_counts_nothing(tmp_path):
    with pytest.raises(RewardError, match="'judge' raised TimeoutError: no answer, on row"):
        trainer_of(tmp_path / "ends").train()
    trainer_of(tmp_path / "none", count_even).train()
    assert not any("dropped" in name for line in metric_lines(tmp_path / "none") for name in line)


def test_groups_are_compared_without_the_dropped_responses(tmp_path, capsys):
    """rloo: 3 samples with the scores 4, _, 1 are 4 - 1 = 3 and 1 - 4 = -3; of _, _, 5 nothing is left to compare."""

    def fixed(completions, prompts, **columns):
        if len(completions) > 1:
            raise TimeoutError
        return [answers.pop(0)]

    # Called for each row after the whole batch has failed; None is a row without a score.
    answers = [4.0, None, 1.0, None, None, 5.0]
    trainer = trainer_of(
        tmp_path, fixed, num_return_sequences=3, rollout_batch_size=2, adv_estimator="rloo", kl_coef=0.0, **DROP
    )
    capsys.readouterr()
    rollouts = trainer._rollouts_with_advantages(trainer.prompt_batches(0))
    assert rollouts["sample_ids"].tolist() == [0, 2]
    assert rollouts["scores"].tolist() == [4.0, 1.0]
    assert_close(rollouts["advantages"][:, 0], torch.tensor([3.0, -3.0]))
    said = capsys.readouterr().out
    assert "4 of 6 responses dropped, 3 because their reward failed and 1 because no other response to their" in said
    assert said.count("returned None") == 3 and "more" not in said
    assert trainer.record_step_stats({}, rollouts, 1)["objective/dropped_rows"] == 4.0


@pytest.mark.parametrize("answers", [[4.0, None, None, 1.0], [None] * 4])
def test_if_nobody_is_left_to_compare_the_run_ends_with_the_first_error(answers, tmp_path):
    def fixed(completions, prompts, **columns):
        if len(completions) > 1:
            raise TimeoutError
        return [left.pop(0)]

    left = [*answers]
    settings = {"num_return_sequences": 2, "rollout_batch_size": 2, "adv_estimator": "grpo", "total_episodes": 2}
    with pytest.raises(RewardError, match=f"returned None.*, on row {answers.index(None)}"):
        trainer_of(tmp_path, fixed, **settings, **DROP).train()


def test_responses_whose_greedy_baseline_failed_are_dropped(tmp_path):
    """remax calls the source for the samples of the 10 prompts first, and then for their greedy responses."""
    batches = []

    def baseline_fails(completions, prompts, **columns):
        if len(completions) > 1:
            batches.append(prompts)
        if len(batches) == 2 and bad in prompts:
            raise TimeoutError("no baseline")
        return [1.0] * len(completions)

    trainer = trainer_of(tmp_path, baseline_fails, adv_estimator="remax", num_return_sequences=2, **DROP)
    given = trainer.prompt_batches(0)
    bad = given[0]["rows"][4]["prompt"]
    rollouts = trainer.rollout(given)
    assert len(batches[0]) == 20 and len(batches[1]) == 10
    kept = [i for i, row in enumerate(given[0]["rows"]) if row["prompt"] != bad]
    assert rollouts["prompt_ids"].tolist() == [int(given[0]["prompt_ids"][i]) for i in kept for _ in range(2)]
    assert trainer.counts.dropped_rows == 20 - 2 * len(kept) > 0


def test_an_evaluation_is_over_the_other_prompts(tmp_path):
    def by_prompt(prompts, **columns):
        if any(prompt.count(" ") == 1 for prompt in prompts):
            raise TimeoutError
        return [float(prompt.count(" ")) for prompt in prompts]

    # Eight prompts of 1, 2, 3, 4, 1, 2, 3, 4 words; those of two words fail.
    arguments = {"eval_dataset": prompts(8)}
    trainer = trainer_of(tmp_path, by_prompt, trainer_arguments=arguments, **DROP)
    stats = trainer.evaluate()
    assert stats["eval/dropped_rows"] == 2.0
    # (0 + 2 + 3) * 2 / 6
    assert stats["eval/scores"] == pytest.approx(10 / 6)
    assert len((tmp_path / "eval/step_000000.jsonl").read_text().splitlines()) == 6


def test_if_every_response_fails_the_run_ends_with_the_first_error(tmp_path):
    def down(**columns):
        raise TimeoutError("the judge is down")

    with pytest.raises(RewardError, match="'down' raised TimeoutError: the judge is down, on row 0") as caught:
        trainer_of(tmp_path, down, **DROP).train()
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_an_outage_in_an_evaluation_leaves_its_metrics_empty_and_the_run_goes_on(tmp_path, capsys):
    def down_while_evaluating(completions, completion_ids, prompts):
        if trainer.state.global_step == 1 and evaluating(prompts):
            raise TimeoutError("the judge is down")
        return count_even(prompts, completions, completion_ids)

    def evaluating(asked):
        return set(asked) <= set(prompts(3)["prompt"])

    settings = {"eval_steps": 1, "metric_for_best_model": "eval/scores", "save_steps": 1, **DROP}
    trainer = trainer_of(tmp_path, down_while_evaluating, trainer_arguments={"eval_dataset": prompts(3)}, **settings)
    trainer.train()
    assert "3 of 3 responses dropped" in capsys.readouterr().out
    start, first, second = metric_lines(tmp_path)
    assert [line["eval/dropped_rows"] for line in (start, first, second)] == [0.0, 3.0, 0.0]
    rest = {name for name in start if name.startswith("eval/")} - {"eval/dropped_rows"}
    assert {first[name] for name in rest} == {None} and None not in {second[name] for name in rest}
    assert first["objective/dropped_rows"] == 0.0 and (tmp_path / "checkpoint-1").is_dir()
    assert (tmp_path / "eval/step_000001.jsonl").read_text() == ""
    assert trainer.state.best_global_step == 2


def test_a_loop_of_ones_own_counts_each_step_s_rows_once(tmp_path):
    """A step of two rollouts with an evaluation in between, as a subclass may write it."""

    def fails_for_one_word(prompts, **columns):
        if any(" " not in prompt for prompt in prompts):
            raise TimeoutError
        return [0.0] * len(prompts)

    class Parts(PPOTrainer):
        def rollout(self, prompt_batches):
            first, second = super().rollout(prompt_batches), super().rollout(prompt_batches)
            return {key: torch.cat([first[key], second[key]]) for key in first}

    arguments = {"eval_dataset": prompts(5)}
    trainer = trainer_of(tmp_path, fails_for_one_word, trainer_class=Parts, trainer_arguments=arguments, **DROP)
    counts = []
    for step in range(2):
        batches = trainer.prompt_batches(step)
        failing = sum(" " not in row["prompt"] for batch in batches for row in batch["rows"])
        rollouts = trainer._rollouts_with_advantages(batches)
        # Prompts 0 and 4 of the five have one word.
        assert trainer.evaluate()["eval/dropped_rows"] == 2.0
        stats = trainer.step_with_rollouts(rollouts)
        trainer.mark_step_done(step)
        counts.append((trainer.record_step_stats(stats, rollouts, step + 1)["objective/dropped_rows"], 2 * failing))
    assert counts[0][1] > 0 and counts[1][1] > 0
    assert [counted for counted, _ in counts] == [failed for _, failed in counts]


def test_a_hook_that_scores_by_itself_drops_nothing(tmp_path):
    class Constant(PPOTrainer):
        def _score(self, samples, rows):
            zeros = torch.zeros(len(rows))
            return {"scores": zeros, "rewards": zeros, "scores_by_source": zeros.unsqueeze(1)}

    trainer = trainer_of(tmp_path, trainer_class=Constant, adv_estimator="remax", **DROP)
    trainer.train()
    assert [line["objective/dropped_rows"] for line in metric_lines(tmp_path)] == [0.0, 0.0]


def test_a_run_that_dropped_rows_and_is_interrupted_in_its_update_is_the_run_that_never_was(tmp_path):
    run = {"total_episodes": 10, "num_return_sequences": 2, **DROP}
    trainer_of(tmp_path / "whole", **run).train()
    trainer = trainer_of(tmp_path / "parts", **run)
    taken = trainer.updater.step

    def interrupted(*args, **kwargs):
        if trainer.progress.update.optimizer_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken(*args, **kwargs)

    trainer.updater.step = interrupted
    with pytest.raises(Interrupted):
        trainer.train()
    assert not (tmp_path / "parts/metrics.jsonl").exists()
    resumed = trainer_of(tmp_path / "parts", **run | {"reward_retries": 2, "reward_retry_pause": 0.0})
    resumed.train(resume_from_checkpoint=True)
    assert metric_lines(tmp_path / "parts") == metric_lines(tmp_path / "whole")
    assert metric_lines(tmp_path / "whole")[0]["objective/dropped_rows"] > 0


def test_a_signal_in_the_pause_before_a_retry_ends_the_run_at_once(tmp_path):
    def down(**columns):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        raise TimeoutError

    trainer = trainer_of(tmp_path, down, reward_retries=3, reward_retry_pause=100.0, **DROP)
    start = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        trainer.train()
    assert caught.value.code == 128 + signal.SIGTERM and time.monotonic() - start < 50
    assert (tmp_path / "checkpoint-0").is_dir()
    # The judge is back.
    resumed = trainer_of(tmp_path, count_even, total_episodes=10, ignore_reward_change=True)
    resumed.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(tmp_path)] == [1]


def rank_rows(dropped, rewards):
    return {"rewards": torch.tensor(rewards), "dropped": torch.tensor(dropped)}


def test_the_rows_of_dummies_are_neither_counted_nor_named():
    """The errors 1 and 4 are of dummies: 4 of a greedy response, whose sample comes before error 3."""
    failures = [failure(f"raised {i}") for i in (1, 2, 3, 4)]
    own, greedy = torch.tensor([0, 2, 1]), torch.tensor([3, 0, 4])
    rows = {"responses": torch.zeros(3, 1), "dropped": own}
    dropped_rows.add_baseline(rows, {"dropped": greedy}, torch.zeros(3))
    assert rows["dropped"].tolist() == [3, 2, 1]
    # The last row is the dummy's. The first two are of prompts; below, a third prompt's response is kept.
    real = {"rewards": torch.zeros(2), "dropped": rows["dropped"][:2]}
    _, dropped = gather_one(
        {"rewards": torch.zeros(3), "dropped": torch.cat([rows["dropped"][:2], torch.tensor([0])])}, failures
    )
    assert (dropped.num_dropped, dropped.num_sampled) == (2, 3)
    assert ["raised 3" in dropped.errors[0], "raised 2" in dropped.errors[1], len(dropped.errors)] == [True, True, 2]
    with pytest.raises(RowFailure, match="raised 3"):
        gather_one(real, failures)


def gather_one(rows, failures):
    accelerator = types.SimpleNamespace(process_index=0, num_processes=1)
    return gather_kept_rows(rows, failures, accelerator, samples_per_prompt=1)


def test_a_rank_drops_what_another_s_failures_left_alone_and_an_empty_response_is_no_company(monkeypatch):
    """Two samples each of prompt 7 (rank 0) and 8 (rank 1): one of 7 failed. Prompt 9 (rank 0): a failure, a sample
    without tokens, which counts in no group, and a third. Nothing failed of prompt 8, one of whose samples is empty."""
    mask = torch.tensor([[True], [True], [True], [True], [False], [True]])
    first = {
        "prompt_ids": torch.tensor([7, 7, 7, 9, 9, 9]),
        "response_mask": mask,
        "dropped": torch.tensor([1, 0, 2, 3, 0, 0]),
    }
    second = {
        "prompt_ids": torch.tensor([8, 8, 8]),
        "response_mask": torch.tensor([[False], [True], [False]]),
        "dropped": torch.tensor([0, 0, 0]),
    }
    failures = [[failure("raised A"), failure("raised B"), failure("raised C")], []]
    for rows, dropped in gathered(monkeypatch, [first, second], failures, samples_per_prompt=3, compares_group=True):
        # Of 7 the second and of 9 the third are alone.
        assert rows["prompt_ids"].tolist() == [8, 8, 8, 9] and rows["response_mask"].sum() == 1
        assert (dropped.num_dropped, dropped.num_alone, dropped.num_sampled) == (5, 2, 9)
    for rows, dropped in gathered(monkeypatch, [first, second], failures, samples_per_prompt=3):
        assert rows["prompt_ids"].tolist() == [7, 8, 8, 8, 9, 9] and dropped.num_alone == 0


def failure(text):
    batch = make_reward_batch(["p"], ["c"], [[1]], [{"prompt": "p"}])
    return RowFailure("judge", text, batch, 0)


def gathered(monkeypatch, given, failures, samples_per_prompt=1, **options):
    """What each of the ranks gets from `gather_kept_rows`; the ranks run as threads that meet in `gather_list`."""
    meeting, items = threading.Barrier(len(given)), {}

    def gather_list(item, accelerator):
        items[accelerator.process_index] = item
        meeting.wait(5)
        everywhere = [items[rank] for rank in range(len(given))]
        meeting.wait(5)
        return everywhere

    for module in (collectives, dropped_rows):
        monkeypatch.setattr(module, "gather_list", gather_list)
    results = {}

    def rank(index):
        accelerator = types.SimpleNamespace(process_index=index, num_processes=len(given))
        try:
            results[index] = gather_kept_rows(
                given[index], failures[index], accelerator, samples_per_prompt=samples_per_prompt, **options
            )
        except ValueError as error:
            results[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [results[index] for index in range(len(given))]


def test_a_rank_all_of_whose_rows_were_dropped_takes_the_rows_of_the_others(monkeypatch):
    # Prompts 0 and 3 on rank 0, 1 and 4 on rank 1, 2 on rank 2. Nobody scored tokens on rank 1: nothing was scored.
    given = [
        rank_rows([0, 0], [[0.0, 0.5], [3.0, 3.5]]),
        rank_rows([1, 2], [0.0, 0.0]),
        rank_rows([0], [[2.0, 2.5]]),
    ]
    failures = [[], [failure("raised A"), failure("raised B")], []]
    for rows, dropped in gathered(monkeypatch, given, failures):
        assert rows["rewards"].tolist() == [[0.0, 0.5], [2.0, 2.5], [3.0, 3.5]] and rows.keys() == {"rewards"}
        assert (dropped.num_dropped, dropped.num_sampled) == (2, 5)
        assert ["raised A" in dropped.errors[0], "raised B" in dropped.errors[1]] == [True, True]


def test_if_all_rows_of_all_ranks_are_dropped_every_rank_raises(monkeypatch):
    own = failure("raised A")
    first, second = gathered(monkeypatch, [rank_rows([1], [0.0]), {}], [[own], []])
    assert first is own
    assert isinstance(second, ValueError) and "1 of 1 responses dropped" in str(second) and "raised A" in str(second)


def test_a_rank_that_was_interrupted_ends_the_gathering_on_all(monkeypatch):
    assert (
        gathered(monkeypatch, [rank_rows([1], [0.0]), None], [[failure("raised A")], []])
        == [(None, dropped_rows.DroppedRows())] * 2
    )
