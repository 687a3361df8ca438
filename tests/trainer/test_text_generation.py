"""`trainer.generate`, the length of a run in steps, callbacks, and what the start of a run says or refuses."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from alpaca_ppo.distributed.random_states import random_states
from alpaca_ppo.ppo.rollouts import RolloutCollector
from tests.data.tokenizers import CHATML, turn_tokenizer
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts, tiny_trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return tiny_trainer(tmp_path_factory.mktemp("run"))


def test_generate_returns_the_texts_that_transformers_generates(trainer):
    texts = ["w10 w20 w30", "w40"]
    found = trainer.generate(texts, do_sample=False, max_new_tokens=6)
    model, tokenizer = tiny_causal_lm("llama"), tiny_tokenizer()
    for text, (answer,) in zip(texts, found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=6, do_sample=False)[0]
        assert answer == tokenizer.decode(whole[ids.size(1) :], skip_special_tokens=True)
    assert trainer.generate(texts[0], do_sample=False, max_new_tokens=6) == found[:1]


def test_generate_draws_from_its_own_seed_only(trainer):
    def drawn(**options):
        return trainer.generate(["w10 w20", "w40"], num_return_sequences=3, max_new_tokens=8, **options)

    before, rollout = random_states(), trainer.rollout(trainer.prompt_batches(0))
    first = drawn()
    assert [len(answers) for answers in first] == [3, 3] and len(set(first[0])) > 1
    assert drawn() == first != drawn(seed=1)
    # One token is left to choose from, so sampling is greedy.
    assert drawn(top_k=1)[0] == trainer.generate("w10 w20", do_sample=False, max_new_tokens=8)[0] * 3
    again = trainer.rollout(trainer.prompt_batches(0))
    assert torch.equal(again["responses"], rollout["responses"])
    assert str(random_states()) == str(before)
    assert trainer.state.global_step == 0


def test_what_generate_cannot_answer_is_refused(trainer):
    for given in ([], None, {"role": "user", "content": "w10"}, ["w10", [{"role": "user", "content": "w10"}]]):
        with pytest.raises(ValueError, match="give one or more texts, or lists of messages"):
            trainer.generate(given)
    with pytest.raises(ValueError, match=r"the prompt \(1\) \+ max_new_tokens \(512\) is more than .* \(512\)"):
        trainer.generate("w10", max_new_tokens=512)
    with pytest.raises(ValueError, match="no chat_template"):
        trainer.generate([{"role": "user", "content": "w10"}])


@pytest.fixture
def read(monkeypatch):
    """The token ids of the prompts that a trainer samples answers to, of each call."""
    calls, sample = [], RolloutCollector.sample

    def recorded(self, prompts, params):
        calls.append(prompts["queries"].tolist())
        return sample(self, prompts, params)

    monkeypatch.setattr(RolloutCollector, "sample", recorded)
    return calls


@pytest.mark.parametrize("system_prompt", [None, "w20"])
def test_generate_writes_a_text_as_a_run_of_messages_does(tmp_path, read, system_prompt):
    tokenizer = turn_tokenizer(CHATML + "{% if brief %}w30{% endif %}", special=["<|im_start|>", "<|im_end|>"])
    chat = [{"role": "user", "content": "w10"}]
    made = tiny_trainer(
        tmp_path,
        trainer_arguments={"processing_class": tokenizer, "train_dataset": Dataset.from_list([{"prompt": chat}] * 40)},
        chat_template_kwargs={"brief": True},
        system_prompt=system_prompt,
        query_len=12,
    )
    answers = [made.generate(given, max_new_tokens=6) for given in ("w10", ["w10"], chat, [chat])]
    first = "<|im_start|>system\nw20<|im_end|>\n" if system_prompt else ""
    text = f"{first}<|im_start|>user\nw10<|im_end|>\n<|im_start|>assistant\nw30"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert read == [[ids]] * 4
    assert answers == answers[:1] * 4
    assert made.generate([chat, chat], max_new_tokens=6)[0] == answers[0][0]
    # A system message of its own replaces the run's.
    made.generate([{"role": "system", "content": "w40"}, *chat], max_new_tokens=6)
    assert "w40" in tokenizer.decode(read[-1][0]) and "w20" not in tokenizer.decode(read[-1][0])


def test_generate_sends_a_text_as_it_is_in_a_run_of_texts(tmp_path, read):
    made = tiny_trainer(tmp_path, prompt_template="w20 {prompt} w30", query_len=6)
    made.generate("w10 {w11}", max_new_tokens=2)
    assert read == [[tiny_tokenizer()("w10 {w11}")["input_ids"]]]


def test_training_never_samples_from_a_part_of_the_softmax(trainer):
    whole = trainer.sampling_params
    for change in ({"top_k": 5}, {"top_p": 0.9}):
        trainer.sampling_params = replace(whole, **change)
        try:
            with pytest.raises(ValueError, match="leave both None"):
                trainer.rollout(trainer.prompt_batches(0))
        finally:
            trainer.sampling_params = whole


class Counting(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


class Removed(Counting):
    pass


def test_a_run_has_max_steps_and_its_callbacks_can_be_added_and_removed(tmp_path):
    trainer = tiny_trainer(tmp_path, total_episodes=None, max_steps=3, rollout_batch_size=16, step_batch_size=16)
    kept, removed, first = Counting(), Removed(), Removed()
    trainer.add_callback(kept)
    trainer.add_callback(first)
    trainer.add_callback(removed)
    trainer.add_callback(Counting)
    assert trainer.pop_callback(Removed) is first and trainer.pop_callback(first) is None
    trainer.remove_callback(removed)
    trainer.remove_callback(removed)
    trainer.train()
    # 40 prompts are steps of 16, 16 and 8.
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2, 3]
    assert trainer.state.epoch == 1.0
    assert (kept.steps, first.steps, removed.steps) == (3, 0, 0)
    assert [type(callback) for callback in trainer.callback_handler.callbacks] == [Counting, Counting]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "text without the tokenizer's chat template (user_template makes messages), of prompt_column 'prompt'"),
        (
            {"prompt_template": "{prompt}\n"},
            "text without the tokenizer's chat template (user_template makes messages)",
        ),
        ({"user_template": "{prompt}"}, "messages, of user_template '{prompt}'; the first: '<|im_start|>"),
    ],
)
def test_the_start_of_a_run_says_once_what_its_prompts_are(tmp_path, capsys, options, said):
    given = {
        "processing_class": turn_tokenizer(CHATML, special=["<|im_start|>", "<|im_end|>"]),
        "train_dataset": prompts(),
        "eval_dataset": prompts(2),
    }
    tiny_trainer(tmp_path, trainer_arguments=given, **{"query_len": 12, **options})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prompts are")]
    assert line.startswith(f"prompts are {said}")


def test_evaluations_without_an_eval_set_are_refused(tmp_path):
    with pytest.raises(ValueError, match="eval_steps is 5, without effect: needs eval set"):
        tiny_trainer(tmp_path, eval_steps=5)
