"""`alpaca-ppo export` and `alpaca-ppo sample` on two finished runs, one of a whole model and one of an adapter."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from alpaca_ppo.cli.commands import main
from alpaca_ppo.cli.train import run_training
from alpaca_ppo.doctor import rules
from alpaca_ppo.doctor.rules import Found, Rule
from alpaca_ppo.models import loading
from tests.integration.launching import write_run
from tests.tiny_models import tiny_tokenizer

# Ends an answer, beside the tokenizer's eos.
STOP = "w7"
ADAPTER = {"use_peft": True, "lora_r": 2, "critic_layout": "adapter"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of two runs of two steps with a checkpoint each; run.yaml holds all options."""
    folder = tmp_path_factory.mktemp("runs")
    given = yaml.safe_load(write_run(folder).read_text())
    for name, settings in (("whole", {}), ("adapter", ADAPTER)):
        options = {**given, **settings, "output_dir": str(folder / name), "save_steps": 1, "learning_rate": 0.05}
        options["truncate_tokens"] = [STOP]
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
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == models
    written = [name for name in models if name != "merged"]
    assert [name for name in written if not same(tmp_path / "out" / name, runs / run / "final" / name)] == []
    assert main(["export", str(runs / run / "checkpoint-1"), "--to", str(tmp_path / "first")]) == 0
    assert not same(tmp_path / "first/policy", runs / run / "final/policy")
    assert not (tmp_path / "first/merged").exists()
    if run == "whole":
        AutoModelForCausalLM.from_pretrained(tmp_path / "first/policy")
    AutoTokenizer.from_pretrained(tmp_path / "first/policy")


