"""`alpaca-ppo evaluate`: the numbers of a trainer's evaluation, for models, adapters and runs."""

import gc
import json
import re
import shutil

import pytest
import yaml
from peft import LoraConfig

from alpaca_ppo.cli.evaluate import evaluate
from alpaca_ppo.cli.sample import sample as show_answers
from alpaca_ppo.config.names import model_folder
from tests.fake_vllm import FakeVLLM, ServedInThread, fake_python, sample
from tests.generation.test_vllm_process import servers
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts, tiny_trainer

REWARD = "tests.tiny_runs:count_even"
OPTIONS = {"query_len": 4, "response_len": 5, "use_cpu": True, "rollout_per_device_batch_size": 4}


def mean_length(completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a model and its tokenizer, and a file of prompts."""
    folder = tmp_path_factory.mktemp("base")
    tiny_causal_lm("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [{**row, "answer": str(i)} for i, row in enumerate(prompts(5))]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def options(base, folder, **more):
    config = {**OPTIONS, "eval_dataset_name": str(base / "prompts.jsonl"), "results_dir": str(folder), **more}
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(folder / "config.yaml")]


def test_a_finished_run_is_evaluated_with_its_own_configuration(base, tmp_path, capsys):
    """With adapters: the numbers are those of the run's last evaluation, the KL to its start included."""
    settings = {"learning_rate": 0.05, "reference": "auto", "eval_temperature": 1.0, "eval_num_samples": 2, "seed": 3}
    eval_dataset = prompts(5)
    run = tiny_trainer(
        tmp_path / "run",
        model=str(base / "model"),
        critic_layout="adapter",
        trainer_arguments={"eval_dataset": eval_dataset, "peft_config": LoraConfig(r=2, target_modules="all-linear")},
        **settings,
    )
    run.train()
    last = metric_lines(tmp_path / "run")[-1]
    more = {"reward_funcs": [REWARD], "critic_layout": "adapter", "total_episodes": 20, "adv_estimator": "gae"}
    argv = options(base, tmp_path / "results", **settings, **more)
    assert evaluate([*argv, "--model", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "results/results.json").read_text())
    assert results["model"] == str(tmp_path / "run/final/policy")
    for name in ("scores", "scores_se", "kl_sum_seq", "response_length", "scores/count_even"):
        assert results["metrics"][f"eval/{name}"] == pytest.approx(last[f"eval/{name}"], rel=1e-5), name
    assert abs(last["eval/kl_sum_seq"]) > 1e-3
    printed = capsys.readouterr().out
    assert re.search(rf"^scores +{last['eval/scores']:.4g}  ±{last['eval/scores_se']:.2g}$", printed, re.M)
    model = tmp_path / "run/final/policy"
    assert f"{model}: 5 prompts, 2 answers to each, sampled at temperature 1\n" in printed
    answers = [json.loads(line) for line in (tmp_path / "results/answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers[::2]] == list(eval_dataset["prompt"])
    mean = sum(answer["scores"] for answer in answers) / 10
    assert mean == pytest.approx(last["eval/scores"], abs=1e-3) and "scores/count_even" in answers[0]
    table = [json.loads(line) for line in (tmp_path / "results/eval/step_000000.jsonl").read_text().splitlines()]
    assert table[0]["columns"] == {"answer": "0"}


def test_prompts_that_are_too_long_are_counted_beside_the_scores(base, tmp_path, capsys):
    # Five prompts of 1, 2, 3, 4 and 1 tokens.
    argv = options(base, tmp_path / "results", query_len=2, reward_funcs=[REWARD])
    assert evaluate([*argv, "--model", str(base / "model")]) == 0
    results = json.loads((tmp_path / "results/results.json").read_text())
    assert results["prompts"] == {"": 3} and results["metrics"]["eval/dropped_prompts"] == 2
    said = capsys.readouterr().out
    assert "eval set: 3 prompts (2 dropped as overlong); raise query_len (2)\n" in said
    assert re.search(r"^dropped_prompts +2$", said, re.M)


def test_vllm_samples_the_answers_of_an_evaluation_and_its_server_ends_with_it(base, tmp_path, monkeypatch):
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    model, fake, found = ["--model", str(base / "model")], FakeVLLM(), []
    settings = {"reward_funcs": [REWARD], "eval_temperature": 1.0, "eval_num_samples": 2}
    with ServedInThread(fake) as url:
        named = {"generation_backend": "vllm", "vllm_urls": [url]}
        assert evaluate([*options(base, tmp_path / "named", **settings, **named), *model]) == 0
        given = ["--generation_backend", "vllm", "--vllm_python", fake_python(tmp_path)]
        assert evaluate([*options(base, tmp_path / "started", **settings), *model, *given]) == 0
    gc.collect()
    assert servers(tmp_path) == []
    for folder in ("named", "started"):
        lines = (tmp_path / folder / "answers.jsonl").read_text().splitlines()
        found.append(sorted(answer["response"] for answer in map(json.loads, lines)))
    asked = [body for path, body in fake.asked if path.endswith("generate")]
    sampled = [sample(fake.loaded, body["token_ids"], body["sampling_params"]) for body in asked]
    texts = [tiny_tokenizer().decode([t for t, _ in row], skip_special_tokens=True) for row in sampled]
    assert found == [sorted(texts)] * 2 and len(set(texts)) == 10


def test_answers_to_single_prompts_need_no_server(base, tmp_path, capsys):
    """`alpaca-ppo sample` of a run that vLLM sampled for."""
    shutil.copytree(base / "model", tmp_path / "final/policy")
    run = {"generation_backend": "vllm", "vllm_python": "/no/longer/there", "response_len": 3}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert show_answers([str(tmp_path), "--prompt", "w5 w6"]) == 0
    assert re.search(r"^policy: \S", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("spelling", ["model/", "../here/model"])
def test_a_model_is_not_its_own_reference_however_its_folder_is_spelt(spelling, base, tmp_path, monkeypatch, capsys):
    here = tmp_path / "here"
    shutil.copytree(base / "model", here / "model")
    (here / "model/run.yaml").write_text(yaml.safe_dump({"model_name_or_path": spelling, "response_len": 3}))
    monkeypatch.chdir(here)
    assert show_answers(["model", "--prompt", "w5 w6"]) == 0
    assert re.fullmatch(r"policy: \S.*\n", capsys.readouterr().out)


def test_a_damaged_adapter_is_refused_by_its_file(base, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{")
    argv = options(base, tmp_path / "results", reward_funcs=[REWARD])
    with pytest.raises(ValueError, match=r"model: no adapter .*adapter/adapter_config.json is damaged"):
        evaluate([*argv, "--model", str(tmp_path / "adapter")])


def test_the_kl_is_to_the_reference_that_is_named(base, tmp_path):
    tiny_causal_lm("llama", seed=1).save_pretrained(tmp_path / "other")
    more = {"reward_funcs": [REWARD], "reference": str(tmp_path / "other")}
    assert evaluate([*options(base, tmp_path / "results", **more), "--model", str(base / "model")]) == 0
    assert json.loads((tmp_path / "results/results.json").read_text())["metrics"]["eval/kl_sum_seq"] > 1e-3


@pytest.mark.parametrize("training", [{}, {"kl_coef": 0.1, "kl_controller": "horizon", "kl_loss_coef": 0.1}])
def test_no_reference_is_needed_whatever_the_run_did_with_one(training, base, tmp_path):
    argv = options(base, tmp_path / "results", reward_funcs=[REWARD], **training)
    assert evaluate([*argv, "--model", str(base / "model"), "--reference", "none"]) == 0
    assert "eval/scores" in json.loads((tmp_path / "results/results.json").read_text())["metrics"]


def test_the_answers_of_one_evaluation_are_the_opponent_of_another_and_each_set_is_measured(base, tmp_path):
    sets = [f"a={base / 'prompts.jsonl'}", f"b={base / 'prompts.jsonl'}@train[:2]"]
    more = {"reward_funcs": [REWARD], "metric_funcs": ["tests.cli.test_evaluate:mean_length"]}
    more |= {"eval_dataset_name": None, "eval_datasets": sets}
    assert evaluate([*options(base, tmp_path / "a", **more), "--model", str(base / "model")]) == 0
    more |= {"eval_opponent": str(tmp_path / "a/answers.jsonl"), "eval_judge": "mean_length"}
    assert evaluate([*options(base, tmp_path / "b", **more), "--model", str(base / "model")]) == 0
    metrics = json.loads((tmp_path / "b/results.json").read_text())["metrics"]
    assert metrics["eval/a/win_rate"] == metrics["eval/b/win_rate"] == 0.5
    answers = [json.loads(line) for line in (tmp_path / "b/answers.jsonl").read_text().splitlines()]
    assert [answer["set"] for answer in answers] == ["a"] * 5 + ["b"] * 2
    assert answers[0]["mean_length"] == len(answers[0]["response"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eval_dataset_name": None}, "there are no eval prompts"),
        ({}, "there is no reward"),
        ({"eval_datasets": ["a=b"]}, "eval_datasets is .*name all in eval_datasets"),
        ({"eval_dataset_name": None, "eval_datasets": ["data.jsonl"]}, "write set=dataset"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(flags, message, base, tmp_path):
    with pytest.raises(ValueError, match=message):
        evaluate([*options(base, tmp_path, **flags), "--model", str(base / "model")])


def test_a_model_must_be_given_and_a_checkpoint_is_none(base, tmp_path):
    with pytest.raises(ValueError, match="model is not set; give --model"):
        evaluate(options(base, tmp_path))
    # In a file, model is the one that the run started from.
    with pytest.raises(ValueError, match="there is no reward"):
        evaluate([*options(base, tmp_path, model=str(base / "model"))])
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match="with alpaca-ppo export .*checkpoint-3 --to FOLDER$"):
        model_folder("model", str(tmp_path / "checkpoint-3"))
    assert model_folder("model", "owner/name") == "owner/name"


def test_the_help_asks_for_a_model_alone(capsys):
    with pytest.raises(SystemExit):
        evaluate(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: alpaca-ppo evaluate [--config") and shown.count("equired.") == 1


def test_earlier_results_are_kept_unless_they_are_to_be_replaced(base, tmp_path):
    argv = [*options(base, tmp_path, reward_funcs=[REWARD]), "--model", str(base / "model")]
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=f"results_dir is '{tmp_path}', which holds results"):
        evaluate(argv)
    assert (tmp_path / "results.json").read_text() == "{}"
    assert evaluate([*argv, "--overwrite"]) == 0
    assert "eval/scores" in json.loads((tmp_path / "results.json").read_text())["metrics"]
    for name in ("checkpoint-1", "final"):
        run = tmp_path / f"run-{name}"
        (run / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"results_dir is '{run}', the folder of a training run"):
            evaluate([*argv, "--overwrite", "--results_dir", str(run)])


def test_a_set_is_named_once(base, tmp_path):
    sets = [f"a={base / 'prompts.jsonl'}"] * 2
    argv = options(base, tmp_path, eval_dataset_name=None, eval_datasets=sets, reward_funcs=[REWARD])
    with pytest.raises(ValueError, match="a=.*each set once"):
        evaluate([*argv, "--model", str(base / "model")])
