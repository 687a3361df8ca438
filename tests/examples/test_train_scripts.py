"""Supervised fine-tuning and reward modelling on tiny models: what they learn from, and what they write."""

import json
import os
import re
import shutil

import psutil
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    Trainer,
)

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.adapters.files import read_policy_adapter
from alpaca_ppo.config.supervised_arguments import RewardModelArguments, SFTArguments
from alpaca_ppo.distributed import threads
from alpaca_ppo.models import build_actor_critic
from alpaca_ppo.rewards import RewardScorer, build_reward
from alpaca_ppo.supervised import reward_model, sft
from alpaca_ppo.supervised.run import prompts_of
from alpaca_ppo.trainer import setup
from tests.adapters.test_files import save_policy
from tests.data.tokenizers import CHATML, PHI_3, spaced_tokenizer, turn_tokenizer
from tests.environments.chat import WITH_TOOLS, chat_bytes
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import tiny_config

QUICK = "--use_cpu --report_to none --save_strategy no --disable_tqdm true --learning_rate 1e-2".split()


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    tokenizer = tiny_tokenizer()
    model = tiny_causal_lm("llama")
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def demonstrations(dataset, tokenizer, arguments):
    return sft.tokenize(prompts_of(dataset, tokenizer, arguments, [arguments.completion_column]), tokenizer, arguments)


def preferences(dataset, tokenizer, arguments):
    return reward_model.tokenize(prompts_of(dataset, tokenizer, arguments, reward_model.PAIR), tokenizer, arguments)


def words(tokenizer, *ids):
    return " ".join(tokenizer.convert_ids_to_tokens(list(ids)))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft_arguments(**changes):
    return SFTArguments(**{"model_name_or_path": "m", "dataset_name": "d", **changes})


def pair_arguments(**changes):
    return RewardModelArguments(**{"model_name_or_path": "m", "dataset_name": "d", **changes})


def test_the_supervised_loss_is_on_the_completion_and_its_end_only():
    tokenizer = tiny_tokenizer()
    dataset = Dataset.from_list([{"prompt": words(tokenizer, 10, 11), "completion": words(tokenizer, 12)}])
    (example,) = demonstrations(dataset, tokenizer, sft_arguments())
    assert example == {
        "input_ids": [10, 11, 12, tokenizer.eos_token_id],
        "labels": [-100, -100, 12, tokenizer.eos_token_id],
        "length": 4,
    }


@pytest.mark.parametrize("before", ["prepend", "first", "always"])
def test_a_completion_begins_as_it_is_written_and_not_with_a_space(before):
    tokenizer = spaced_tokenizer(before)
    turns = [{"role": role, "text": text} for role, text in (("policy", "paris"), ("tool", "\nU:"), ("policy", " a"))]
    rows = [{"prompt": "q?\na:", "completion": completion} for completion in ("paris", " paris")]
    bare, spaced = demonstrations(Dataset.from_list(rows), tokenizer, sft_arguments())
    (several,) = demonstrations(Dataset.from_list([rows[0] | {"completion": turns}]), tokenizer, sft_arguments())
    for example, expected in ((bare, "paris"), (spaced, "_paris"), (several, "paris\nU:_a")):
        written = [entry.replace("\u2581", "_") for entry in tokenizer.convert_ids_to_tokens(example["input_ids"])]
        assert written == [*"_q?\na:", *expected, "</s>"]


def test_words_keep_their_marks_in_a_completion_if_white_space_splits_first():
    tokenizer = spaced_tokenizer("words")
    rows = [{"prompt": "q?", "completion": completion} for completion in (" a ie a", "a ie")]
    for example, expected in zip(demonstrations(Dataset.from_list(rows), tokenizer, sft_arguments()),
                                 ("_q?_a_ie_a", "_q?a_ie"), strict=True):  # fmt: skip
        written = [entry.replace("\u2581", "_") for entry in tokenizer.convert_ids_to_tokens(example["input_ids"])]
        assert written == [*expected, "</s>"]


def test_of_several_turns_those_of_the_policy_are_learned():
    tokenizer = tiny_tokenizer()
    turns = [
        {"role": role, "text": words(tokenizer, *ids)}
        for role, ids in (("policy", [12, 13]), ("environment", [20, 21]), ("tool", [22]), ("policy", [14]))
    ]
    end = tokenizer.eos_token_id
    closed = [*turns[:3], {"role": "policy", "text": words(tokenizer, 14, end)}]
    rows = [{"prompt": words(tokenizer, 10), "turns": given} for given in (turns, closed)]
    # What ends with the end of a turn already, as what was sampled does, gets no second one.
    for example in demonstrations(Dataset.from_list(rows), tokenizer, sft_arguments(completion_column="turns")):
        assert example["input_ids"] == [10, 12, 13, 20, 21, 22, 14, end]
        assert example["labels"] == [-100, 12, 13, -100, -100, -100, 14, end]


