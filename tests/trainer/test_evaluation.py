"""Evaluation, trackers and the final folders of a run."""

import json
import random

import pytest
import torch
import yaml
from peft import LoraConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.cli.train import run_training
from alpaca_ppo.trainer.preflight import evaluation_settings
from tests.tiny_models import tiny_causal_lm, tiny_config
from tests.tiny_runs import metric_lines, prompts, tiny_trainer

LORA = LoraConfig(r=4, target_modules="all-linear")
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
    assert "objective/scores" in board.Tags()["scalars"]


def test_sampled_evaluation_repeats_its_random_numbers(tmp_path):
    trainer = tiny_trainer(tmp_path, eval_temperature=1.0, eval_top_k=20, eval_top_p=0.9, **EVALUATED)
    first = trainer.evaluate()
    rows = table(tmp_path, 0)
    second = trainer.evaluate()
    timeless = [{k: v for k, v in stats.items() if not k.startswith("time/")} for stats in (first, second)]
    assert timeless[0] == timeless[1]
    assert rows == table(tmp_path, 0)


def even_share(completion_ids, **columns):
    """The share of even ids, None for a response of one token."""
    return [None if len(ids) == 1 else sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


NAMED = {"eval_num_samples": 4, "eval_temperature": 1.5, "eval_success_above": 1.5}


def test_named_sets_with_several_samples_have_metrics_and_tables_of_their_own(tmp_path):
    answers = prompts(3).add_column("answer", ["x", "y", "z"])
    arguments = {"eval_dataset": {"short": prompts(5), "long.2": answers}, "metric_funcs": even_share}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments, **NAMED)
    stats = trainer.evaluate()
    rows = [json.loads(line) for line in (tmp_path / "eval/long.2/step_000000.jsonl").read_text().splitlines()]
    assert [(row["prompt_id"], row["columns"]["answer"]) for row in rows[::4]] == [(0, "x"), (1, "y"), (2, "z")]
    assert len(rows) == 12
    assert len({row["response"] for row in rows[:4]}) > 1
    scores = [row["score"] for row in rows]
    assert stats["eval/long.2/scores"] == pytest.approx(sum(scores) / 12)
    assert stats["eval/long.2/scores/count_even"] == pytest.approx(sum(scores) / 12)
    # Residuals summed over each prompt's four responses; three prompts: sqrt(3 / 2 * ...) / 12.
    sums = [sum(scores[i : i + 4]) - sum(scores) / 3 for i in (0, 4, 8)]
    assert stats["eval/long.2/scores_se"] == pytest.approx((1.5 * sum(s * s for s in sums)) ** 0.5 / 12)
    shares = [row["even_share"] for row in rows if row["even_share"] is not None]
    assert stats["eval/long.2/even_share"] == pytest.approx(sum(shares) / len(shares))
    assert [row["correct"] for row in rows] == [score > 1.5 for score in scores]
    solved = [sum(score > 1.5 for score in scores[i : i + 4]) for i in (0, 4, 8)]
    assert stats["eval/long.2/pass_at_1"] == stats["eval/long.2/avg_at_4"] == pytest.approx(sum(solved) / 12)
    assert stats["eval/long.2/pass_at_4"] == pytest.approx(sum(count > 0 for count in solved) / 3)
    assert {"eval/short/pass_at_2", "eval/short/pass_at_2_se"} <= stats.keys()
    assert (tmp_path / "eval/short/step_000000.jsonl").exists()
    assert not (tmp_path / "eval/step_000000.jsonl").exists()


def noisy(completions, **columns):
    return [random.random() + float(torch.rand(())) for _ in completions]


def test_a_run_records_how_many_prompts_it_has_and_how_many_are_too_long(tmp_path):
    # One to four tokens each, in turn.
    sets = {"a": prompts(8), "b": prompts(3)}
    trainer = tiny_trainer(
        tmp_path, trainer_arguments={"eval_dataset": sets}, query_len=3, max_steps=1, total_episodes=None
    )
    trainer.train()
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["provenance"]["prompts"] == {
        "train": "30 prompts (10 dropped as overlong)",
        "eval a": "6 prompts (2 dropped as overlong)",
        "eval b": "3 prompts (0 dropped as overlong)",
    }
    for line in metric_lines(tmp_path):
        if "eval/a/scores" in line:
            assert line["eval/a/dropped_prompts"] == 2 and "eval/b/dropped_prompts" not in line


def test_an_evaluation_leaves_the_random_numbers_of_the_training_alone(tmp_path):
    arguments = {"eval_dataset": prompts(3), "reward_funcs": noisy}
    scores = []
    for name, steps in (("often", 1), ("seldom", 0)):
        trainer = tiny_trainer(tmp_path / name, eval_steps=steps, trainer_arguments=arguments)
        trainer.train()
        scores.append([line["objective/scores"] for line in metric_lines(tmp_path / name) if line["step"]])
    assert scores[0] == scores[1]