def test_exported_models_end_their_answers_where_training_ended_them(runs, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(runs / "whole/final/policy")
    ends = sorted([tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(STOP)])
    assert main(["export", str(runs / "whole"), "--to", str(tmp_path / "whole")]) == 0
    assert main(["export", str(runs / "adapter"), "--to", str(tmp_path / "adapter"), "--merge"]) == 0
    final = [runs / "whole/final/policy", runs / "adapter/final/policy"]
    exported = [tmp_path / "whole/policy", tmp_path / "adapter/policy", tmp_path / "adapter/merged"]
    for folder in final + exported:
        assert sorted(GenerationConfig.from_pretrained(folder).eos_token_id) == ends


def test_the_card_of_an_export_describes_the_run_whose_checkpoint_it_is(runs, tmp_path):
    # A run that was moved: run.yaml still names the folder where it was made.
    shutil.copytree(runs / "whole", tmp_path / "moved")
    (tmp_path / "moved/metrics.jsonl").write_text('{"step": 1, "objective/scores": 42.0}\n')
    assert main(["export", str(tmp_path / "moved/checkpoint-1"), "--to", str(tmp_path / "out")]) == 0
    assert "| Reward on training prompts | 42 | |\n" in (tmp_path / "out/policy/README.md").read_text()


@pytest.mark.proof
def test_a_run_in_half_precision_is_merged_into_the_stored_base(runs, tmp_path):
    run, out = tmp_path / "half", tmp_path / "out"
    run_training(["--config", str(runs / "adapter.yaml"), "--dtype", "bfloat16", "--output_dir", str(run)])
    assert main(["export", str(run), "--to", str(out), "--merge"]) == 0
    merged, report = AutoModelForCausalLM.from_pretrained(out / "merged", dtype="auto", output_loading_info=True)
    assert not any(report.values()) and merged.dtype == torch.float32
    base = AutoModelForCausalLM.from_pretrained(runs / "policy", dtype=torch.float32)
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        policy = PeftModel.from_pretrained(base, run / "final/policy").eval()
        torch.testing.assert_close(merged.eval()(ids).logits, policy(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("stop_on", "status"), [("error", 3), ("warning", 0)])
def test_a_run_that_an_error_in_stop_on_has_ended_ends_the_command_with_status_3(
    stop_on, status, runs, tmp_path, capsys, monkeypatch
):
    """A run that a warning ends is one that ends as it was told. Without a terminal no library draws a bar."""

    planted = Rule("planted", "remedy", lambda history: Found(stop_on, {}))
    monkeypatch.setitem(rules.RULES, "constant_reward", planted)
    flags = ["--config", str(runs / "whole.yaml"), "--output_dir", str(tmp_path), "--stop_on", stop_on]
    if status:
        with pytest.raises(SystemExit) as caught:
            main(["train", *flags])
        assert caught.value.code == status
    else:
        assert main(["train", *flags]) == status
    printed = capsys.readouterr()
    assert "constant_reward is in stop_on" in printed.out and not printed.err
    assert (tmp_path / "checkpoint-1").is_dir() and (tmp_path / "final/policy").is_dir()


def test_the_tokenizer_of_an_export_may_run_code_where_the_run_may(runs, tmp_path, monkeypatch):
    asked, load = [], loading.load_processing_class
    monkeypatch.setattr(loading, "load_processing_class", lambda name, **how: asked.append(how) or load(name, **how))
    for trust in (True, False):
        words = ["--to", str(tmp_path / str(trust)), "--trust_remote_code", str(trust).lower()]
        assert main(["export", str(runs / "whole"), *words]) == 0
    assert asked == [{"trust_remote_code": True}, {"trust_remote_code": False}]


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
            "checkpoint-1 does not match this run: tensor",
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
    return tokenizer.decode(new, skip_special_tokens=True).strip() or "(empty)"


def expected(runs: Path, run: str, prompt: str) -> list[str]:
    base = AutoModelForCausalLM.from_pretrained(runs / "policy").eval()
    reference = greedy(base, prompt)
    final = runs / run / "final/policy"
    policy = AutoModelForCausalLM.from_pretrained(final) if run == "whole" else PeftModel.from_pretrained(base, final)
    return [f"policy: {greedy(policy.eval(), prompt)}", f"reference: {reference}"]


@pytest.mark.parametrize("run", ["whole", "adapter"])
def test_policy_and_reference_answer_beside_each_other(run, runs, capsys, tmp_path):
    wanted = expected(runs, run, "w10 w11")
    assert wanted[0].removeprefix("policy: ") != wanted[1].removeprefix("reference: ")
    assert main(["sample", str(runs / run), "--prompt", "w10 w11", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == wanted
    # From a file, of which the first prompt is taken; what the tokenizer does not know is shown as it was written.
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": q}) + "\n" for q in ("w10", "w12")))
    flags = ["--prompts", str(data), "--prompt_template", "{question} ### w11", "--num_prompts", "1"]
    flags += ["--temperature", "0", "--max_new_tokens", "4", "--reference", "none"]
    assert main(["sample", str(runs / run / "final/policy"), *flags]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "prompt 1: w10 ### w11" and shown[1].startswith("policy: ") and len(shown) == 2


def test_a_model_of_the_users_choice_is_the_reference(runs, capsys):
    flags = ["--prompt", "w10 w11", "--temperature", "0", "--max_new_tokens", "4"]
    assert main(["sample", str(runs / "policy"), *flags, "--reference", str(runs / "whole/final/policy")]) == 0
    policy, reference = expected(runs, "whole", "w10 w11")
    swapped = [reference.replace("reference", "policy"), policy.replace("policy", "reference")]
    assert capsys.readouterr().out.splitlines() == swapped


def test_a_runs_folder_stands_for_its_final_models_wherever_a_model_is_named(runs, tmp_path, capsys):
    run = str(runs / "whole")
    flags = ["--prompt", "w10 w11", "--temperature", "0", "--max_new_tokens", "4"]
    assert main(["sample", str(runs / "policy"), *flags, "--reference", run]) == 0
    assert capsys.readouterr().out.splitlines()[1] == expected(runs, "whole", "w10 w11")[0].replace(
        "policy", "reference"
    )
    config = ["--config", str(runs / "whole.yaml")]
    again = ["--output_dir", str(tmp_path / "again"), "--reference", run, "--value_model_name_or_path", run]
    assert main(["train", *config, *again, "--model", run]) == 0
    printed = capsys.readouterr()
    for field, part in (("model_name_or_path", "policy"), ("value_model", "value"), ("reference", "policy")):
        assert printed.err.count(f"{field} is {run!r}, a run, whose final/{part} is taken\n") == 1
    first = json.loads((tmp_path / "again/metrics.jsonl").read_text().splitlines()[0])
    assert first["objective/kl_sum_seq"] == pytest.approx(0, abs=1e-6), "policy and reference are the same"
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "w10", "chosen": " w20", "rejected": " w30"}))
    learn = ["--output_dir", str(tmp_path / "reward"), "--max_steps", "1", "--use_cpu", "--report_to", "none"]
    assert main(["reward", "--model", run, "--dataset_name", str(data), *learn]) == 0
    assert (tmp_path / "reward/model.safetensors").is_file()
    # The model itself is no reference, whichever option names it.
    given = ["--results_dir", str(tmp_path / "results"), "--eval_dataset_name", str(runs / "train.jsonl")]
    given += ["--reward_funcs", f"{runs / 'rewards.py'}:even", "--response_len", "4", "--query_len", "4", "--use_cpu"]
    assert main(["evaluate", "--model_name_or_path", run, *given]) == 0
    assert (tmp_path / "results/results.json").is_file() and "reference is" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reference", "reference is {!r}, .*final/policy; make FOLDER/policy .*export {} --to"),
        ("value_model_name_or_path", "value_model is {!r}, .*final/value; make FOLDER/value .*export {} --to"),
        ("reward_model_name_or_path", "reward_model_name_or_path .* is {!r}, .*config.json, such as alpaca-ppo reward"),
    ],
)
def test_a_checkpoint_is_no_model(name, said, runs, tmp_path, capsys):
    checkpoint = str(runs / "whole/checkpoint-1")
    flags = ["--config", str(runs / "whole.yaml"), "--output_dir", str(tmp_path)]
    assert main(["train", *flags, f"--{name}", checkpoint]) == 2
    assert re.search("error: " + said.format(checkpoint, checkpoint), capsys.readouterr().err)