@pytest.mark.parametrize("turns", [[], [{"role": "policy"}], [{"role": "environment", "text": "x"}]])
def test_turns_that_cannot_be_learned_are_named(turns):
    tokenizer = tiny_tokenizer()
    rows = Dataset.from_list([{"prompt": words(tokenizer, 10), "completion": turns}])
    with pytest.raises(ValueError, match=r"the completion \[.* is a list; it must be text, or a list of turns"):
        demonstrations(rows, tokenizer, sft_arguments())


def test_a_completion_of_a_conversation_ends_as_a_turn_of_the_chat_template_does():
    tokenizer = turn_tokenizer(PHI_3, special=["<|user|>", "<|assistant|>", "<|end|>"])
    rows = [{"prompt": [{"role": "user", "content": words(tokenizer, 10)}], "completion": words(tokenizer, 12)}]
    (example,) = demonstrations(Dataset.from_list(rows), tokenizer, sft_arguments())
    # <|user|> is 4, <|assistant|> 5 and <|end|> 6.
    assert example["input_ids"] == [4, 10, 6, 5, 12, 6]
    assert example["labels"] == [-100, -100, -100, -100, 12, 6]
    tokenizer.chat_template = "{% if think %}" + words(tokenizer, 30) + " {% endif %}" + PHI_3
    (example,) = demonstrations(Dataset.from_list(rows), tokenizer, sft_arguments(chat_template_kwargs={"think": True}))
    assert example["input_ids"] == [30, 4, 10, 6, 5, 12, 6]
    with pytest.raises(ValueError, match="chat_template_kwargs has 'tokenize'; the run sets it itself"):
        sft_arguments(chat_template_kwargs={"tokenize": False})


def learned(rows, template, **options):
    """The text of each row, with the text that is learned in it."""
    tokenizer, arguments = chat_bytes(template), sft_arguments(max_length=4000, **options)
    dataset = Dataset.from_list(rows, on_mixed_types="use_json")
    dataset = sft.with_prompts(dataset, arguments.prompt_column, arguments.completion_column)
    return [
        (tokenizer.decode(row["input_ids"]), tokenizer.decode([token for token in row["labels"] if token != -100]))
        for row in demonstrations(dataset, tokenizer, arguments)
    ]


def said_by(role, text):
    return {"role": role, "content": text}


QUESTION, ANSWER = [said_by("user", "2+2?")], [said_by("assistant", "4")]
ASKED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
OPENED_IN_ANSWERS = OPENED.replace("{{ m.content }}", "{{ '<think>\n' if m.role == 'assistant' }}{{ m.content }}")


def test_a_completion_may_be_messages():
    for completion in ("4", ANSWER):
        (row,) = learned([{"prompt": QUESTION, "completion": completion}], CHATML)
        assert row == (ASKED + "4<|im_end|>", "4<|im_end|>")
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]
    turns = [{"role": "assistant", "content": None, "tool_calls": calls}, said_by("tool", "4"), ANSWER[0]]
    ((whole, text),) = learned([{"prompt": QUESTION, "completion": turns, "tools": [{"name": "add"}]}], WITH_TOOLS)
    called = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
    assert text == called + "4<|im_end|>"
    tools = '<|im_start|>system\nTools: [{"name": "add"}]<|im_end|>\n'
    result = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert whole == tools + ASKED + called + result + "4<|im_end|>"
    bad = [*ANSWER, said_by("user", "?")]
    with pytest.raises(
        ValueError, match="the completion .* a list of messages that begins and ends with the assistant's"
    ):
        learned([{"prompt": QUESTION, "completion": bad}], CHATML)


@pytest.mark.parametrize("column", ["messages", "talk"])
def test_of_a_whole_conversation_every_answer_is_learned(column):
    rows = [{column: [*QUESTION, *ANSWER, said_by("user", "Sure?"), said_by("assistant", "Yes.")]}]
    options = {} if column == "messages" else {"completion_column": column}
    more = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    assert learned(rows, CHATML, **options) == [(f"{ASKED}4<|im_end|>{more}", "4<|im_end|>Yes.<|im_end|>")]


