"""The report without a browser: what is read, chosen, left out, and written."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from alpaca_ppo import LoraArguments, PPOConfig
from alpaca_ppo.cli.finished_runs import report
from alpaca_ppo.report import page
from alpaca_ppo.report.page import choose_answers, report_data, report_page, spread_order
from alpaca_ppo.report.runs import read_run, read_runs
from tests.report.made_runs import (
    HALF_PAIR,
    HOSTILE,
    answer,
    conversation,
    make_run,
    make_whole_run,
    make_worse_run,
    write_lines,
)

REPORT_PAGE = Path(__file__).parents[2] / "docs/report.md"


class Scripts(HTMLParser):
    """The content of each script of a page, as a browser would delimit it, by its id."""

    def __init__(self):
        super().__init__()
        self.found, self._id = {}, None

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self._id = dict(attrs).get("id", "code")
            self.found[self._id] = ""

    def handle_endtag(self, tag):
        if tag == "script":
            self._id = None

    def handle_data(self, data):
        if self._id is not None:
            self.found[self._id] += data


def scripts_of(text):
    parser = Scripts()
    parser.feed(text)
    return parser.found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_whole_run(tmp_path_factory.mktemp("runs") / "whole")


def test_a_run_is_read_whole(whole):
    run = read_run(whole, "whole")
    assert [line["objective/scores"] for line in run.metrics] == [2.0, 3.0, 4.0, 5.0]
    assert run.metrics[1]["ppo/policy/grad_norm"] is None and run.last_step == 4
    assert [(file.table, file.step) for file in run.tables] == [
        ("eval", 0), ("eval", 2), ("eval", 4), ("rollouts", 1), ("rollouts", 2), ("rollouts", 3), ("rollouts", 4),
    ]  # fmt: skip
    assert [finding.severity for finding in run.findings] == ["error", "warning"]


def test_the_report_says_which_step_the_final_models_are_of_and_what_was_before(tmp_path):
    runs = read_runs([make_worse_run(tmp_path / "worse"), make_run(tmp_path / "none")])
    worse = report_data(runs, token_mb=1)["runs"]
    assert worse[0]["weights"] == {
        "text": "step 2 of 20, the best evaluation by eval/scores (3)",
        "best": 2,
        "before": "worse than before training, when eval/scores was 5",
    }
    assert worse[1]["weights"] is None
    (tmp_path / "none/final").mkdir()
    (tmp_path / "none/final/step.json").write_text('{"step": 4, "trained_steps": 4, "metric": null, "value": null}')
    (last,) = report_data(read_runs([tmp_path / "none"]), token_mb=1)["runs"]
    assert last["weights"] == {"text": "step 4 of 4", "best": None, "before": None}


def test_runs_are_named_by_as_much_of_their_path_as_differs_and_given_once(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a/ppo", "b/ppo", "b/grpo")]
    assert [run.name for run in read_runs(runs[1:])] == ["ppo", "grpo"]
    assert [run.name for run in read_runs(runs)] == ["a/ppo", "b/ppo", "b/grpo"]
    with pytest.raises(ValueError, match="a run is given twice.*grpo"):
        read_runs([runs[2], tmp_path / "a/../b/grpo"])


def test_the_page_knows_the_default_of_each_option(tmp_path):
    data = report_data(read_runs([make_run(tmp_path / "run")]), token_mb=1)
    assert data["defaults"]["lora_r"] == LoraArguments().lora_r and data["defaults"]["seed"] == PPOConfig().seed
    assert data["defaults"]["report_to"] == list(PPOConfig().report_to)
    json.dumps(data["defaults"], allow_nan=False)


def test_runs_that_differ_by_seed_and_folder_are_one_group(tmp_path):
    runs = [make_run(tmp_path / f"seed_{seed}", seed=seed) for seed in (1, 2)]
    runs.append(make_run(tmp_path / "other", seed=1, gamma=0.9))
    data = report_data(read_runs(runs), token_mb=1)
    assert [run["group"] for run in data["runs"]] == [0, 0, 1]


def test_an_order_spread_over_a_range_begins_with_its_ends_and_its_middle():
    assert spread_order(0) == [] and spread_order(1) == [0] and spread_order(2) == [0, 1]
    # The ends, the half of 8, its quarters, its eighths.
    assert spread_order(9) == [0, 8, 4, 2, 6, 1, 5, 3, 7]
    for count in (3, 10, 100, 1001):
        assert sorted(spread_order(count)) == list(range(count))


def test_answers_are_laid_out_by_column(whole):
    chosen = choose_answers([read_run(whole, "whole")], token_mb=1)
    columns = chosen.columns
    assert {len(column) for column in columns.values()} == {16} and chosen.left_out == []
    first = columns["response"].index("the answer of step 1")
    assert columns["scores"][first] == {"gold": 2.0, "model": None}
    # Five tokens of -0.25 nats each: the row itself has no KL.
    assert columns["kl"][first] == -1.25
    assert chosen.prompts[columns["prompt"][first]] == "Question 7?"
    tokens = json.loads(chosen.tokens[first])
    assert tokens["texts"] == ["the", " answer", " of", " step", " 1"] and tokens["ids"] == [100, 101, 102, 103, 104]
    assert tokens["numbers"]["advantages"] == [-1.5, -0.5, 0.5, 1.5, 2.5]
    assert tokens["numbers"]["ratio"] == [1.0625] * 5 and tokens["numbers"]["entropies"] == [0.75] * 5
    last = columns["response"].index("after training")
    assert columns["more"][last] == {"answer": "forty-two"} and columns["kl"][last] == 2.0
    talk = json.loads(chosen.tokens[columns["score"].index(9.0)])
    assert talk["environment"] == [0, 0, 1, 0] and talk["numbers"]["values"] == [0.0, 0.125, None, 0.25]


def test_a_row_of_several_turns_needs_the_keys_that_the_documentation_names(tmp_path):
    run = make_run(tmp_path / "run")
    write_lines(run / "rollouts/step_000001.jsonl", [conversation()])
    chosen = choose_answers([read_run(run, "run")], token_mb=1)
    assert chosen.columns["turns"] == [
        [
            {"role": "policy", "text": "call"},
            {"role": "tool", "text": " 42"},
            {"role": "environment", "text": " sure?"},
            {"role": "policy", "text": " so 42"},
        ]
    ]
    tokens = json.loads(chosen.tokens[0])
    assert tokens["environment"] == [0, 1, 1, 0, 0] and tokens["ids"] == [100, 5, 6, 101, 102]
    assert tokens["numbers"]["advantages"] == [-1.5, None, None, -0.5, 0.5]
    # The KL of the three tokens that the policy chose, and their number.
    assert chosen.columns["kl"] == [-0.75] and chosen.columns["length"] == [3.0]
    documented = set(re.findall(r"`(\w+)`", REPORT_PAGE.read_text().split("## The tables it reads")[1]))
    assert {*conversation(), "role", "text", "id", "environment"} <= documented


def test_tokens_stay_within_their_budget_and_the_rest_is_said(tmp_path):
    run = make_run(tmp_path / "run")
    for step in range(1, 41):
        rows = [answer(i, "word " * 20 + str(step), score=float(step * 10 + i)) for i in range(10)]
        write_lines(run / f"rollouts/step_{step:06d}.jsonl", rows)
    write_lines(run / "eval/step_000004.jsonl", [answer(0, "followed", score=200.5)])
    runs = [read_run(run, "run")]
    whole = choose_answers(runs, token_mb=20)
    assert len(whole.tokens) == len(whole.columns["step"]) == 401 and not whole.left_out
    size = sum(map(len, whole.tokens.values())) / 1e6
    part = choose_answers(runs, token_mb=size / 4)
    assert size / 4 - 0.01 < sum(map(len, part.tokens.values())) / 1e6 <= size / 4
    assert len(part.columns["step"]) == 401
    assert re.match(rf"The tokens of {len(part.tokens)} of 401 answers are in this file", part.left_out[0])
    # Followed prompts first, then the best and the worst, then all over the steps.
    kept = {part.columns["score"][i] for i in part.tokens}
    assert {200.5, 10.0, 409.0} <= kept
    few = choose_answers(runs, token_mb=size / 80)
    assert 0 < len(few.tokens) < 16 and 0 in few.tokens and few.columns["table"][0] == "eval"
    steps = sorted({part.columns["step"][i] for i in part.tokens})
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 2
    assert choose_answers(runs, token_mb=0).tokens == {}


def test_the_best_and_then_the_worst_answers_get_their_tokens_first(tmp_path):
    run = make_run(tmp_path / "run")
    write_lines(run / "rollouts/step_000001.jsonl", [answer(i, "same words", score=float(i)) for i in range(40)])
    runs = [read_run(run, "run")]
    size = len(choose_answers(runs, token_mb=20).tokens[0])
    # Room for ten: the eight best, of the worst ones the worst two.
    kept = choose_answers(runs, token_mb=10.5 * size / 1e6).tokens
    assert list(kept) == [39, 38, 37, 36, 35, 34, 33, 32, 0, 1]


def test_tokens_are_kept_of_followed_prompts_first_then_of_the_most_kl_and_of_what_was_cut_off(tmp_path):
    run = make_run(tmp_path / "run")
    rows = [answer(i, "same words", score=float(i), kl=-abs(i - 15.25), stopped=i != 25) for i in range(40)]
    write_lines(run / "rollouts/step_000001.jsonl", rows)
    write_lines(run / "eval/step_000001.jsonl", [answer(i, "same words", score=20.0, kl=-99.0) for i in range(2)])
    kept = choose_answers([read_run(run, "run")], token_mb=20)
    order = [(kept.columns["table"][i], kept.columns["prompt_id"][i]) for i in kept.tokens]
    best_and_worst, most_kl = [*range(39, 31, -1), *range(8)], [15, 16, 14, 17, 13, 18, 12, 19]
    assert order[:2] == [("eval", 0), ("eval", 1)]
    assert order[2:27] == [("rollouts", i) for i in [*best_and_worst, *most_kl, 25]]


def test_tables_larger_than_what_is_read_are_thinned_by_steps(tmp_path):
    run = make_run(tmp_path / "run")
    # Forty files of half a megabyte; 8 MB are read for a budget of 1 MB, so sixteen of them.
    for step in range(1, 41):
        write_lines(run / f"rollouts/step_{step:06d}.jsonl", [{"prompt": "p", "response": "x" * 500_000, "score": 1}])
    chosen = choose_answers([read_run(run, "run")], token_mb=1)
    steps = sorted(chosen.columns["step"])
    assert steps[0] == 1 and steps[-1] == 40 and len(steps) == 15
    assert chosen.left_out[0].startswith("Answers of 15 of 40 tables are shown, spread over the steps")


def test_more_answers_than_a_page_shows_are_thinned_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MAX_ANSWERS", 50)
    run = make_run(tmp_path / "run")
    write_lines(run / "eval/step_000004.jsonl", [answer(i, f"answer {i}") for i in range(101)])
    chosen = choose_answers([read_run(run, "run")], token_mb=1)
    ids = chosen.columns["prompt_id"]
    assert len(ids) == 50 and ids[0] == 0 and ids[-1] == 100
    assert chosen.left_out == ["The tables show 50 of 101 answers, spread over runs and steps."]


def test_long_curves_are_means_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MAX_POINTS", 2)
    data = report_data([read_run(make_run(tmp_path / "run"), "run")], token_mb=1)
    (run,) = data["runs"]
    # Steps 1 and 2, 3 and 4: rewards 2, 3 and 4, 5; the gradient norm of step 2 is null.
    assert run["steps"] == [2, 4] and run["metrics"]["objective/scores"] == [2.5, 4.5]
    assert run["metrics"]["ppo/policy/grad_norm"] == [1.0, 1.0]
    assert data["left_out"] == ["Curves of run: every point is the mean of 2 steps."]


def test_hostile_texts_stay_data(whole):
    text = report_page(report_data(read_runs([whole]), token_mb=1))
    found = scripts_of(text)
    assert set(found) == {"data", "tokens", "code"}
    data, tokens = json.loads(found["data"]), json.loads(found["tokens"])
    i = data["answers"]["response"].index(HOSTILE)
    assert data["prompts"][data["answers"]["prompt"][i]] == HOSTILE and data["answers"]["more"][i] == {
        "source": HOSTILE
    }
    assert tokens[str(i)]["texts"] == [HOSTILE, "?"], "half a surrogate pair has no encoding"
    assert HALF_PAIR not in text and text.count("<script") == 3


def test_a_name_of_a_folder_is_no_html(tmp_path):
    run = make_run(tmp_path / "<b>&run")
    assert "<title>Report: &lt;b&gt;&amp;run</title>" in report_page(report_data(read_runs([run]), token_mb=1))


def test_the_page_needs_no_network(tmp_path):
    text = report_page(report_data(read_runs([make_run(tmp_path / "run")]), token_mb=1))
    code = scripts_of(text)["code"]
    assert "default-src 'none'" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|<link[^>]+stylesheet|\ssrc=", text)
    assert "innerHTML" not in code and "eval(" not in code


def test_numbers_and_dates_that_json_lacks_become_text(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "run.yaml").write_text("started: 2026-01-02\nbound: .inf\nlist: [.nan, 1]\n")
    data = report_data(read_runs([run]), token_mb=1)
    assert data["runs"][0]["config"] == {"started": "2026-01-02", "bound": "inf", "list": ["nan", 1]}
    json.dumps(data["runs"], allow_nan=False)


def test_the_command_writes_one_file_or_checks(whole, tmp_path, capsys, monkeypatch):
    assert report([str(whole)]) == 0
    assert (whole / "report.html").stat().st_size > 30_000
    assert f"{whole / 'report.html'}" in capsys.readouterr().out
    healthy = make_run(tmp_path / "healthy")
    monkeypatch.chdir(tmp_path)
    assert report([str(whole), str(healthy), "--output", "both/page.html", "--token_mb", "0.5"]) == 0
    assert (tmp_path / "both/page.html").exists()
    assert report([str(whole), "--check"]) == 1
    out = capsys.readouterr().out
    assert "step 3: error [kl_runaway] The KL runs away" in out and "Remedy: lower learning_rate" in out
    assert "findings up to step 4: 2" in out
    assert report([str(healthy), "--check"]) == 0
    assert "findings up to step 4: 0" in capsys.readouterr().out
    assert report([str(make_worse_run(tmp_path / "worse")), "--check"]) == 1
    assert "worse: findings up to step 20: 1" in capsys.readouterr().out


def test_a_report_is_made_without_torch(whole, tmp_path):
    arguments = [str(whole), "--output", str(tmp_path / "r.html")]
    code = f"import sys; from alpaca_ppo.cli.finished_runs import report; report({arguments!r})"
    code += "; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'slow imports'"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
