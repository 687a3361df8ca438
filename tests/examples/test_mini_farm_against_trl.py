"""The comparison with TRL, without TRL: what it is given, what is recorded of it, and the report."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from alpaca_ppo.config.ppo_config import PPOConfig
from examples.mini_farm import against_trl, overopt, plots, trl_ppo
from examples.mini_farm.against_trl import OWN, RIVALS, TRL_DEFAULTS, Run, trl_optimizer_steps, trl_settings
from examples.mini_farm.annotators import gold_score
from examples.mini_farm.evaluation import Summary
from examples.mini_farm.pipeline import LabArguments
from examples.mini_farm.plots import GOLD, KL, PROXY, gold_at, gold_within
from examples.mini_farm.sampling import proxy_rewards
from examples.mini_farm.splits import prompt_of
from tests.examples.mini_farm_world import some_rows, write_language_model, write_reward_model


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


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_must_differ(seeds):
    with pytest.raises(ValueError, match="seeds is "):
        against_trl.AgainstTrlArguments(seeds=seeds)


def test_the_preset_is_what_this_package_trains_with_and_trl_lacks_its_critics_own_options():
    args = against_trl.own_options(LabArguments(ppo_episodes=256))
    assert args.total_episodes == 256 and args.adam_epsilon == 1e-5
    assert against_trl.without_counterpart(args) == ["lam_critic: 1.0", "critic_learning_rate: 0.001"]
    recipe = options(lam_critic=1.0, kl_controller="proportional", learning_rate=1e-3, logging_steps=3)
    assert against_trl.without_counterpart(recipe) == ["lam_critic: 1.0", "kl_controller: proportional"]


def test_gold_at_equal_kl_is_read_where_the_kl_is_first_reached(monkeypatch):
    metrics = some_metrics([1.0, 2.0, 4.0, 0.0], [0.0, 1.0, 3.0, 1.0])
    monkeypatch.setattr(plots, "smooth", lambda numbers: list(numbers))
    # A quarter of the way from 1 nat to 3: 2 + (4 - 2) / 4.
    assert [gold_at(metrics, kl) for kl in (0.0, 1.0, 1.5, 3.0, 3.1)] == [1.0, 2.0, 2.5, 4.0, None]
    monkeypatch.undo()
    # Means over the steps so far: KL 0, 0.5, 4/3, 5/4; gold 1, 1.5, 7/3, 7/4. 1 nat is 3/5 of the way to 4/3.
    assert gold_at(metrics, 1.0) == pytest.approx(1.5 + 0.6 * (7 / 3 - 1.5))


def test_gold_within_a_kl_is_the_highest_where_the_kl_is_no_more(monkeypatch):
    metrics = some_metrics([1.0, 1.5, 1.2, 1.8, 2.0], [0.0, 1.0, 3.0, 1.0, 2.5])
    monkeypatch.setattr(plots, "smooth", lambda numbers: list(numbers))
    # 1.8 was found at 1 nat after the KL had come back from 3.
    assert [gold_within(metrics, kl) for kl in (0.5, 1.0, 2.0, 2.5, 9.0)] == [1.0, 1.8, 1.8, 2.0, 2.0]
    assert gold_within(some_metrics([1.3, 1.1], [0.4, 0.6]), 0.2) == 1.3


def test_a_run_has_over_optimised_if_gold_falls_while_proxy_rises():
    falling = some_metrics([2.0, 2.1] * 4 + [1.0, 1.1] * 4, [1.0] * 16)
    assert overopt.over_optimised(falling)
    assert not overopt.over_optimised([{**row, PROXY: 0.0} for row in falling])
    assert not overopt.over_optimised(falling[::-1]) and not overopt.over_optimised(falling[:7])


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


class SomeLab:
    """The laboratory's finished stages, and runs of which the numbers are known."""

    def __init__(self, arguments):
        self.arguments, self.root = arguments, against_trl.Path(arguments.root)
        self.data, self.sft, self.reward_model = (self.root / name for name in ("data", "sft", "reward_model"))
        for folder in (self.data, self.sft, self.reward_model):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "stage.json").write_text('{"fingerprint": "1"}')

    def ppo(self, name, *, seed):
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        lines = some_metrics([1.0 + 0.1 * n for n in range(10)], [0.5 * n for n in range(10)])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder


@pytest.fixture
def python(tmp_path):
    """A program in the place of TRL's Python: 50 rollouts with 4 optimizer steps each, and gold 1 everywhere."""
    lines = some_metrics([1.0] * 50, [0.2 * n for n in range(50)])
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncp {tmp_path}/lines "$(dirname "$3")/metrics.jsonl"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_a_finished_run_of_trl_is_kept_and_another_number_of_steps_is_an_error(tmp_path, python):
    lab = SomeLab(LabArguments(root=str(tmp_path / "lab")))
    folder = against_trl.trl_run(lab, python, options(), seed=1, defaults=False)
    run = json.loads((folder / "run.json").read_text())
    assert run["value_model"] == run["policy"] == str(lab.sft) and run["settings"]["seed"] == 1
    assert against_trl.trl_run(lab, python, options(), seed=1, defaults=False) == folder
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    from_reward = options(ppo_epochs=1, init_value_with_reward=True)
    with pytest.raises(RuntimeError, match="TRL made 200 optimizer steps instead of 100"):
        against_trl.trl_run(lab, python, from_reward, seed=1, defaults=False)
    assert json.loads((folder / "run.json").read_text())["value_model"] == str(lab.reward_model)


