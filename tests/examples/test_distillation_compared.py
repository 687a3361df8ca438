"""Distillation compared: teacher and students are what the page says, and the page shows the recorded runs."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from examples.defaults.records import recorded
from examples.distillation import compare, stages
from examples.distillation.run import BEFORE, LAYERS, ON_POLICY, RATES, SUPERVISED
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer

IDS = torch.tensor([[5, 9, 12, 7]])


@pytest.fixture
def model(tmp_path):
    """The folder of a model of four layers."""
    tiny_causal_lm("llama", num_hidden_layers=4).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_sharpened_model_has_the_distributions_of_its_own_at_the_lower_temperature(model, tmp_path):
    stages.write_sharpened(tmp_path / "teacher", model)
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


def test_the_cut_student_keeps_ten_layers_the_first_and_the_last_among_them():
    assert LAYERS == [0, 3, 6, 9, 12, 15, 18, 21, 24, 29]


def test_the_page_shows_the_recorded_runs():
    runs = recorded(compare.RECORD)
    assert compare.page(runs).partition("\n## ")[2] in compare.PAGE.read_text("utf-8")
    made = {(run["task"], run["row"], run["seed"]) for run in runs}
    ways = {(case, row, seed) for case in RATES for row in (ON_POLICY, SUPERVISED) for seed in compare.SEEDS}
    assert made == ways | {(case, BEFORE, 0) for case in RATES} and len(runs) == len(made)