def test_an_answer_closes_the_thought_that_its_prompt_opens_or_it_is_said(capsys):
    empty = OPENED.replace("{{ m.content }}", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}")
    (row,) = learned([{"prompt": QUESTION, "completion": "4"}], empty)
    assert row == (ASKED + "<think>\n\n</think>\n\n4<|im_end|>", "\n</think>\n\n4<|im_end|>")
    assert "in another way" not in capsys.readouterr().out
    # A template that leaves out what it has opened: the answer follows as it is.
    (row,) = learned([{"prompt": QUESTION, "completion": "2 and 2</think>4"}], OPENED)
    assert row == (ASKED + "<think>\n2 and 2</think>4<|im_end|>", "2 and 2</think>4<|im_end|>")
    assert "in 1 of 1 rows the chat template writes the prompt in another way" in capsys.readouterr().out
    # One that does so only before later messages: the last answer is learned.
    last = empty.replace("if m.role", "if loop.last and m.role")
    ((whole, text),) = learned([{"messages": [*QUESTION, *ANSWER, *QUESTION, *ANSWER]}], last)
    assert text == "\n</think>\n\n4<|im_end|>"
    assert whole == f"{ASKED}4<|im_end|>\n{ASKED}<think>\n\n</think>\n\n4<|im_end|>"
    assert "in 1 of 1 rows" in capsys.readouterr().out


THOUGHT_DROPPED = OPENED.replace("{{ m.content }}", "{{ (m.content or '').split('</think>')[-1] }}")
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.name }}]{% endfor %}<|im_end|>"


@pytest.mark.parametrize("template", [OPENED, THOUGHT_DROPPED, OPENED_IN_ANSWERS])
@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("4", "\n</think>\n\n4"),
        ("<think>\nhm\n</think>\n\n4", "hm\n</think>\n\n4"),
        ("hm</think>4", "hm</think>4"),
        ([{**ANSWER[0], "reasoning_content": "hm"}], "hm\n</think>\n\n4"),
        ([{**ANSWER[0], "tool_calls": [{"name": "add"}]}], "\n</think>\n\n4[add]"),
    ],
)
def test_an_answer_goes_on_with_the_thought_that_its_prompt_opens(template, completion, expected):
    template = template.replace("<|im_end|>\n{% endfor %}", CALLS + "\n{% endfor %}")
    (row,) = learned([{"prompt": QUESTION, "completion": completion}], template)
    assert row == (f"{ASKED}<think>\n{expected}<|im_end|>", f"{expected}<|im_end|>")


def test_an_earlier_answer_that_ends_in_another_way_is_counted(capsys):
    earlier = "{{ '<|im_end|>' if m.role == 'assistant' and loop.last else '<eos>' }}"
    template = CHATML.replace("<|im_end|>\n{% endfor %}", f"{earlier}\n{{% endfor %}}")
    rows = [{"messages": [*QUESTION, *ANSWER, *QUESTION, *ANSWER]}, {"messages": [*QUESTION, *ANSWER]}]
    assert [text for _, text in learned(rows, template)] == ["4<|im_end|>", "4<|im_end|>"]
    said = "in 1 of 2 rows .* ends an earlier answer without '<|im_end|>'; only the last answer is learned"
    assert re.search(said.replace("|", r"\|"), capsys.readouterr().out)


@pytest.mark.parametrize("at_the_end", ["", "{{ '<|im_end|>' if loop.last }}"])
def test_a_user_message_is_not_learned_if_it_ends_as_an_answer_should(at_the_end):
    """Earlier answers have no end, so that the first end after them is the next user message's."""
    end = "{{ '<|im_end|>' if m.role == 'user' }}" + at_the_end
    template = CHATML.replace("<|im_end|>\n{% endfor %}", f"{end}\n{{% endfor %}}")
    for more in ([said_by("user", "Sure?")], [said_by("tool", "hm"), said_by("user", "Sure?")]):
        rows = [{"messages": [*QUESTION, *ANSWER, *more, said_by("assistant", "Yes.")]}]
        ((_, text),) = learned(rows, template)
        assert text == ("Yes.<|im_end|>" if at_the_end else "Yes.\n<|im_end|>")


def test_an_answer_that_the_chat_template_refuses_is_named_by_its_row():
    template = CHATML.replace("{{ m.content }}", "{{ m.content.split('|')[0] }}")
    silent = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    # The first is longer than max_length.
    rows = [
        {"prompt": [said_by("user", "?" * 5000)], "completion": ANSWER},
        {"prompt": QUESTION, "completion": [silent]},
    ]
    with pytest.raises(ValueError, match="the chat template refuses row 1"):
        learned(rows, template)


