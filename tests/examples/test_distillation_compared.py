"""Distillation compared: teacher and students are what the page says, and the page shows the recorded runs."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from examples.defaults.records import recorded
from examples.distillation import compare, stages
from examples.distillation.run import ON_POLICY, STUDENTS, SUPERVISED, WARM
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer

IDS = torch.tensor([[5, 9, 12, 7]])


@pytest.fixture
def model(tmp_path):
    """The folder of a model of four layers."""
    tiny_causal_lm("llama", num_hidden_layers=4).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_teacher_has_the_distributions_of_its_model_at_the_lower_temperature(model, tmp_path):
    stages.write_teacher(tmp_path / "teacher", model)
    teacher, own = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "teacher", model))
    with torch.no_grad():
        assert_close(teacher(IDS).logits, own(IDS).logits / stages.TEMPERATURE)


def test_a_student_has_the_chosen_layers_in_their_order(model, tmp_path):
    stages.write_student(tmp_path / "student", model, layers=[0, 3])
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "student", model))
    assert student.config.num_hidden_layers == 2
    teacher.model.layers = torch.nn.ModuleList([teacher.model.layers[number] for number in (0, 3)])
    with torch.no_grad():
        assert_close(student(IDS).logits, teacher(IDS, use_cache=False).logits)


def test_the_loss_is_that_of_the_completions_and_their_ends(model):
    tokenizer, policy = tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(model)
    rows = [{"prompt": "w10 w11", "completion": " w12"}, {"prompt": "w13", "completion": " w14 w15 w16"}]
    total, count = 0.0, 0
    for row in rows:
        prompt, completion = (tokenizer(row[name])["input_ids"] for name in row)
        ids = torch.tensor([[*prompt, *completion, tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        learned = len(completion) + 1
        with torch.no_grad():
            total, count = total + learned * policy(ids, labels=labels).loss.item(), count + learned
    assert stages.loss_on(rows, model) == pytest.approx(total / count, rel=1e-5)


def test_students_keep_the_first_and_the_last_layer():
    assert {name: len(layers) for name, layers in STUDENTS.items()} == {
        "two of three layers": 21, "every third layer": 10
    }  # fmt: skip
    for layers in STUDENTS.values():
        assert (layers[0], layers[-1]) == (0, 29) and list(layers) == sorted(set(layers))


def test_the_page_shows_the_recorded_runs():
    runs = recorded(compare.RECORD)
    assert compare.page(runs).partition("\n## ")[2] in compare.PAGE.read_text("utf-8")
    asked = {(student, row): {run["seed"] for run in runs if (run["task"], run["row"]) == (student, row)}
             for student in STUDENTS for row in (WARM, ON_POLICY, SUPERVISED)}  # fmt: skip
    assert all(seeds == ({0} if row == WARM else {*compare.SEEDS}) for (_, row), seeds in asked.items())