def test_answers_depend_on_the_seed_and_a_prompt_fills_the_column_of_a_template(runs, tmp_path, capsys):
    def answer(*flags, run=runs / "whole"):
        options = [*flags, "--reference", "none", "--max_new_tokens", "8", "--temperature", "5"]
        assert main(["sample", str(run), *options]) == 0
        return capsys.readouterr().out

    of_seed_7 = tmp_path / "run"
    shutil.copytree(runs / "whole/final", of_seed_7 / "final")
    options = yaml.safe_load((runs / "whole/run.yaml").read_text())
    (of_seed_7 / "run.yaml").write_text(yaml.safe_dump({**options, "seed": 7}))
    plain = answer("--prompt", "w10 w11")
    assert plain == answer("--prompt", "w10", "--prompt_template", "{question} w11")
    assert plain != answer("--prompt", "w10 w11", "--seed", "7") == answer("--prompt", "w10 w11", run=of_seed_7)


def test_samples_that_cannot_be_drawn_are_refused(runs, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    shutil.copytree(runs / "whole/final", tmp_path / "tools/final")
    (tmp_path / "tools/run.yaml").write_text("tools: [objects.py:look_up]\n")
    for argv, message in (
        ([str(runs / "whole/checkpoint-1"), "--prompt", "w10"], "alpaca-ppo export"),
        ([str(tmp_path), "--prompt", "w10"], "alpaca-ppo export"),
        ([str(runs / "whole"), "--prompt", "w10", "--prompt_template", "{q} {c}"], "'{q} {c}' has 2 columns"),
        ([str(runs / "whole"), "--prompt", " "], "the prompt in row 0 is empty"),
        ([str(runs / "whole"), "--prompt", "w10", "--max_new_tokens", "0"], "--max_new_tokens is 0; give at least 1"),
        ([str(runs / "whole"), "--prompts", "d.jsonl", "--num_prompts", "-1"], "--num_prompts is -1; give at least 1"),
        (
            [str(tmp_path / "tools"), "--prompt", "w10", "--reference", str(runs / "policy")],
            "is not sampled with tools or environments",
        ),
    ):
        assert main(["sample", *argv]) == 2
        assert message in capsys.readouterr().err


def test_what_needs_no_object_works_for_a_run_of_a_python_program(runs, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/final").symlink_to(runs / "whole/final")
    given = yaml.safe_load((runs / "whole.yaml").read_text())
    given |= {"model_name_or_path": "", "dataset_name": "", "reward_funcs": None, "reference": "auto"}
    objects = {"model": "LlamaForCausalLM", "train_dataset": "Dataset of 2 rows", "reward_funcs[0]": "__main__.f"}
    given |= {"response_len": 4, "prompt_column": "question", "provenance": {"in_memory": objects}}
    (tmp_path / "run/run.yaml").write_text(yaml.safe_dump(given))
    flags = ["--prompt", "w10 w11", "--temperature", "0"]
    assert main(["sample", str(tmp_path / "run"), *flags]) == 0
    printed = capsys.readouterr()
    policy, reference = expected(runs, "whole", "w10 w11")
    assert "left out: model; --reference MODEL" in printed.err and printed.out.splitlines() == [policy]
    assert main(["sample", str(tmp_path / "run"), *flags, "--reference", str(runs / "policy")]) == 0
    assert capsys.readouterr().out.splitlines() == [policy, reference]
    (tmp_path / "rows.jsonl").write_text('{"question": "w10 w11"}')
    rows = ["--prompts", str(tmp_path / "rows.jsonl"), "--temperature", "0"]
    assert main(["sample", str(tmp_path / "run"), *rows, "--reference", "none"]) == 0
    assert capsys.readouterr().out.splitlines() == ["prompt 1: w10 w11", policy]
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
    assert "base_model_name_or_path" in capsys.readouterr().err