def test_the_best_checkpoint_may_be_chosen_by_a_metric_of_a_named_set(tmp_path):
    settings = {"eval_steps": 1, "save_steps": 1, "eval_success_above": 0.5}
    arguments = {"eval_dataset": {"a": prompts(3)}}
    trainer = tiny_trainer(tmp_path, metric_for_best_model="eval/a/pass_at_1", trainer_arguments=arguments, **settings)
    trainer.train()
    assert trainer.state.best_metric == max(line["eval/a/pass_at_1"] for line in metric_lines(tmp_path)[1:])


def scores(completions, **columns):
    return [0.0] * len(completions)


def response(completions, **columns):
    return [0.0] * len(completions)


def two_answers(completions, **columns):
    return ["1", "2"]


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({}, {"eval_dataset": {"a/b": prompts(2)}}, "eval_dataset has a set 'a/b'"),
        ({}, {"eval_dataset": {"a" * 101: prompts(2)}}, f"eval_dataset has a set '{'a' * 101}'.* 100"),
        ({}, {"eval_dataset": {}}, "eval_dataset is an empty mapping"),
        ({}, {"eval_dataset": {"a": prompts(2).rename_column("prompt", "p")}}, "eval set 'a': the dataset has no col"),
        ({}, {"metric_funcs": 3}, "metric_funcs has 3"),
        ({}, {"metric_funcs": scores}, "metric_funcs has a function named 'scores'"),
        ({}, {"metric_funcs": response}, "metric_funcs has a function named 'response'"),
        ({"eval_success_above": 1.0}, {}, "eval_success_above is 1.0, without effect"),
    ],
)
def test_what_an_evaluation_cannot_use_is_refused(settings, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, trainer_arguments=arguments, **settings)


HERE = "tests.trainer.test_evaluation:"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"eval_success_by": "gold"}, "scores, rewards, scores/rm, scores/scores, scores/scores_2, two_answers"),
        ({"eval_opponent": "answers.jsonl", "eval_judge": "gold"}, "scores, scores/rm, scores/scores, scores/scores_2"),
        ({"metric_funcs": ["nothing:here"]}, "no module 'nothing'"),
    ],
)
def test_a_score_that_no_source_has_is_missed_before_a_model_is_loaded(settings, names, tmp_path):
    """The models have no weights, so that loading any of them would be another error."""
    tiny_config("llama").save_pretrained(tmp_path / "model")
    prompts(4).to_json(tmp_path / "prompts.jsonl")
    rewards = {"reward_model_name_or_path": ["org/rm"], "reward_funcs": [f"{HERE}scores"] * 2}
    options = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "prompts.jsonl")}
    options["dataset_test_split"] = "train"
    options |= {"metric_funcs": [f"{HERE}two_answers"], "eval_success_above": 0.5, **rewards, **settings}
    options |= {"output_dir": str(tmp_path / "run"), "use_cpu": True}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
    with pytest.raises(ValueError, match=names):
        run_training(["--config", str(tmp_path / "run.yaml")])


def test_the_reward_adapter_is_a_score_too(tmp_path):
    named = {"eval_success_by": "scores/reward_adapter", "eval_success_above": 0.0}
    evaluation_settings(PPOConfig(reward_adapter="org/adapter", **named), None, None, {})
    with pytest.raises(ValueError, match="eval_success_by is 'scores/reward_adapter'; choose one of scores, rewards$"):
        evaluation_settings(PPOConfig(**named), [], None, {})


def test_a_source_added_to_another_of_its_name_is_a_score_of_its_own(tmp_path):
    settings = evaluation_settings(PPOConfig(reward_adapter="org/adapter"), named("reward_adapter"), None, {})
    assert settings.names == ("scores", "rewards", "scores/reward_adapter", "scores/reward_adapter_2")


def named(name):
    """A function of that name."""

    def measure(completions, **columns):
        return [0.0] * len(completions)

    measure.__name__ = name
    return measure


def test_no_metric_function_may_have_the_name_of_a_metric_or_a_column(tmp_path):
    settings = {"eval_num_samples": 2, "eval_temperature": 1.0, "eval_success_above": 0.0, "eval_opponent": "reference"}
    arguments = {"eval_dataset": prompts(2).add_column("more", ["x"] * 2), "metric_funcs": named("mine")}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments, num_inspected_prompts=1, **settings)
    keys = {name.removeprefix("eval/") for name in trainer.evaluate()} | trainer.evaluator.answers[0].keys()
    keys = (keys | table(tmp_path, 0)[0].keys()) - {"mine", "mine_se", "time/eval"}
    assert {"kl", "length", "score", "stopped", "tokens", "prompt_id", "win", "correct", "columns", "pass_at_2"} <= keys
    for name in keys | {"turns", "tool_calls", "tool_failure_rate", "step", "score_se"}:
        with pytest.raises(ValueError, match=f"metric_funcs has a function named {name.removeprefix('scores/')!r}, "):
            evaluation_settings(PPOConfig(), None, named(name), {})