def test_rows_that_are_too_long_are_counted_on_the_screen_and_in_the_results(model_folder, tmp_path, capsys):
    lengths = (1, 2, 9, 9, 9)
    rows = [{"prompt": "w10", "completion": " ".join(["w11"] * n)} for n in lengths] + [
        {"prompt": "w9 " * 9, "completion": "w8"}
    ]
    rows = [row | {"chosen": f" {row['completion']}", "rejected": " w20"} for row in rows]
    data = write(tmp_path / "data.jsonl", rows)
    for train in (sft.train_sft, reward_model.train_reward_model):
        out = tmp_path / train.__name__
        names = ["--model_name_or_path", str(model_folder), "--dataset_name", data, "--output_dir", str(out)]
        train([*names, *QUICK, "--max_length", "5", "--max_steps", "1", "--dataset_test_split", "train[:3]"])
        said = capsys.readouterr().out
        assert "train data: 2 rows (4 longer than max_length, 5, are dropped)" in said
        assert "eval data: 2 rows (1 longer than max_length, 5, are dropped)" in said
        results = json.loads((out / "train_results.json").read_text())
        names = ("train_rows", "train_rows_dropped", "eval_rows", "eval_rows_dropped")
        assert [results[name] for name in names] == [2, 4, 2, 1]


def test_supervised_training_of_an_adapter_writes_what_the_trainer_starts_from(
    model_folder, tmp_path, monkeypatch, capsys
):
    out, data = tmp_path / "out", write(tmp_path / "sft.jsonl", [{"prompt": "w10", "completion": "w11"}] * 4)
    names = ["--model_name_or_path", str(model_folder), "--dataset_name", data, "--output_dir", str(out)]
    steps = ["--max_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]
    # As of layers that a fused kernel reads past their adapters.
    load = sft.load_causal_lm

    def with_unused_layer(*given, **options):
        model = load(*given, **options)
        model.model.q_proj = nn.Linear(4, 4)
        return model

    monkeypatch.setattr(sft, "load_causal_lm", with_unused_layer)
    sft.train_sft([*names, *QUICK, "--use_peft", "--lora_r", "2", *steps])
    assert "took no part in this step (base_model.model.model.q_proj)" in capsys.readouterr().err
    assert read_policy_adapter(str(out)).r == 2 and not (out / "model.safetensors").exists()
    for folder in (out, out / "checkpoint-1"):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [tiny_tokenizer().eos_token_id]


# transformers warns about entries like these, and refuses to save a configuration with them once it has changed.
@pytest.mark.parametrize(
    "others", [{"temperature": 0.6, "top_p": 0.9}, {"epsilon_cutoff": 0.1}, {"early_stopping": True}, {"top_k": 3}]
)
def test_a_fine_tuned_model_ends_its_answers_where_it_has_learned_to(model_folder, tmp_path, others):
    """Its base ended them elsewhere."""
    base = shutil.copytree(model_folder, tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 40, **others}))
    data = write(tmp_path / "sft.jsonl", [{"prompt": "w10", "completion": "w11"}])
    names = ["--model_name_or_path", str(base), "--dataset_name", data, "--output_dir", str(tmp_path / "out")]
    sft.train_sft([*names, *QUICK, "--max_steps", "1"])
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written.pop("eos_token_id") == [tiny_tokenizer().eos_token_id, 40]
    assert {name: written[name] for name in others} == others


SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("column", "messages"),
    [
        ("conversations", SHARED),
        ("messages", SHARED),
        ("messages", [said_by("assistant", "a"), said_by("user", "q"), said_by("assistant", "a")]),
        ("messages", [said_by("user", "q")]),
        ("completion", [said_by("user", "q")]),
        ("completion", SHARED),
        ("messages", [said_by("user", "q"), said_by("assistant", "a"), said_by("user", "q")]),
    ],
)
def test_a_conversation_without_prompt_or_answer_is_named_by_its_own_column(column, messages):
    good = [said_by("user", "q"), said_by("assistant", "a")]
    rows = Dataset.from_list([{column: good}, {column: messages}], on_mixed_types="use_json")
    with pytest.raises(ValueError, match=rf"row 1: {column} is \[{{'(role|from)': .*role, content"):
        sft.with_prompts(rows, "prompt")


def test_conversations_of_that_name_are_read_as_messages_are():
    good = [said_by("user", "q"), said_by("assistant", "a")]
    for chosen in ("completion", "conversations"):
        (row,) = sft.with_prompts(Dataset.from_list([{"conversations": good}]), "prompt", chosen)
        assert (row["prompt"], row[chosen]) == (good[:1], good[1:])


