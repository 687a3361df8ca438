"""`alpaca-ppo export` and `alpaca-ppo sample` on two finished runs, one of a whole model and one of an adapter."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from alpaca_ppo.cli import sample
from alpaca_ppo.cli.chat import Answer, Conversation, _AnyColumn, template_columns, what_to_type
from alpaca_ppo.cli.commands import main
from alpaca_ppo.cli.train import run_training
from alpaca_ppo.doctor import Finding, rules
from tests.data.tokenizers import PHI_3, turn_tokenizer
from tests.integration.launching import write_run
from tests.tiny_models import tiny_tokenizer

ADAPTER = {"use_peft": True, "lora_r": 2, "critic_layout": "adapter", "merge_on_save": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs `whole` and `adapter`, of two steps with a checkpoint each; run.yaml holds all options."""
    folder = tmp_path_factory.mktemp("runs")
    given = yaml.safe_load(write_run(folder).read_text())
    for name, settings in (("whole", {}), ("adapter", ADAPTER)):
        options = {**given, **settings, "output_dir": str(folder / name), "save_steps": 1, "learning_rate": 0.05}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(options))
        run_training(["--config", str(folder / f"{name}.yaml")])
        (folder / name / "run.yaml").write_text(yaml.safe_dump(options))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("run", "models"), [("whole", ["policy", "value"]), ("adapter", ["merged", "policy", "value"])]
)
def test_the_newest_checkpoint_is_exported_as_the_run_wrote_its_last_models(run, models, runs, tmp_path, capsys):
    merge = ["--merge"] if "merged" in models else []
    assert main(["export", str(runs / run), "--to", str(tmp_path / "out"), *merge]) == 0
    assert "checkpoint-2" in capsys.readouterr().out
    assert [name for name in models if not same(tmp_path / "out" / name, runs / run / "final" / name)] == []
    assert main(["export", str(runs / run / "checkpoint-1"), "--to", str(tmp_path / "first")]) == 0
    assert not same(tmp_path / "first/policy", runs / run / "final/policy")
    assert not (tmp_path / "first/merged").exists()
    if run == "whole":
        AutoModelForCausalLM.from_pretrained(tmp_path / "first/policy")
    AutoTokenizer.from_pretrained(tmp_path / "first/policy")


@pytest.mark.parametrize(("stop_on", "status"), [("error", 3), ("warning", 0)])
def test_a_run_that_an_error_in_stop_on_has_ended_ends_the_command_with_status_3(
    stop_on, status, runs, tmp_path, capsys, monkeypatch
):
    """A run that a warning ends is one that ends as it was told. Without a terminal no library draws a bar."""

    def planted(history):
        return Finding(history.step, "constant_reward", stop_on, "planted", "evidence", "cause", "remedy")

    monkeypatch.setitem(rules.RULES, "constant_reward", planted)
    flags = ["--config", str(runs / "whole.yaml"), "--output_dir", str(tmp_path), "--stop_on", stop_on]
    if status:
        with pytest.raises(SystemExit) as caught:
            main(["train", *flags])
        assert caught.value.code == status
    else:
        assert main(["train", *flags]) == status
    said = "error: stop_on ended the run at step 1 of 2, because of constant_reward (planted); its checkpoint is "
    err = capsys.readouterr().err
    assert err == (f"{said}{tmp_path / 'checkpoint-1'}\n" if status else "")
    assert (tmp_path / "checkpoint-1").is_dir() and (tmp_path / "final/policy").is_dir()


