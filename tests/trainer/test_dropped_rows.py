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


def test_groups_are_compared_without_the_dropped_responses(tmp_path):
    """rloo: 3 samples with the scores 4, _, 1 are 4 - 1 = 3 and 1 - 4 = -3; a sample that is left alone keeps its score
    (baseline 0).
    """

    def fixed(completions, prompts, **columns):
        if len(completions) > 1:
            raise TimeoutError
        return [answers.pop(0)]

    # Called for each row after the whole batch has failed; None is a row without a score.
    answers = [4.0, None, 1.0, None, None, 5.0]
    trainer = trainer_of(
        tmp_path, fixed, num_return_sequences=3, rollout_batch_size=2, adv_estimator="rloo", kl_coef=0.0, **DROP
    )
    rollouts = trainer._rollouts_with_advantages(trainer.prompt_batches(0))
    assert rollouts["sample_ids"].tolist() == [0, 2, 2]
    assert rollouts["scores"].tolist() == [4.0, 1.0, 5.0]
    assert_close(rollouts["advantages"][:, 0], torch.tensor([3.0, -3.0, 5.0]))


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
    assert trainer.dropped_rows == 20 - 2 * len(kept) > 0


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
    trainer_of(tmp_path, count_even, total_episodes=10, ignore_reward_change=True).train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(tmp_path)] == [1]


def rank_rows(dropped, rewards):
    return {"rewards": torch.tensor(rewards), "dropped": torch.tensor(dropped)}


def failure(text):
    batch = make_reward_batch(["p"], ["c"], [[1]], [{"prompt": "p"}])
    return RowFailure("judge", text, batch, 0)


def gathered(monkeypatch, given, failures):
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
            results[index] = gather_kept_rows(given[index], failures[index], accelerator, samples_per_prompt=1)
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
        rank_rows([False, False], [[0.0, 0.5], [3.0, 3.5]]),
        rank_rows([True, True], [0.0, 0.0]),
        rank_rows([False], [[2.0, 2.5]]),
    ]
    failures = [[], [failure("raised A"), failure("raised B")], []]
    for rows, dropped in gathered(monkeypatch, given, failures):
        assert rows["rewards"].tolist() == [[0.0, 0.5], [2.0, 2.5], [3.0, 3.5]] and rows.keys() == {"rewards"}
        assert (dropped.num_dropped, dropped.num_sampled) == (2, 5)
        assert ["raised A" in dropped.errors[0], "raised B" in dropped.errors[1]] == [True, True]


def test_if_all_rows_of_all_ranks_are_dropped_every_rank_raises(monkeypatch):
    own = failure("raised A")
    first, second = gathered(monkeypatch, [rank_rows([True], [0.0]), {}], [[own], []])
    assert first is own
    assert isinstance(second, ValueError) and "1 of 1 responses dropped" in str(second) and "raised A" in str(second)


def test_a_rank_that_was_interrupted_ends_the_gathering_on_all(monkeypatch):
    assert (
        gathered(monkeypatch, [rank_rows([True], [0.0]), None], [[failure("raised A")], []])
        == [(None, dropped_rows.DroppedRows())] * 2
    )