def test_responses_that_get_none_are_counted_beside_the_mean_of_the_others(tmp_path, capsys):
    def judged(completions, **columns):
        return [None, 1.0, *([None] * (len(completions) - 3)), 0.0]

    arguments = {"eval_dataset": prompts(4), "metric_funcs": judged, "reward_funcs": [named("other"), judged]}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments)
    trainer.train()
    stats = metric_lines(tmp_path)[0]
    assert (stats["eval/judged"], stats["eval/judged_missing"]) == (0.5, 2.0)
    assert (stats["eval/scores/judged"], stats["eval/scores/judged_missing"]) == (0.5, 2.0)
    assert "eval/scores/other_missing" not in stats and "eval/scores_missing" not in stats
    assert "judged_missing 2" in capsys.readouterr().out


@pytest.mark.parametrize("taken", ["a_se", "a_missing"])
def test_names_that_make_one_metric_of_two_are_refused(taken):
    functions = [named("a"), named(taken)]
    for field, given in (("reward_funcs", (functions, None)), ("metric_funcs", (None, functions))):
        with pytest.raises(ValueError, match=f"{field} has a function named '{taken}'"):
            evaluation_settings(PPOConfig(), *given, {})


def longer(prompts, completions, others, **columns):
    return [0.5 if len(a) == len(b) else float(len(a) > len(b)) for a, b in zip(completions, others, strict=True)]


def test_the_policy_ties_with_its_reference_before_training_and_differs_after(tmp_path):
    for name, settings in (("full", {}), ("lora", {"trainer_arguments": {"peft_config": LORA}})):
        arguments = {"eval_dataset": prompts(6), **settings.pop("trainer_arguments", {})}
        settings = {"eval_opponent": "reference", "learning_rate": 0.1, "trainer_arguments": arguments}
        trainer = tiny_trainer(tmp_path / name, critic_layout="shared", **settings)
        trainer.train()
        first, *_, last = metric_lines(tmp_path / name)
        before, after = table(tmp_path / name, 0), table(tmp_path / name, 2)
        tokenizer = trainer.processing_class
        assert (first["eval/win_rate"], first["eval/length_difference"]) == (0.5, 0.0)
        for row, later in zip(before, after, strict=True):
            assert row["response"].replace(tokenizer.eos_token, "").strip() == row["opponent"]
            assert later["opponent"] == row["opponent"]
            # The opponent's score is the row's before training: it was the same response.
            difference = later["score"] - row["score"]
            assert later["win"] == (0.5 if difference == 0 else float(difference > 0))
        assert any(row["response"] != later["response"] for row, later in zip(before, after, strict=True))
        assert last["eval/win_rate"] == pytest.approx(sum(row["win"] for row in after) / 6)


class GivesBonus(PPOTrainer):
    def _generate(self, prompts, sampling_params):
        for row in prompts["rows"]:
            row["bonus"] = 10.0
        return super()._generate(prompts, sampling_params)


def test_the_opponent_is_scored_with_the_datasets_rows_whatever_a_hook_has_made_of_the_policys(tmp_path):
    rows = prompts(3).add_column("bonus", [0.0] * 3)
    arguments = {"eval_dataset": rows, "train_dataset": rows, "reward_funcs": lambda bonus, **columns: bonus}
    settings = {"eval_opponent": "reference", "trainer_class": GivesBonus, "trainer_arguments": arguments}
    assert tiny_trainer(tmp_path, **settings).evaluate()["eval/win_rate"] == 1.0


def test_a_function_compares_with_a_column_and_a_metric_with_a_file(tmp_path):
    rows = prompts(3).add_column("gold", ["", "w10 " * 50, "w10 w11"])
    arguments = {"eval_dataset": rows, "metric_funcs": even_share}
    settings = {"eval_opponent": "column:gold", "eval_judge": "tests.trainer.test_evaluation:longer"}
    trainer = tiny_trainer(tmp_path / "a", trainer_arguments=arguments, **settings)
    stats = trainer.evaluate()
    found = table(tmp_path / "a", 0)
    assert [row["win"] for row in found[:2]] == [1.0, 0.0]
    assert stats["eval/unjudged"] == 0.0
    assert [row["opponent"] for row in found] == list(rows["gold"])
    answers = tmp_path / "answers.jsonl"
    # Shares of even ids: 1/2, none for a single token, and 1.
    texts = ["w10 w11", "w10", "w10 w12"]
    given = [{"prompt": row["prompt"], "response": text} for row, text in zip(rows, texts, strict=True)]
    answers.write_text("\n".join(map(json.dumps, given)))
    settings = {"eval_opponent": str(answers), "eval_judge": "even_share"}
    trainer = tiny_trainer(tmp_path / "b", trainer_arguments=arguments, **settings)
    stats = trainer.evaluate()
    for row, theirs in zip(table(tmp_path / "b", 0), (0.5, None, 1.0), strict=True):
        mine = row["even_share"]
        undecided = theirs is None or mine is None
        assert row["win"] == (None if undecided else 0.5 if mine == theirs else float(mine > theirs))
    assert stats["eval/unjudged"] >= 1.0


def test_an_unknown_judge_is_refused(tmp_path):
    settings = {"eval_opponent": "reference", "eval_judge": "gpt"}
    with pytest.raises(ValueError, match="eval_judge is 'gpt'; use scores, scores/count_even, module:function"):
        tiny_trainer(tmp_path, trainer_arguments={"eval_dataset": prompts(2)}, **settings)
