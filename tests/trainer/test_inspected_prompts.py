"""What a run logs for the report's token inspector, which leaves its training as it is, and the report at its end."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from alpaca_ppo.ppo import metrics
from alpaca_ppo.report import refresher
from alpaca_ppo.report.page import choose_answers
from alpaca_ppo.report.runs import read_run
from alpaca_ppo.tracking.rollout_tables import rollout_rows
from alpaca_ppo.trainer.inspected_prompts import TrainingPromptInspector
from tests.data.tokenizers import CHATML, turn_tokenizer
from tests.tiny_models import tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts, tiny_trainer, weights


def rows_of(folder, table, step):
    return [json.loads(line) for line in (folder / f"{table}/step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of three steps that log entropies at each: without tables, with those of training prompts, with an
    evaluation; by name their folders and final weights.
    """
    folder, trained = tmp_path_factory.mktemp("inspected"), {}
    settings = {
        "plain": {"num_logged_rollouts": 0},
        "train": {"num_inspected_prompts": 2, "report": True},
        "eval": {"num_inspected_prompts": 2, "eval_steps": 1, "trainer_arguments": {"eval_dataset": prompts(5)}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "ENTROPY_STEPS", 1)
        for name, given in settings.items():
            trainer = tiny_trainer(folder / name, total_episodes=30, **given)
            trainer.train()
            trained[name] = weights(trainer)
    return folder, trained


def test_training_is_the_same_to_the_last_bit(runs):
    folder, trained = runs
    plain = metric_lines(folder / "plain")
    for name in ("train", "eval"):
        lines = [line for line in metric_lines(folder / name) if line["step"]]
        assert [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines] == plain
        assert all(torch.equal(trained[name][key], value) for key, value in trained["plain"].items())


def test_training_prompts_are_followed_greedily_and_without_a_score(runs):
    folder, _ = runs
    assert sorted(path.name for path in (folder / "train/inspected").iterdir()) == [
        f"step_{step:06d}.jsonl" for step in range(4)
    ]
    first, last = rows_of(folder / "train", "inspected", 0), rows_of(folder / "train", "inspected", 3)
    assert [row["prompt_id"] for row in first] == [0, 1] and first[0]["score"] is None
    # Before training the policy is its reference, and the critic's head is zero.
    assert all(entry["kl"] == 0 and entry["values"] == 0 for row in first for entry in row["tokens"])
    assert any(entry["kl"] != 0 for row in last for entry in row["tokens"])
    assert {"entropies", "logprobs", "ref_logprobs"} < set(last[0]["tokens"][0])


def test_tables_have_the_last_message_of_the_user_beside_the_whole_prompt(tmp_path):
    system, asked = {"role": "system", "content": "w20"}, [{"role": "user", "content": "w10"}]
    asked += [{"role": "assistant", "content": "w30"}, {"role": "user", "content": "w40 w41"}]
    chats = Dataset.from_list([{"prompt": [system, *asked]}] * 10)
    tokenizer = turn_tokenizer(CHATML, special=["<|im_start|>", "<|im_end|>"])
    given = {"processing_class": tokenizer, "train_dataset": chats}
    short = {"query_len": 40, "total_episodes": 10, "num_inspected_prompts": 1, "num_logged_rollouts": 2}
    tiny_trainer(tmp_path / "train", trainer_arguments=given, **short).train()
    tiny_trainer(tmp_path / "eval", trainer_arguments={**given, "eval_dataset": chats}, **short).train()
    texts = tiny_trainer(tmp_path / "texts", **{**short, "num_inspected_prompts": 0})
    texts.train()
    for folder, table in (("train", "rollouts"), ("train", "inspected"), ("eval", "eval")):
        row = rows_of(tmp_path / folder, table, 1)[0]
        assert row["question"] == "w40 w41" and row["prompt"].startswith("<|im_start|>"), table
    assert "question" not in rows_of(tmp_path / "texts", "rollouts", 1)[0]
    page = choose_answers([read_run(tmp_path / name, name) for name in ("train", "texts")], token_mb=1)
    shown = {(run, page.prompts[k]) for run, k in zip(page.columns["run"], page.columns["question"], strict=True)}
    first = rows_of(tmp_path / "texts", "rollouts", 1)[0]["prompt"]
    assert {text for run, text in shown if run == 0} == {"w40 w41"} and (1, first) in shown


def test_a_long_run_is_looked_at_ten_times():
    looked = []
    inspected = TrainingPromptInspector(looked.append)
    for step in range(1, 26):
        inspected.on_step_end(None, SimpleNamespace(global_step=step, max_steps=25), None)
    assert looked == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]


def test_eval_prompts_are_followed_in_the_table_of_the_evaluation(runs):
    folder, _ = runs
    assert not (folder / "eval/inspected").exists()
    evaluated, inspected = rows_of(folder / "eval", "eval", 3), rows_of(folder / "train", "inspected", 3)
    assert ["tokens" in row for row in evaluated] == [True, True, False, False, False]
    # The same prompts, policy and reference as in the other run.
    assert [row["tokens"] for row in evaluated[:2]] == [row["tokens"] for row in inspected]
    assert evaluated[0]["kl"] == pytest.approx(sum(entry["kl"] for entry in evaluated[0]["tokens"]), rel=1e-4)