def test_an_export_that_cannot_be_made_is_refused(runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/run.yaml").write_text((runs / "whole.yaml").read_text())
    checkpoint = str(runs / "whole/checkpoint-1")
    for argv, message in (
        ([checkpoint, "--to", str(runs)], "which exists already; choose a new folder"),
        ([str(tmp_path / "none"), "--to", str(tmp_path / "out")], "none', but there is no such folder"),
        ([str(tmp_path / "empty"), "--to", str(tmp_path / "out")], "empty holds no checkpoint-<step> folder"),
        (
            [checkpoint, "--to", str(tmp_path / "out"), "--config", str(runs / "adapter.yaml")],
            "is a checkpoint of other models: ",
        ),
    ):
        assert main(["export", *argv]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def greedy(model, prompt: str) -> str:
    """Four tokens by `model.generate`, which is not this package's sampler."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    new = out[0][ids["input_ids"].size(1) :]
    nothing = "(empty: it stopped at once)" if len(new) == 1 else f"(empty: {len(new)} tokens without text)"
    return tokenizer.decode(new, skip_special_tokens=True).strip() or nothing


def expected(runs: Path, run: str, prompt: str) -> list[str]:
    base = AutoModelForCausalLM.from_pretrained(runs / "policy").eval()
    reference = greedy(base, prompt)
    final = runs / run / "final/policy"
    policy = AutoModelForCausalLM.from_pretrained(final) if run == "whole" else PeftModel.from_pretrained(base, final)
    return [f"policy: {greedy(policy.eval(), prompt)}", f"reference: {reference}"]


@pytest.mark.parametrize("run", ["whole", "adapter"])
def test_policy_and_reference_answer_beside_each_other(run, runs, capsys, monkeypatch, tmp_path):
    wanted = expected(runs, run, "w10 w11")
    assert wanted[0].removeprefix("policy: ") != wanted[1].removeprefix("reference: ")
    assert main(["sample", str(runs / run), "--prompt", "w10 w11", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == wanted
    # Typed, and from a file of which the first prompt is taken.
    typed = iter(["", "w10 w11", "/new", "/quit"])
    monkeypatch.setattr("builtins.input", lambda shown: next(typed))
    assert main(["sample", str(runs / run / "final/policy"), "--temperature", "0", "--max_new_tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == wanted[0]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": q}) + "\n" for q in ("w10", "w12")))
    flags = ["--prompts", str(data), "--prompt_template", "{question} w11", "--num_prompts", "1", "--temperature", "0"]
    assert main(["sample", str(runs / run), *flags, "--reference", "none"]) == 0
    assert capsys.readouterr().out.splitlines() == ["prompt 1: w10 w11", wanted[0], ""]
    # What the tokenizer does not know is in the prompt as it was written.
    flags[3] = "{question} ### w11"
    assert main(["sample", str(runs / run), *flags, "--reference", "none"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "prompt 1: w10 ### w11"
    # Alpaca's columns are no template: only the run knows whether it was trained with it.
    data.write_text(json.dumps({"instruction": "w10", "input": ""}))
    assert main(["sample", str(runs / run), "--prompts", str(data), "--reference", "none"]) == 2
    assert "no column 'prompt', only ['instruction', 'input'], and the run names no" in capsys.readouterr().err


def test_a_model_of_the_users_choice_is_the_reference(runs, capsys):
    flags = ["--prompt", "w10 w11", "--temperature", "0", "--max_new_tokens", "4"]
    assert main(["sample", str(runs / "policy"), *flags, "--reference", str(runs / "whole/final/policy")]) == 0
    policy, reference = expected(runs, "whole", "w10 w11")
    swapped = [reference.replace("reference", "policy"), policy.replace("policy", "reference")]
    assert capsys.readouterr().out.splitlines() == swapped


def test_samples_that_cannot_be_drawn_are_refused(runs, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    for argv, message in (
        ([str(runs / "whole/checkpoint-1")], "is a checkpoint to resume from; alpaca-ppo export"),
        ([str(tmp_path)], "has not ended, so final/policy is not there; alpaca-ppo export"),
        ([str(runs / "whole"), "--temperature", "-1"], "temperature is -1.0; it must be at least 0"),
        ([str(runs / "whole"), "--max_new_tokens", "0"], "max_new_tokens is 0; it must be at least 1"),
    ):
        assert main(["sample", *argv]) == 2
        assert message in capsys.readouterr().err


PYTHON_RUN = {
    "model_name_or_path": "",
    "response_len": 4,
    "provenance": {
        "in_memory": {
            "model": "LlamaForCausalLM",
            "train_dataset": "Dataset of 2 rows",
            "reward_funcs[0]": "__main__.f",
            "callbacks": "Own",
        }
    },
}


def test_what_needs_no_object_works_for_a_run_of_a_python_program(runs, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/final").symlink_to(runs / "whole/final")
    given = yaml.safe_load((runs / "whole.yaml").read_text())
    of_python = {
        **given,
        **PYTHON_RUN,
        "prompt_column": "question",
        "dataset_name": "",
        "reward_funcs": None,
        "reference": "auto",
    }
    (tmp_path / "run/run.yaml").write_text(yaml.safe_dump(of_python))
    flags = ["--prompt", "w10 w11", "--temperature", "0"]
    assert main(["sample", str(tmp_path / "run"), *flags]) == 0
    note, answer = capsys.readouterr().out.splitlines()
    policy, reference = expected(runs, "whole", "w10 w11")
    assert "given its model in memory (LlamaForCausalLM), so there is no reference" in note and answer == policy
    assert main(["sample", str(tmp_path / "run"), *flags, "--reference", str(runs / "policy")]) == 0
    assert capsys.readouterr().out.splitlines() == [policy, reference]
    (tmp_path / "rows.jsonl").write_text('{"question": "w10 w11"}')
    rows = ["--prompts", str(tmp_path / "rows.jsonl"), "--temperature", "0"]
    assert main(["sample", str(tmp_path / "run"), *rows, "--reference", "none"]) == 0
    assert capsys.readouterr().out.splitlines() == ["prompt 1: w10 w11", policy, ""]
    export = ["export", str(runs / "whole/checkpoint-2"), "--config", str(tmp_path / "run/run.yaml"), "--to"]
    assert main([*export, str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "bring back: model = LlamaForCausalLM. Give --model_name_or_path, or run that program again" in error
    assert main([*export, str(tmp_path / "out"), "--model_name_or_path", str(runs / "policy")]) == 0
    assert same(tmp_path / "out/policy", runs / "whole/final/policy")


def test_an_adapter_of_a_base_in_memory_is_refused_with_the_remedy(runs, tmp_path, capsys):
    shutil.copytree(runs / "adapter/final/policy", tmp_path / "policy")
    config = json.loads((tmp_path / "policy/adapter_config.json").read_text())
    (tmp_path / "policy/adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    assert main(["sample", str(tmp_path / "policy"), "--prompt", "w10"]) == 2
    assert "an adapter that names no base model, as that of a base built in memory; save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "text", "columns"),
    [
        ("alpaca", "hi", {"instruction": "hi", "input": ""}),
        ("alpaca", '{"instruction": "add", "input": "2 3"}', {"instruction": "add", "input": "2 3"}),
        ("{q}", '{"q": "a"}', {"q": "a"}),
        # A prompt may be JSON itself.
        ("{q}", '{"other": "a"}', {"q": '{"other": "a"}'}),
        ("{q}", "[1]", {"q": "[1]"}),
        ("{a} {b}", '{"a": "1", "b": "2"}', {"a": "1", "b": "2"}),
    ],
)
def test_a_typed_prompt_fills_the_columns_of_a_template(template, text, columns):
    assert template_columns(text, template) == columns


def test_what_to_type_follows_from_the_template_and_an_empty_answer_is_said_to_be_one():
    assert what_to_type("{question} w11") == "What you type is the question of the prompt template"
    assert what_to_type("alpaca") == (
        "What you type is the instruction of the prompt template; "
        '{"instruction": "...", "input": "..."} gives input too'
    )
    answers = map(str, (Answer("w1", 2), Answer("", 1), Answer("", 3)))
    assert list(answers) == ["w1", "(empty: it stopped at once)", "(empty: 3 tokens without text)"]


def test_a_template_of_several_columns_needs_all_of_them(runs, capsys, monkeypatch):
    message = (
        "prompt_template '{q} {c}' has the columns q, c, and the prompt 'w10' lacks q, c; write it as a JSON object"
    )
    flags = [str(runs / "whole"), "--prompt_template", "{q} {c}", "--temperature", "0"]
    assert main(["sample", *flags, "--prompt", "w10"]) == 2
    assert message in capsys.readouterr().err
    typed = iter(["w10", '{"q": "w10", "c": "w11"}', "/quit"])
    monkeypatch.setattr("builtins.input", lambda shown: next(typed))
    assert main(["sample", *flags, "--reference", "none"]) == 0
    start, said, answer = capsys.readouterr().out.splitlines()
    assert start.endswith('type them as a JSON object, such as {"q": "...", "c": "..."}')
    assert message in said and answer == expected(runs, "whole", "w10 w11")[0]
    with pytest.raises(ValueError, match="lacks b; write it as a JSON object, such as {"):
        template_columns('{"a": "1"}', "{a} {b}")


def test_the_end_of_the_input_ends_the_conversation(monkeypatch, capsys):
    def end(shown):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert list(sample._typed(lambda: None)) == []


def test_a_conversation_holds_the_turns_before():
    tokenizer = turn_tokenizer(PHI_3)
    talk = Conversation(tokenizer, None, chat=True)
    first = talk.prompt("w10")
    talk.note("w20")
    second = talk.prompt("w11")
    turns = [{"role": "user", "content": "w10"}]
    render = dict(add_generation_prompt=True, tokenize=True, return_dict=True)
    assert first == tokenizer.apply_chat_template(turns, **render)["input_ids"]
    turns += [{"role": "assistant", "content": "w20"}, {"role": "user", "content": "w11"}]
    assert second == tokenizer.apply_chat_template(turns, **render)["input_ids"]
    thinking = turn_tokenizer("{% if think %}w30 {% endif %}" + PHI_3)
    talk = Conversation(thinking, None, chat=True, chat_template_kwargs={"think": True})
    assert talk.prompt("w10") == [30, *first]
    plain = Conversation(tiny_tokenizer(), "w12 {question}", chat=False)
    assert plain.prompt("w13") == [12, 13]
    plain.note("w14")
    assert plain.prompt("w13") == [12, 13]


def test_the_columns_of_any_name_are_a_sequence_without_entries():
    columns = _AnyColumn()
    assert "question" in columns and list(columns) == [] and len(columns) == 0


def test_a_prompt_without_tokens_is_refused(runs, capsys):
    assert main(["sample", str(runs / "whole/final/policy"), "--prompt", " ", "--reference", "none"]) == 2
    assert "the prompt in row 0 is empty" in capsys.readouterr().err
