"""Evaluation, trackers and the final folders of a run."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, prompts, tiny_trainer

EVALUATED = {"eval_steps": 1, "trainer_arguments": {"eval_dataset": prompts(5)}}


def table(folder, step):
    return [json.loads(line) for line in (folder / f"eval/step_{step:06d}.jsonl").read_text().splitlines()]


def test_evaluation_is_greedy_by_default_and_tells_reward_length_and_kl(tmp_path):
    trainer = tiny_trainer(tmp_path, report_to=["tensorboard"], **EVALUATED)
    trainer.train()
    lines = metric_lines(tmp_path)
    # The untrained policy is evaluated too; its KL to itself is 0.
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert abs(lines[0]["eval/kl_sum_seq"]) < 1e-5
    rows = table(tmp_path, 0)
    assert len(rows) == 5
    assert lines[0]["eval/scores"] == pytest.approx(sum(row["score"] for row in rows) / 5)
    assert lines[0]["eval/response_length"] == pytest.approx(sum(row["length"] for row in rows) / 5)
    model, tokenizer = tiny_causal_lm("llama"), trainer.processing_class
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        greedy = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=5)
        assert tokenizer.decode(greedy[0, ids.size(1) :]) == row["response"]
    board = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert "eval/table/text_summary" in board.Tags()["tensors"]
    assert "objective/scores" in board.Tags()["scalars"]


def test_sampled_evaluation_repeats_its_random_numbers(tmp_path):
    trainer = tiny_trainer(tmp_path, eval_do_sample=True, eval_top_k=20, eval_top_p=0.9, **EVALUATED)
    first = trainer.evaluate()
    rows = table(tmp_path, 0)
    second = trainer.evaluate()
    timeless = [{k: v for k, v in stats.items() if not k.startswith("time/")} for stats in (first, second)]
    assert timeless[0] == timeless[1]
    assert rows == table(tmp_path, 0)


def test_the_final_folders_load_and_give_the_trained_numbers(tmp_path):
    for layout in ("separate", "shared"):
        trainer = tiny_trainer(tmp_path / layout, critic_layout=layout)
        trainer.train()
        final = tmp_path / layout / "final"
        policy = AutoModelForCausalLM.from_pretrained(final / "policy").eval()
        critic = AutoModelForSequenceClassification.from_pretrained(final / "value").eval()
        tokenizer = AutoTokenizer.from_pretrained(final / "policy")
        ids = tokenizer("w10 w11 w12 w13", return_tensors="pt")["input_ids"]
        queries, responses = ids[:, :2], ids[:, 2:]
        with torch.no_grad():
            outputs = trainer.actor_critic(
                queries,
                torch.ones_like(queries),
                responses,
                torch.ones_like(responses, dtype=torch.bool),
                temperature=1.0,
                chunk_size=8,
            )
            logprobs = policy(ids).logits[0, 1:3].log_softmax(-1).gather(1, responses.T)[:, 0]
            values = critic.score(critic.base_model(ids).last_hidden_state)[0, 1:3, 0]
        assert_close(outputs.logprobs[0], logprobs, rtol=1e-4, atol=1e-5)
        assert_close(outputs.values[0], values, rtol=1e-4, atol=1e-5)
        assert float(outputs.values.abs().max()) > 0
        card = (final / "policy/README.md").read_text()
        assert "objective/scores" in card