def test_pairs_may_take_either_form_in_each_row():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}w40 {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    question, good, bad = [said_by("user", "w10")], [said_by("assistant", "w20")], [said_by("assistant", "w30")]
    rows = [
        {"prompt": question, "chosen": good, "rejected": bad},
        {"prompt": None, "chosen": question + good, "rejected": question + bad},
        {"prompt": question, "chosen": "w20", "rejected": "w30", "tools": [{"name": "w40"}]},
    ]
    rows = [{"tools": None, **row} for row in rows]
    split = reward_model.with_prompts(Dataset.from_list(rows, on_mixed_types="use_json"), "prompt")
    pairs = preferences(split, tokenizer, pair_arguments())
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [
        ([10, 20], [10, 30]),
        ([10, 20], [10, 30]),
        ([40, 10, 20], [40, 10, 30]),
    ]
    for row, problem in (
        ({"prompt": question, "chosen": question + good, "rejected": bad}, "row 3: one of .* begins with the prompt"),
        ({"prompt": question, "chosen": None, "rejected": None}, "the completion None is a NoneType"),
    ):
        with pytest.raises(ValueError, match=problem):
            mixed = Dataset.from_list([*rows, row], on_mixed_types="use_json")
            preferences(reward_model.with_prompts(mixed, "prompt"), tokenizer, pair_arguments())


def test_demonstrations_longer_than_max_length_are_left_out():
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": words(tokenizer, 10), "completion": words(tokenizer, *range(12, 12 + n))} for n in (2, 3)]
    kept = demonstrations(Dataset.from_list(rows), tokenizer, sft_arguments(max_length=4))
    assert [row["length"] for row in kept] == [4]
    with pytest.raises(ValueError, match="no row fits into max_length .3."):
        demonstrations(Dataset.from_list(rows), tokenizer, sft_arguments(max_length=3))


def test_unusable_demonstrations_are_named():
    tokenizer = tiny_tokenizer()
    dataset = Dataset.from_list([{"prompt": "a", "answer": 3}])
    with pytest.raises(ValueError, match="lacks .'completion'.; it has .'prompt', 'answer'.; set completion_column"):
        demonstrations(dataset, tokenizer, sft_arguments())
    with pytest.raises(ValueError, match="the completion 3 is a int; it must be text"):
        demonstrations(dataset, tokenizer, sft_arguments(completion_column="answer"))


@pytest.mark.parametrize("arguments", [sft_arguments, pair_arguments])
@pytest.mark.parametrize("name", ["model_name_or_path", "dataset_name"])
def test_a_missing_name_is_an_error_with_the_flag(arguments, name):
    with pytest.raises(ValueError, match=f"{name} is not set; give --{name}"):
        arguments(**{name: ""})


def test_a_length_without_room_is_an_error():
    with pytest.raises(ValueError, match="max_length is 1"):
        sft_arguments(max_length=1)


def test_supervised_training_writes_a_model_that_learned_its_demonstration(model_folder, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    row = {"prompt": words(tokenizer, 10, 11), "completion": words(tokenizer, 12, 13)}
    data = write(tmp_path / "sft.jsonl", [row] * 16)
    names = ["--model_name_or_path", str(model_folder), "--dataset_name", data, "--output_dir", str(tmp_path / "out")]
    sft.train_sft([*names, *QUICK, "--num_train_epochs", "10", "--per_device_train_batch_size", "8"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        best = model(**tokenizer(row["prompt"] + " " + row["completion"], return_tensors="pt")).logits[0].argmax(-1)
    assert best[1:].tolist() == [12, 13, tokenizer.eos_token_id]
    assert [path.suffix for path in (tmp_path / "out").glob("model*")] == [".safetensors"]
    *_, done, loss, where, following = capsys.readouterr().out.splitlines()
    assert done.startswith("done: 20 steps in ") and where == f"model:       {tmp_path / 'out'}"
    assert "alpaca-ppo train" in following and f"--model_name_or_path {tmp_path / 'out'}" in following
    assert re.fullmatch(r"  training loss +\d\.\d+", loss), "no step has logged its own"
    # The same command again would lose the model, as would one whose start and end are the same folder.
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    for run in (sft.train_sft, reward_model.train_reward_model):
        with pytest.raises(ValueError, match=rf"output_dir is '{tmp_path / 'out'}', .*choose another"):
            run([*names, *QUICK, "--max_steps", "1"])
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights


def test_training_ends_by_saying_how_the_held_out_loss_has_changed_and_its_numbers_stay(model_folder, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": words(tokenizer, 10, i), "completion": words(tokenizer, 12, 13)} for i in range(20, 36)]
    data = write(tmp_path / "sft.jsonl", rows)
    trained = []
    given = {"plain": [], "held": ["--dataset_test_split", "train[:4]"], "once": ["--logging_steps", "4"]}
    for name, flags in given.items():
        names = [
            "--model_name_or_path",
            str(model_folder),
            "--dataset_name",
            data,
            "--output_dir",
            str(tmp_path / name),
        ]
        flags = [*flags, *([] if name == "once" else ["--logging_steps", "1"])]
        sft.train_sft([*names, *QUICK, *flags, "--num_train_epochs", "2"])
        trained.append((tmp_path / name / "model.safetensors").read_bytes())
    assert trained[0] == trained[1]
    said = re.findall(r"^  (.*loss) +([\d.]+)(?: -> +([\d.]+))?$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, *_ in said] == ["training loss", "eval loss", "training loss"]
    assert float(said[1][1]) > float(said[1][2]) and said[0][2] and not said[2][2]


def test_it_leaves_cores_to_other_programs_that_keep_them_busy(model_folder, tmp_path, monkeypatch, capsys):
    data = write(tmp_path / "sft.jsonl", [{"prompt": "w10", "completion": "w11"}])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: [0.0, 100.0, 100.0, 100.0])
    monkeypatch.setattr(threads, "cpu_quota", lambda: 4.0)
    before = torch.get_num_threads()
    names = ["--model_name_or_path", str(model_folder), "--dataset_name", data, "--output_dir", str(tmp_path / "out")]
    threads.busy_cores.cache_clear()
    try:
        torch.set_num_threads(4)
        sft.train_sft([*names, *QUICK, "--max_steps", "1"])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
        threads.busy_cores.cache_clear()
    assert "other programs keep 3 of 4 cores busy" in capsys.readouterr().out


def pairs(tokenizer, number):
    """Token 20 is good, token 30 is bad, whatever surrounds them."""
    return [
        {
            "prompt": words(tokenizer, 10 + i % 3, 14),
            "chosen": " " + words(tokenizer, 20, *[15] * (i % 4)),
            "rejected": " " + words(tokenizer, 30, *[15] * (i % 3)),
        }
        for i in range(number)
    ]


def test_a_pair_is_tokenised_as_two_whole_texts():
    tokenizer = tiny_tokenizer()
    dataset = Dataset.from_list(pairs(tokenizer, 2))
    assert preferences(dataset, tokenizer, pair_arguments())[1] == {
        "chosen": [11, 14, 20, 15],
        "rejected": [11, 14, 30, 15],
        "length": 4,
    }


def test_a_conversation_is_tokenised_by_the_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    row = {"prompt": [{"role": "user", "content": words(tokenizer, 10)}], "chosen": words(tokenizer, 20)}
    dataset = Dataset.from_list([row | {"rejected": words(tokenizer, 30)}])
    (pair,) = preferences(dataset, tokenizer, pair_arguments())
    assert (pair["chosen"], pair["rejected"]) == ([10, 20], [10, 30])
    as_messages = {
        column: [{"role": "assistant", "content": words(tokenizer, ids)}]
        for column, ids in (("chosen", 20), ("rejected", 30))
    }
    assert preferences(Dataset.from_list([row | as_messages]), tokenizer, pair_arguments())[0] == pair


@pytest.mark.parametrize("column", [{}, {"prompt": "w10"}])
def test_pairs_of_whole_conversations_begin_with_their_prompt(column):
    """As in TRL's datasets, and in UltraFeedback, which repeats it as text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    same, chosen, rejected = ([{"role": role, "content": word} for role, word in turns] for turns in (
        [("user", "w10"), ("assistant", "w11"), ("user", "w12")], [("assistant", "w20")], [("assistant", "w30")]
    ))  # fmt: skip
    whole = Dataset.from_list([{**column, "chosen": same + chosen, "rejected": same + rejected}] * 2)
    split = reward_model.with_prompts(whole, "prompt")
    assert split[1] == {"prompt": same, "chosen": chosen, "rejected": rejected}
    assert preferences(split, tokenizer, pair_arguments())[1]["rejected"] == [10, 11, 12, 30]
    # Equal answers stay answers, and what has a prompt already is left alone.
    equal = Dataset.from_list([{"chosen": same[:2], "rejected": same[:2]}])
    assert reward_model.with_prompts(equal, "prompt")[0] == {
        "prompt": same[:1],
        "chosen": same[1:2],
        "rejected": same[1:2],
    }
    assert reward_model.with_prompts(split, "prompt") is split


def test_pairs_share_their_prompt_though_one_column_alone_has_tool_calls():
    question, calls = said_by("user", "w10"), [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    asked = [question, {"role": "assistant", "content": "", "tool_calls": calls}, said_by("tool", "w11")]
    # In one column, the user's message has `tool_calls`, which is null.
    rows = [{"chosen": [*asked, said_by("assistant", "w20")], "rejected": [question, said_by("assistant", "w30")]}]
    (pair,) = reward_model.with_prompts(Dataset.from_list(rows), "prompt")
    assert [message["content"] for message in pair["prompt"]] == ["w10"]


def test_unusable_pairs_are_named():
    tokenizer = tiny_tokenizer()
    dataset = Dataset.from_list(pairs(tokenizer, 1))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    turn = [{"role": "assistant", "content": "w20"}]
    text = {"prompt": "w10", "chosen": turn, "rejected": turn}
    question = [{"role": "user", "content": "w10"}]
    for row in (text, {**text, "prompt": question, "chosen": [{"role": "assistant", "text": "w20"}]}):
        with pytest.raises(ValueError, match="is a list; it must be text, or, after a prompt of messages, a list of"):
            preferences(Dataset.from_list([row]), tokenizer, pair_arguments())
    with pytest.raises(ValueError, match="lacks .'rejected'."):
        preferences(dataset.remove_columns("rejected"), tokenizer, pair_arguments())
    with pytest.raises(ValueError, match="no row fits into max_length .2."):
        preferences(dataset, tokenizer, pair_arguments(max_length=2))


def test_the_pair_loss_is_bradley_terry():
    class Fixed(torch.nn.Module):
        def forward(self, scores):
            return type("Output", (), {"logits": scores.unsqueeze(-1)})

    trainer = reward_model.RewardTrainer.__new__(reward_model.RewardTrainer)
    # Margins 1 and -2: (log(1 + e^-1) + log(1 + e^2)) / 2 = (0.313262 + 2.126928) / 2
    loss, margins = trainer.compute_loss(Fixed(), {"scores": torch.tensor([3.0, 0.0, 2.0, 2.0])}, return_outputs=True)
    assert loss.item() == pytest.approx(1.220095, abs=1e-6)
    assert margins.tolist() == [1.0, -2.0]


def test_reward_training_writes_a_classifier_that_scores_as_the_trainer_will_ask(model_folder, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    data = write(tmp_path / "pairs.jsonl", pairs(tokenizer, 32))
    names = ["--model_name_or_path", str(model_folder), "--dataset_name", data, "--output_dir", str(tmp_path / "out")]
    evaluation = ["--dataset_test_split", "train[:8]", "--eval_strategy", "epoch", "--logging_strategy", "epoch"]
    reward_model.train_reward_model([*names, *QUICK, *evaluation, "--num_train_epochs", "4"])
    said = capsys.readouterr().out
    assert re.search(r"^  eval accuracy +[01]\.\d+ -> +1\.000$", said, re.MULTILINE)
    assert f"--reward_model_name_or_path {tmp_path / 'out'}" in said.splitlines()[-1]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as weights:
        assert "score.weight" in weights.keys()
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1
    scorer = build_reward(str(tmp_path / "out"))
    held_out = pairs(tokenizer, 40)[32:]
    prompts = [row["prompt"] for row in held_out]
    good, bad = (
        scorer(prompts, [row[side] for row in held_out], [[] for _ in held_out], held_out).rewards
        for side in ("chosen", "rejected")
    )
    assert bool((good > bad).all())


@pytest.mark.parametrize(
    ("pad_token", "dtype", "precision"),
    [("<pad>", torch.float32, 1e-6), (None, torch.float32, 1e-6), ("<pad>", torch.bfloat16, 1e-2)],
)
def test_a_reward_adapter_scores_as_it_was_trained_whatever_pads(
    pad_token, dtype, precision, model_folder, tmp_path, capsys
):
    """Conversations end in eos, which pads too where the tokenizer has no pad token."""
    tokenizer, messages = AutoTokenizer.from_pretrained(model_folder), [{"role": "user", "content": "w10 w14"}]
    tokenizer.pad_token = pad_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} <eos> {% endfor %}"
    tokenizer.save_pretrained(model_folder)
    (model := tiny_causal_lm("llama", pad_token_id=None).to(dtype)).save_pretrained(model_folder)
    rows = [{**row, "prompt": messages} for row in pairs(tokenizer, 8)]
    data, out = write(tmp_path / "pairs.jsonl", rows), str(tmp_path / "out")
    names = ["--model_name_or_path", str(model_folder), "--dataset_name", data, "--output_dir", out]
    base = ["--use_peft", "--dtype", str(dtype).removeprefix("torch.")]
    reward_model.train_reward_model([*names, *QUICK, *base, "--num_train_epochs", "1"])
    assert capsys.readouterr().out.rstrip().endswith(f"--reward_adapter {out}")
    with safe_open(f"{out}/adapter_model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float32}

    tokenizer = AutoTokenizer.from_pretrained(out)
    pad = {"pad_token_id": tokenizer.pad_token_id}
    classifier = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1, dtype=dtype, **pad)
    classifier = PeftModel.from_pretrained(classifier, out).merge_and_unload().eval()
    texts = [[{"role": "assistant", "content": text}] for text in ("w20", "w30 w15", "w30")]
    sequences = [tokenizer.apply_chat_template([*messages, *text], return_dict=True)["input_ids"] for text in texts]
    assert tokenizer.pad_token_id == (0 if pad_token else 2) and all(ids[-1] == 2 for ids in sequences)
    with torch.no_grad():
        batch = tokenizer.pad({"input_ids": sequences}, padding_side="right", return_tensors="pt")
        trained = classifier(**batch).logits[:, 0]
    asked = ([messages] * 3, texts, [[]] * 3, [{}] * 3)
    whole = build_reward(classifier, reward_processing_classes=tokenizer)(*asked).rewards
    adapters = add_policy_adapter(model, LoraConfig(target_modules="all-linear"))
    scorer = RewardScorer([], [])
    setup.add_reward_adapter(
        scorer,
        build_actor_critic(adapters, critic_layout=None),
        tiny_config(tmp_path, reward_adapter=out),
        torch.device("cpu"),
    )
    assert_close(whole, trained.float(), atol=precision, rtol=precision)
    assert_close(scorer(*asked).rewards, trained.float(), atol=precision, rtol=precision)


@pytest.mark.parametrize("train", [sft.train_sft, reward_model.train_reward_model])
def test_the_frozen_base_alone_is_in_bfloat16(train, model_folder, tmp_path, monkeypatch):
    row = {"prompt": "w10 w11", "completion": "w12", "chosen": " w20", "rejected": " w30"}
    names = ["--dataset_name", write(tmp_path / "data.jsonl", [row] * 4), "--output_dir", str(tmp_path / "out")]
    names += ["--model_name_or_path", str(model_folder), *QUICK, "--num_train_epochs", "1", "--dtype", "bfloat16"]
    with pytest.raises(ValueError, match="dtype is 'bfloat16', .*use_peft"):
        train(names)
    kept = []
    step = Trainer.training_step
    monkeypatch.setattr(
        Trainer, "training_step", lambda self, model, *rest: kept.append(model) or step(self, model, *rest)
    )
    train([*names, "--use_peft"])
    for name, parameter in kept[0].named_parameters():
        # PEFT keeps the head that it has copied.
        in_float32 = parameter.requires_grad or "score.original_module" in name
        assert parameter.dtype == (torch.float32 if in_float32 else torch.bfloat16)


@pytest.mark.parametrize("flags", [[], ["--use_peft"]])
def test_a_reward_model_depends_on_its_seed_alone(flags, model_folder, tmp_path):
    data = write(tmp_path / "pairs.jsonl", pairs(tiny_tokenizer(), 8))
    found = []
    for run, seed in enumerate((3, 3, 4)):
        torch.rand(run)  # What ran before in this process.
        out = tmp_path / str(run)
        names = ["--model_name_or_path", str(model_folder), "--dataset_name", data, "--output_dir", str(out)]
        reward_model.train_reward_model([*names, *QUICK, *flags, "--num_train_epochs", "1", "--seed", str(seed)])
        (weights,) = out.glob("*.safetensors")
        found.append(weights.read_bytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("train", "flags"),
    [(sft.train_sft, []), (reward_model.train_reward_model, []), (reward_model.train_reward_model, ["--use_peft"])],
)
def test_training_does_not_start_from_an_adapter(train, flags, model_folder, tmp_path):
    adapter = save_policy(tmp_path / "sft", str(model_folder))
    tiny_tokenizer().save_pretrained(adapter)
    row = {"prompt": "w10 w11", "completion": "w12", "chosen": " w20", "rejected": " w30"}
    names = ["--dataset_name", write(tmp_path / "data.jsonl", [row] * 4), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"model_name_or_path '.*sft' is an adapter; .*merge_and_unlo"):
        train(["--model_name_or_path", adapter, *names, *QUICK, *flags, "--num_train_epochs", "1"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--lora_target_modules", "nosuch"],
            r"--lora_target_modules\) is \['nosuch'\], which PEFT cannot adapt on Llama",
        )
    ],
)
def test_a_reward_adapter_on_layers_that_are_not_there_is_refused(flags, message, model_folder, tmp_path):
    names = ["--dataset_name", write(tmp_path / "pairs.jsonl", pairs(tiny_tokenizer(), 4))]
    names += ["--output_dir", str(tmp_path / "out"), "--model_name_or_path", str(model_folder)]
    with pytest.raises(ValueError, match=message):
        reward_model.train_reward_model([*names, *QUICK, "--use_peft", *flags, "--num_train_epochs", "1"])
