"""The laboratory's base model, sampled answers, preference pairs and the table's numbers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alpaca_ppo.generation import generate
from examples.mini_farm import evaluation, sampling
from examples.mini_farm.annotators import gold_score
from examples.mini_farm.evaluation import answer_rows, best_of_n_kl, summarize
from examples.mini_farm.sampling import Answer, proxy_rewards, sample_answers
from examples.mini_farm.splits import prompt_of, read_rows
from tests.examples.mini_farm_world import some_rows, write_language_model, write_reward_model

pytestmark = pytest.mark.proof

ROWS = some_rows()["val"][:8]
TASK = {"instruction": "Where is the duck?", "input": "", "asks": ["duck", "kitchen"], "avoids": ["barn"]}
GOOD, BAD = "The duck is in the kitchen.", "I do not know."


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two language models with one tokenizer, and of a reward model."""
    root = tmp_path_factory.mktemp("models")
    policy, reference = (write_language_model(root / name, seed=seed) for name, seed in (("policy", 1), ("other", 2)))
    return policy, reference, write_reward_model(root / "reward", policy)


def test_every_row_gets_its_samples_and_the_batch_does_not_matter(models):
    policy, _, _ = models
    together = sample_answers(policy, ROWS, samples=3, seed=5)
    assert [len(group) for group in together] == [3] * len(ROWS)
    # The random numbers of a row depend on its index in the list, so the first rows give the same answers.
    assert sample_answers(policy, ROWS[:3], samples=3, seed=5) == together[:3]
    assert sample_answers(policy, ROWS[:3], samples=3, seed=6) != together[:3]


def test_the_kl_to_another_model_is_the_log_ratio_of_the_whole_answer(models, monkeypatch):
    policy, reference, _ = models
    seen = []

    def record(model, prompts, params):
        seen.append((prompts, generate(model, prompts, params)))
        return seen[-1][1]

    monkeypatch.setattr(sampling, "generate", record)
    answers = sample_answers(policy, ROWS, samples=2, seed=0, reference_folder=reference)
    prompts, sampled = seen[0]
    queries, masks = prompts["queries"], prompts["query_attn_masks"].bool()
    for i in range(4):
        prompt = queries[i // 2][masks[i // 2]]
        response = sampled.responses[i][sampled.response_mask[i]]
        ratio = log_probability(policy, prompt, response) - log_probability(reference, prompt, response)
        assert abs(ratio) > 1e-3
        assert answers[int(prompts["prompt_ids"][i // 2])][i % 2].kl == pytest.approx(ratio, abs=1e-3)


def log_probability(folder, prompt, response):
    """The log-probability of `response` after `prompt`, from a plain forward pass of the model in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, response[:, None]).sum().item()


def test_proxy_rewards_are_the_reward_models_scores_of_prompt_and_answer(models):
    reward = models[2]
    tokenizer = AutoTokenizer.from_pretrained(reward)
    model = AutoModelForSequenceClassification.from_pretrained(reward)
    texts = [GOOD, BAD, "", GOOD + " " + BAD]
    for row, text, score in zip(ROWS, texts, proxy_rewards(reward, ROWS[:4], texts), strict=False):
        ids = torch.tensor([tokenizer(prompt_of(row) + text)["input_ids"]])
        with torch.no_grad():
            assert score == pytest.approx(model(ids).logits.item(), abs=1e-5)


def test_the_bound_on_the_kl_of_best_of_n():
    assert best_of_n_kl(1) == 0.0
    # log 16 - 15/16 = 2.7726 - 0.9375
    assert best_of_n_kl(16) == pytest.approx(1.8351, abs=1e-4)


def test_best_of_n_keeps_the_sample_of_highest_proxy_and_sft_the_first(tmp_path, monkeypatch):
    groups = [[Answer(text, 0.0) for text in group] for group in (("a", "bbb", "cc"), ("dddd", "e", "ff"))]
    monkeypatch.setattr(evaluation, "sample_answers", lambda *args, **settings: groups)
    monkeypatch.setattr(evaluation, "proxy_rewards", lambda folder, rows, texts: [float(len(text)) for text in texts])
    evaluation.evaluate_sft(tmp_path, None, None, [TASK, TASK], best_of=3, seed=0)
    first, best = (read_rows(tmp_path / f"{name}.jsonl") for name in ("sft", "best_of_n"))
    assert [(row["answer"], row["proxy"], row["kl"]) for row in first] == [("a", 1.0, 0.0), ("dddd", 4.0, 0.0)]
    assert [(row["answer"], row["proxy"]) for row in best] == [("bbb", 3.0), ("dddd", 4.0)]
    assert {row["kl"] for row in best} == {best_of_n_kl(3)}


def test_a_summary_by_hand():
    tasks = [TASK] * 3
    sft = answer_rows(tasks, [Answer(BAD, 0.0), Answer(GOOD, 0.0), Answer(BAD, 0.0)], [0.0, 1.0, 2.0])
    ppo = answer_rows(tasks, [Answer(GOOD, 1.0), Answer(GOOD, 2.0), Answer(BAD, 6.0)], [1.0, 2.0, 6.0])
    line = summarize("PPO", ppo, sft, tasks)
    good, bad = gold_score(GOOD, TASK), gold_score(BAD, TASK)
    assert (line.method, line.proxy, line.kl) == ("PPO", 3.0, 3.0)
    assert line.gold == pytest.approx((2 * good + bad) / 3)
    # One win with all votes, and two ties.
    assert line.win_rate == pytest.approx((1 + 0.5 + 0.5) / 3)
    # Gains g, 0, 0: mean g/3, variance g^2 (4/9 + 1/9 + 1/9) / 2 = g^2/3, standard error g/3.
    assert line.gain_errors == pytest.approx(1.0)
    assert line.words == pytest.approx((6 + 6 + 4) / 3)
    assert summarize("SFT", sft, sft, tasks).win_rate == 0.5
    assert summarize("SFT", sft, sft, tasks).gain_errors == 0.0
