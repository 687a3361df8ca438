"""What the policy's card says of a run: base model, data, reward, recipe, figures from start to end."""

import json
import re
from dataclasses import asdict

import yaml

from alpaca_ppo import PPOConfig
from alpaca_ppo.checkpoint.model_card import TrainedRun, write_model_card
from alpaca_ppo.report.page import report_data
from alpaca_ppo.report.runs import read_run
from alpaca_ppo.tracking.console import change_lines
from alpaca_ppo.tracking.results import WeightsStep, means_in_words, start_and_end

STEP = WeightsStep(4, 4)
RECORDS = [
    {"step": 0, "eval/scores": -1.0},
    {"step": 1, "objective/scores": -0.5, "objective/kl_sum_seq": 0.0, "objective/response_length": 11.0},
    {"step": 2, "objective/scores": None, "objective/kl_sum_seq": 1.0},
    {"step": 3, "objective/scores": 0.5, "objective/kl_sum_seq": 2.0, "objective/response_length": 17.5},
    {"step": 4, "eval/scores": 1.0},
]


def test_the_card_tells_what_was_trained_how_and_with_which_result(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    # The last line is what a killed run has left.
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + '{"step": 5, "ev')
    (run / "run.yaml").write_text(yaml.safe_dump({"dataset_name": "/data/secret/questions.jsonl"}))
    config = asdict(
        PPOConfig(
            output_dir=str(run), reward_weights=[1.0, 0.5], learning_rate=3e-4, kl_coef=0.12, critic_layout="cached"
        )
    )
    # As in metrics.jsonl, by name. The sources are in another order.
    metrics = {"objective/scores/brevity": 0.1, "objective/scores/grade": 0.5}
    sources = {"grade": 1.0, "brevity": 0.5}
    write_model_card(tmp_path, TrainedRun(run, STEP, metrics, config, sources), base_model="/models/mine/sft")
    text = (tmp_path / "README.md").read_text()
    assert "- **Base model**: `sft`\n- **Data**: `questions.jsonl`\n" in text
    assert "- **Reward**: `grade` (weight 1), `brevity` (weight 0.5)\n" in text
    assert (
        "- **Recipe**: `gae` advantages, the `clip` loss, a scalar critic (cached), a scaled KL penalty of 0.12 in "
        f"the reward; {config['rollout_batch_size']} prompts with 1 response(s) a step, learning rate 0.0003, 4 steps\n"
    ) in text
    assert "| Reward on held-out prompts | -1 | 1 |\n| Reward on training prompts | -0.5 | 0.5 |\n" in text
    assert "| Response length, tokens | 11 | 17.5 |" in text
    assert text.index("## Key figures") < text.index("## Use") < text.index("## Metrics")
    assert "secret" not in text and "/models" not in text
    # The figures of an earlier checkpoint end with it.
    best = WeightsStep(3, 4, "eval/scores", 0.5)
    write_model_card(tmp_path, TrainedRun(run, best, metrics, config), base_model=None)
    text = (tmp_path / "README.md").read_text()
    assert "; the weights are those of step 3 of 4, the best evaluation by eval/scores (0.5)." in text
    # They were evaluated once up to then, before training.
    assert "| Reward on held-out prompts | -1 | |" in text


def test_weights_that_are_worse_than_before_training_are_called_so(tmp_path):
    evaluated = [{"step": 0, "eval/scores": 0.484}, {"step": 10, "eval/scores": 0.3554}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evaluated))

    def card(value, greater_is_better=True):
        config, step = {"greater_is_better": greater_is_better}, WeightsStep(10, 25, "eval/scores", value)
        write_model_card(tmp_path, TrainedRun(tmp_path, step, {}, config), base_model=None)
        return (tmp_path / "README.md").read_text()

    worse = "\n\n**These weights are worse than those before training**: `eval/scores` was 0.484, and is 0.3554.\n\n"
    assert worse in card(0.3554)
    assert "**These" not in card(0.3554, greater_is_better=False)
    assert "**These" not in card(0.484) and "**These" not in card(0.5)


def test_console_report_and_card_agree_on_both_ends_of_a_run(tmp_path):
    # 30 steps whose reward is their number: (1 + 2 + 3) / 3 = 2 and (28 + 29 + 30) / 3 = 29.
    history = [{"step": 0, "eval/scores": 0.5, "eval/rewards": 0.5}]
    for step in range(1, 31):
        history.append({"step": step, "objective/rewards": float(step), "objective/scores": float(step)})
        history[-1] |= {"ppo/policy/entropy": 2.0 * step} | ({"objective/entropies": 7.0} if step == 1 else {})
    history[-1] |= {"eval/scores": 0.25, "eval/rewards": 0.25}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))
    ends = [re.search(r"([\d.]+) -> +([\d.]+)", line).groups() for line in change_lines(history)]
    assert ends[0] == ("2.000", "29.000") and ends[-1] == ("0.500", "0.250")
    write_model_card(tmp_path, TrainedRun(tmp_path, WeightsStep(30, 30), {}, {}), base_model=None)
    card = (tmp_path / "README.md").read_text()
    assert "| Reward on held-out prompts | 0.5 | 0.25 |\n| Reward on training prompts | 2 | 29 |\n" in card
    # The entropy that was measured in every step: 2 * 2 and 2 * 29.
    means = "means of the first and the last 3 steps, before the last update"
    assert "describe the rollouts, sampled before the last update" in card
    assert f"| Entropy, nats per token | 4 | 58 |\n\n{means.capitalize()}; on held-out prompts, " in card
    run = report_data([read_run(tmp_path, "run")], token_mb=1)["runs"][0]
    assert (run["ends"]["objective/scores"], run["ends"]["eval/scores"]) == ([2.0, 29.0, 30], [0.5, 0.25, 2])
    assert run["ends_are"] == means_in_words(history) == means
    # Of few steps no means are taken; an evaluation alone has no update.
    assert means_in_words(history[:9]) == "the first and the last step, before the last update"
    assert means_in_words(history[:1]) == ""
    # The report's rule is that of the whole history, however few points its curves have.
    assert start_and_end(history, "nothing") is None


def test_weights_that_are_all_one_are_not_named_and_a_card_without_a_run_says_so(tmp_path):
    write_model_card(tmp_path, TrainedRun(tmp_path, STEP, {}, {}, {"z": 1.0, "a": 1.0}), base_model=None)
    text = (tmp_path / "README.md").read_text()
    assert "- **Reward**: `z`, `a`\n" in text and "No metrics were logged." in text
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