def some_summaries(lab, folders):
    def line(method, gold, kl):
        return Summary(method, 0.5, gold, 0.05, 0.75, 9.0, 12.0, kl)

    own = [name for name in folders if name.startswith(OWN)]
    golds = {name: 2.0 + 0.1 * i if name in own else 1.0 for i, name in enumerate(folders)}
    return [line("SFT", 1.0, 0.0), line("best-of-16", 1.9, 1.8), *(line(n, golds[n], 4.0) for n in folders)]


def test_the_report_and_the_figure_come_from_the_recorded_numbers(tmp_path, python, monkeypatch):
    monkeypatch.setattr(against_trl, "Lab", SomeLab)
    monkeypatch.setattr(against_trl, "summaries_of", some_summaries)
    monkeypatch.setattr(against_trl, "describe", lambda lab, summaries: "")
    monkeypatch.setattr(against_trl.trl_environment, "trl_python", lambda folder: python)
    figures, save = [], plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (figures.append(figure), save(figure, path)))
    report = tmp_path / "RESULTS.md"
    common = ["--report", str(report), "--root", str(tmp_path / "lab")]
    text = against_trl.main([*common, "--seeds", "1", "2"])
    # Gold scores 2.0 and 2.3 (the second seed is the fourth run) against 1.0 and 1.0: 1.15 apart, errors 0.15 and 0.
    assert "| gold score | 2.15 ± 0.21 | 1.00 ± 0.00 | +1.15 ± 0.15 |" in text
    assert "| gold score of the worst seed | 2.00 | 1.00 | +1.00 |" in text
    # 10 steps of 4 and of 2 s, 50 likewise.
    assert "| optimizer steps | 40 ± 0 | 200 ± 0 | -160 ± 0 |" in text
    assert "| seconds | 20 ± 0 | 100 ± 0 | -80 ± 0 |" in text
    # Over 5 steps, the KL is at most 3.5, and gold 1.2 + (KL - 1) / 5 from 1 nat on.
    assert "| gold score in training at 3 nats | 1.60 ± 0.00 | 1.00 ± 0.00 | +0.60 ± 0.00 |" in text
    # Gold rises with the KL, so the highest up to 3 nats is that at 3 nats.
    assert "| highest up to 3 nats | 1.60 ± 0.00 | 1.00 ± 0.00 | +0.60 ± 0.00 |" in text
    assert "at 4 nats" not in text and "up to 4 nats" not in text and "higher than TRL's: +0.60 ± 0.00" in text
    assert "| over-optimised runs | 0 of 2 | 0 of 2 | |" in text
    for name in RIVALS:
        assert f"### {name}\n" in text and f"| {name}, seed 2 | 1.00 ± 0.05 | 75.0 | 4.00 | 1.00, " in text
    assert "kl_coef 0.05 (0.12)" in text and "lam 0.95" not in text
    assert "## Against TRL" in report.read_text() and (tmp_path / "against_trl.png").is_file()
    frontier, over_time = figures[0].axes
    assert [line.get_linestyle() for line in over_time.lines] == ["-"] * 3 + ["--"] * 3 + [":"] * 3
    thick = [line for line in frontier.lines if line.get_linewidth() == 3]
    assert [line.get_label() for line in thick] == [f"{name}, highest up to a KL" for name in (OWN, *RIVALS)]
    assert max(thick[0].get_xdata()) <= 3.5 < max(thick[1].get_xdata())

    before = report.read_text()
    # The stand-in for TRL makes 50 rollouts.
    monkeypatch.setitem(against_trl.QUICK, "ppo_episodes", 6400)
    against_trl.main([*common, "--quick"])
    assert report.read_text() == before and (tmp_path / "lab_quick" / "trl_defaults_seed_2" / "stage.json").is_file()
    monkeypatch.setattr(against_trl.trl_environment, "trl_python", lambda folder: None)
    with pytest.raises(SystemExit):
        against_trl.main(common)


def test_one_seed_and_runs_that_never_meet_are_reported_as_such():
    def run(golds, kls):
        return Run(SimpleNamespace(gold=2.0, win_rate=0.8, kl=4.0, proxy=1.0), some_metrics(golds, kls))

    far, near = run([1.0, 1.5, 2.0], [0.0, 2.0, 4.0]), run([1.0] * 3, [0.0, 0.0, 0.5])
    assert "| gold score | 2.00 | 2.00 | +0.00 |" in against_trl.table([far], [far])
    assert against_trl.reading([far], [far]).endswith("+0.00 from TRL's; one seed has no standard error.")
    assert "at 1 nat | 1.25 (1 of 2) |" in against_trl.table([far, near], [far, far])
    assert "Not every run reached a KL of 1 nat" in against_trl.reading([far], [near])
    lower = run([1.0, 1.2, 1.3], [0.0, 2.0, 4.0])
    assert "lower than TRL's" in against_trl.reading([lower, lower], [far, far])
    assert "not clearly different" in against_trl.reading([far, lower], [far, far])