def test_the_ratio_is_that_of_the_updated_policy(tmp_path):
    trainer = tiny_trainer(tmp_path, total_episodes=10)
    trainer.train()
    row = rows_of(tmp_path, "rollouts", 1)[0]
    assert row["scores"] == {"count_even": row["score"]}
    ids = [entry["id"] for entry in row["tokens"]]
    prompt = tiny_tokenizer()(row["prompt"])["input_ids"]
    with torch.no_grad():
        logits = trainer.actor_critic.policy.model(torch.tensor([prompt + ids])).logits[0]
    after = logits[len(prompt) - 1 : -1].log_softmax(-1)[range(len(ids)), ids]
    before = torch.tensor([entry["logprobs"] for entry in row["tokens"]])
    ratio = torch.tensor([entry["ratio"] for entry in row["tokens"]])
    torch.testing.assert_close(ratio, (after - before).exp(), rtol=1e-3, atol=1e-4)
    assert (ratio - 1).abs().max() > 1e-3


def test_a_row_with_turns_holds_the_environments_text():
    class Words:
        """Drops the space of a token that is decoded alone, as many tokenizers do."""

        def decode(self, ids):
            return " ".join(f"w{i}" for i in ids)

    rollouts = {
        "queries": torch.tensor([[0, 1, 2]]),
        "query_attn_masks": torch.tensor([[0, 1, 1]]),
        "responses": torch.tensor([[3, 4, 5, 6, 0]]),
        "response_mask": torch.tensor([[True, False, False, True, False]]),
        "prompt_ids": torch.tensor([7]),
        "sample_ids": torch.tensor([1]),
        "scores": torch.tensor([0.5]),
        "scores_by_source": torch.tensor([[0.5, torch.nan]]),
        "stopped": torch.tensor([True]),
        "logprobs": torch.tensor([[-1.0, 0.0, 0.0, -2.0, 0.0]]),
    }
    (row,) = rollout_rows(rollouts, Words(), source_names=["a", "b"])
    assert row["turns"] == [
        {"role": "policy", "text": "w3"},
        {"role": "environment", "text": "w4 w5"},
        {"role": "policy", "text": "w6"},
    ]
    assert row["response"] == "w3 w4 w5 w6" and row["length"] == 2 and row["prompt"] == "w1 w2"
    assert row["scores"]["a"] == 0.5 and row["scores"]["b"] != row["scores"]["b"]
    assert row["tokens"] == [
        {"id": 3, "text": "w3", "logprobs": -1.0},
        {"id": 4, "text": " w4", "environment": True},
        {"id": 5, "text": " w5", "environment": True},
        {"id": 6, "text": " w6", "logprobs": -2.0},
    ]


LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")}


@pytest.mark.proof
@pytest.mark.parametrize(
    "settings",
    [
        {"critic_layout": "shared"},
        {"critic_layout": "cached", "critic_width": 64},
        {"adv_estimator": "grpo", "num_return_sequences": 2},
        {"critic_layout": "adapter", "reference": "adapter_off", "trainer_arguments": LORA},
        {"reference": "none", "kl_coef": 0.0, "critic_pretraining_steps": 1},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_every_layout_logs_its_tokens(settings, tmp_path):
    trainer = tiny_trainer(tmp_path, num_inspected_prompts=1, total_episodes=10, **settings)
    trainer.train()
    has_critic = settings.get("adv_estimator") != "grpo"
    for table, step in (("inspected", 0), ("inspected", 1), ("rollouts", 1)):
        tokens = rows_of(tmp_path, table, step)[0]["tokens"]
        assert tokens and all(("values" in entry) == has_critic for entry in tokens)
    # The pretrained critic's steps leave the policy as it is.
    assert ("ratio" in tokens[0]) == ("critic_pretraining_steps" not in settings)


@pytest.fixture
def clock(monkeypatch):
    """The time, which a test sets, the seconds that a report takes, and the times at which one was begun."""
    clock = SimpleNamespace(now=0.0, takes=0.0, begun=[])

    def write(*args, **settings):
        clock.begun.append(clock.now)
        clock.now += clock.takes

    monkeypatch.setattr(refresher.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(refresher, "write_report", write)
    return clock


def test_the_report_is_written_at_the_end_and_refreshed_when_it_is_due(runs, tmp_path, clock):
    folder, _ = runs
    assert "Report: train" in (folder / "train/report.html").read_text()
    assert not (folder / "plain/report.html").exists()
    callback = refresher.ReportRefresher(str(folder / "train"), is_main=True)
    callback.on_train_begin(None, None, None)
    for clock.now in (10.0, 29.0, 30.0, 31.0):
        callback.on_log(None, None, None)
    # Half a minute after the start; it took no time, so it is written again at once.
    assert clock.begun == [30.0, 31.0]
    other = refresher.ReportRefresher(str(folder / "train"), is_main=False)
    other.on_train_end(None, None, None)
    # When a run is interrupted; not before its first step, when there is nothing to report.
    early = refresher.ReportRefresher(str(tmp_path), is_main=True)
    refresher.refresh_report([TrainerCallback(), other, early])
    assert len(clock.begun) == 2
    refresher.refresh_report([callback])
    assert len(clock.begun) == 3


def test_writing_takes_a_fiftieth_of_the_time(runs, clock):
    callback, clock.takes = refresher.ReportRefresher(str(runs[0] / "train"), is_main=True), 2.0
    # Two seconds, begun at 0: the next one 2 / 0.02 = 100 seconds after it.
    for clock.now in (0.0, 50.0, 99.0, 101.0):
        callback.on_log(None, None, None)
    assert clock.begun == [0.0, 101.0]


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "report.html").mkdir()
    said = []
    refresher.ReportRefresher(str(tmp_path), is_main=True, say=said.append).write()
    assert said[0].startswith("report.html was not written: ")
    assert f"`alpaca-ppo report {tmp_path}` writes it later" in said[0]
