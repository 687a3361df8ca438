"""How prompts were written goes with a model from fine-tuning to training, evaluation and answers."""

import json

import pytest
import yaml

from alpaca_ppo.cli.commands import main
from tests.data.tokenizers import CHATML, turn_tokenizer
from tests.tiny_models import tiny_causal_lm

QUICK = "--use_cpu --report_to none --save_strategy no --disable_tqdm true --max_steps 1".split()
LEARNED = "{question} w11\n"
TRAINED = "the model was trained on prompts written"


def said(capsys, *words):
    """The lines about prompts that a command prints (`sample` beside its answers: the differences); it must go well."""
    assert main(list(words)) == 0
    printed = capsys.readouterr()
    lines, starts = (printed.err, TRAINED) if words[0] == "sample" else (printed.out, ("prompts are", TRAINED))
    return [line for line in lines.splitlines() if line.startswith(starts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a chat template, data, and the model that fine-tuning has made of it."""
    folder = tmp_path_factory.mktemp("wording")
    tiny_causal_lm("llama").save_pretrained(folder / "model")
    turn_tokenizer(CHATML, special=["<|im_start|>", "<|im_end|>"]).save_pretrained(folder / "model")
    row = {"question": "w10", "completion": "w12", "chosen": "w20", "rejected": "w30"}
    (folder / "data.jsonl").write_text((json.dumps(row) + "\n") * 4)
    names = ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data.jsonl")]
    assert main(["sft", *names, "--prompt_template", LEARNED, "--output_dir", str(folder / "sft"), *QUICK]) == 0
    return folder


def test_fine_tuning_and_reward_modelling_say_what_their_prompts_are(folder, tmp_path, capsys):
    folders = (["--dataset_name", str(folder / "data.jsonl"), "--output_dir", str(tmp_path / n), *QUICK] for n in "abc")
    messages = ["--user_template", "{question}", "--system_prompt", "w13"]
    (line,) = said(capsys, "sft", *next(folders), "--model_name_or_path", str(folder / "model"), *messages)
    assert line.startswith("prompts are messages, of user_template '{question}'; the first: '<|im_start|>")
    same = ["--model_name_or_path", str(folder / "sft"), "--prompt_template", LEARNED]
    (line,) = said(capsys, "reward", *next(folders), *same)
    assert line.endswith(r"of prompt_template '{question} w11\n'; the first: 'w10 w11\n'")
    first, second = said(capsys, "reward", *next(folders), *same[:2], *messages)
    assert second.startswith(TRAINED + r" '… w11\n', but these are written '<|im_start|>system")


def test_training_evaluation_and_answers_report_prompts_that_the_model_did_not_learn(folder, tmp_path, capsys):
    given = {
        "model_name_or_path": str(folder / "sft"),
        "dataset_name": str(folder / "data.jsonl"),
        "eval_dataset_name": str(folder / "data.jsonl"),
        "dataset_test_split": "train",
        "reward_funcs": ["tests.tiny_runs:count_even"],
        "prompt_template": LEARNED.rstrip(),
        "output_dir": str(tmp_path / "run"),
        **{"max_steps": 1, "rollout_batch_size": 2, "step_batch_size": 2, "query_len": 8, "response_len": 4},
        **{"rollout_per_device_batch_size": 2, "use_cpu": True, "report_to": ["none"], "num_inspected_prompts": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    config = ["--config", str(tmp_path / "run.yaml")]
    difference = rf"{TRAINED} '… w11\n', but these are written '… w11' (…: their own text)"
    assert said(capsys, "train", *config)[1:] == [difference]
    # The run's own prompts are what its policy has learned.
    results = ["--results_dir", str(tmp_path / "results")]
    assert len(said(capsys, "evaluate", *config, *results, "--model", str(tmp_path / "run"))) == 1
    results = ["--results_dir", str(tmp_path / "others")]
    assert said(capsys, "evaluate", *config, *results, "--model", str(folder / "sft"))[1:] == [difference]
    answers = ["--prompt", "w10", "--max_new_tokens", "2"]
    assert said(capsys, "sample", str(tmp_path / "run"), *answers) == []
    assert said(capsys, "sample", str(folder / "sft"), *answers, "--prompt_template", LEARNED) == []
    (line,) = said(capsys, "sample", str(folder / "sft"), *answers, "--user_template", "{q}", "--system_prompt", "w13")
    assert line.startswith(TRAINED + r" '… w11\n', but these are written '<|im_start|>system")
