"""The comparison with TRL, without TRL: what it is given, what is recorded of it, and the report."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from alpaca_ppo.config.ppo_config import PPOConfig
from examples.mini_farm import against_trl, plots, trl_ppo
from examples.mini_farm.against_trl import TRL_DEFAULTS, trl_optimizer_steps, trl_settings, without_counterpart
from examples.mini_farm.annotators import gold_score
from examples.mini_farm.plots import GOLD, KL, PROXY, gold_at
from examples.mini_farm.sampling import proxy_rewards
from examples.mini_farm.splits import prompt_of
from tests.examples.mini_farm_world import some_rows, write_language_model, write_reward_model

pytestmark = pytest.mark.proof


def options(**given):
    sizes = {"total_episodes": 6400, "rollout_batch_size": 128, "step_batch_size": 64, "ppo_epochs": 2}
    return PPOConfig(output_dir="none", **{**sizes, **given})


def some_metrics(golds, kls, **columns):
    rows = zip(golds, kls, strict=True)
    return [
        {"step": n, GOLD: gold, KL: kl, PROXY: float(n), against_trl.STEPS: 4, against_trl.SECONDS: 2.0, **columns}
        for n, (gold, kl) in enumerate(rows, 1)
    ]


def test_trl_makes_an_optimizer_step_where_this_package_does():
    # 50 rollouts, 2 passes, 2 mini-batches each.
    assert trl_optimizer_steps(trl_settings(options(), prompts=4000, seed=1)) == 50 * 2 * 2
    # 25 rollouts of 256, 3 passes, 8 mini-batches each.
    wide = options(rollout_batch_size=256, step_batch_size=32, ppo_epochs=3)
    assert trl_optimizer_steps(trl_settings(wide, prompts=4000, seed=1)) == 25 * 3 * 8


@pytest.mark.parametrize(
    "micro, added, parts, steps",
    # One rollout of 32, one pass. TRL 1.12: 4 micro-batches of 8 are added up, so one step for any number of
    # mini-batches up to 4; 8 mini-batches are 8 passes of 4 rows, of which 4 are added up.
    [(8, 4, 1, 1), (8, 4, 2, 1), (8, 4, 4, 1), (8, 4, 8, 2), (32, 1, 1, 1), (32, 1, 2, 2)],
)
def test_trls_steps_depend_on_its_accumulation(micro, added, parts, steps):
    settings = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": added, "num_mini_batches": parts}
    assert trl_optimizer_steps({**settings, "num_ppo_epochs": 1, "total_episodes": 32}) == steps


def test_trl_gets_the_settings_in_its_own_terms():
    given = options(
        penalty_reward_value=-2.0,
        warmup_steps=10,
        lr_scheduler_type="linear",
        cliprange_value=None,
        kl_coef=0.25,
        response_len=7,
    )
    settings = trl_settings(given, prompts=4000, seed=3)
    expected = {"missing_eos_penalty": 2.0, "kl_coef": 0.25, "response_length": 7, "seed": 3, "cliprange_value": 1e6}
    # 4 optimizer steps a rollout: 10 of them are in the first 3 rollouts.
    expected |= {"warmup_steps": 3, "num_mini_batches": 2, "per_device_train_batch_size": 128}
    assert {name: settings[name] for name in expected} == expected
    assert trl_settings(options(), prompts=4000, seed=3)["missing_eos_penalty"] is None


def test_trl_with_its_defaults_has_the_same_samples_steps_and_optimizer():
    given = options(penalty_reward_value=-2.0, cliprange_value=None, kl_coef=0.25, vf_coef=0.7, lam=0.8, adam_beta1=0.8)
    same, default = (trl_settings(given, prompts=4000, seed=3, defaults=chosen) for chosen in (False, True))
    assert {name for name in same if same[name] != default[name]} == {
        "missing_eos_penalty", "cliprange_value", "kl_coef", "vf_coef", "lam"
    }  # fmt: skip
    assert {name: default[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS and default["adam_beta1"] == 0.8


def test_what_trl_always_does_is_no_option_that_it_lacks():
    assert without_counterpart(options(kl_controller="fixed", critic_epochs=None)) == []
    assert without_counterpart(options()) == ["kl_controller: scaled", "critic_epochs: auto"]


@pytest.mark.parametrize(
    "given, prompts, message",
    [
        ({"total_episodes": 6500}, 4000, r"total_episodes \(6500\) must be a multiple of rollout_batch_size \(128\)"),
        ({"step_batch_size": 48}, 4000, r"that one of step_batch_size \(48\)"),
        ({}, 100, "100 prompts are fewer than rollout_batch_size"),
        ({"num_return_sequences": 4}, 4000, "num_return_sequences is 4; TRL's PPOTrainer samples one"),
    ],
)
def test_what_trl_could_not_be_given_is_refused(given, prompts, message):
    with pytest.raises(ValueError, match=message):
        trl_settings(options(**given), prompts=prompts, seed=1)


def test_gold_at_equal_kl_is_read_where_the_kl_is_first_reached(monkeypatch):
    metrics = some_metrics([1.0, 2.0, 4.0, 0.0], [0.0, 1.0, 3.0, 1.0])
    monkeypatch.setattr(plots, "smooth", lambda numbers: list(numbers))
    # A quarter of the way from 1 nat to 3: 2 + (4 - 2) / 4.
    assert [gold_at(metrics, kl) for kl in (0.0, 1.0, 1.5, 3.0, 3.1)] == [1.0, 2.0, 2.5, 4.0, None]
    monkeypatch.undo()
    # Means over the steps so far: KL 0, 0.5, 4/3, 5/4; gold 1, 1.5, 7/3, 7/4. 1 nat is 3/5 of the way to 4/3.
    assert gold_at(metrics, 1.0) == pytest.approx(1.5 + 0.6 * (7 / 3 - 1.5))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    policy = write_language_model(root / "policy")
    return policy, write_reward_model(root / "reward_model", policy)


def test_trl_gets_the_scores_that_this_package_gives_to_the_texts(models):
    policy, reward_model = models
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    rows, texts = some_rows()["val"][:3], ["The cat is in the barn.", "", "Rest."]
    ids = [
        tokenizer(prompt_of(row) + text)["input_ids"] + [tokenizer.eos_token_id]
        for row, text in zip(rows, texts, strict=True)
    ]
    ids[2].pop()  # cut off
    judge = trl_ppo.TextClassifier(model, tokenizer.eos_token_id)
    # As TRL reads a score: the head on the last states, at the last token.
    read = getattr(judge, judge.base_model_prefix)
    scores = [
        judge.score(read(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states[-1])[0, -1].item()
        for row in ids
    ]
    assert scores == pytest.approx(proxy_rewards(reward_model, rows, texts), abs=1e-5)


def test_what_trl_samples_is_recorded_under_this_packages_names(models, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(models[0], padding_side="left")
    rows = some_rows()["unlabeled"][:2]
    answers = [tokenizer(text)["input_ids"] for text in ("The cat is in the barn.", "Rest.")]
    longest = max(len(ids) for ids in answers)
    # The first one ends without an eos; what follows the second one's eos does not count.
    answers[0] += answers[0][:1] * (longest + 2 - len(answers[0]))
    answers[1] += [tokenizer.eos_token_id] + answers[0][: longest + 1 - len(answers[1])]
    queries = tokenizer([prompt_of(row) for row in rows], return_tensors="pt", padding=True)["input_ids"]
    sampled = torch.cat([queries, torch.tensor(answers)], dim=1)
    recorder = trl_ppo.Recorder(tmp_path / "metrics.jsonl", tokenizer, rows, eos_penalty=3.0)
    recorder.watch(lambda model, queries: (sampled, None))(None, queries)
    recorder.begin()
    recorder.count_step()
    recorder.write({"objective/kl": 1.5, "objective/scores": -1.0, "lr": 1e-3})
    (line,) = plots.read_metrics(tmp_path)
    texts = [tokenizer.decode(answers[0]), "Rest."]
    gold = [gold_score(text, row) for text, row in zip(texts, rows, strict=True)]
    expected = {"step": 1, KL: 1.5, GOLD: sum(gold) / 2, against_trl.STEPS: 1, "objective/truncated_fraction": 0.5}
    # TRL's mean has lost 3 for one of two answers.
    expected |= {PROXY: -1.0 + 1.5}
    # The eos belongs to the answer.
    expected |= {"objective/response_length": (len(answers[0]) + len(tokenizer("Rest.")["input_ids"]) + 1) / 2}
    assert {name: line[name] for name in expected} == pytest.approx(expected)
