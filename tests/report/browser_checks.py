"""The report as a user has it, in a headless Chromium: `make browser-test`.

`make test` does not collect this file, because it needs a browser; without one it fails. Screenshots go to the folder
that the environment variable SCREENSHOTS names.
"""

import os
import time
from pathlib import Path

import pytest

from alpaca_ppo.report.page import write_report
from alpaca_ppo.report.runs import read_runs
from tests.chromium import PHONE, WIDE, chromium
from tests.report.made_runs import (
    HOSTILE,
    answer,
    conversation,
    make_chat_run,
    make_evaluated_run,
    make_run,
    make_whole_run,
    make_worse_run,
    write_lines,
)


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The pages, written once, by name."""
    folder = tmp_path_factory.mktemp("reports")
    whole = make_whole_run(folder / "whole")
    seeds = [make_run(folder / f"ppo_seed_{seed}", seed=seed) for seed in (1, 3)]
    other = make_run(folder / "grpo", adv_estimator="grpo", learning_rate=2e-3)
    large = make_run(folder / "large", steps=500)
    for step in range(1, 501):
        rows = [answer(10 * step + i, f"answer number {10 * step + i} " + "word " * 30, score=i) for i in range(10)]
        write_lines(large / f"rollouts/step_{step:06d}.jsonl", rows)
    evaluated = [make_evaluated_run(folder / name, preset=name, commit=name[0] * 40) for name in ("dapo", "vapo")]
    turns = make_run(folder / "turns", steps=1)
    write_lines(turns / "rollouts/step_000001.jsonl", [conversation(), conversation(prompt_id=4, tokens=[], score=2)])
    empty = make_run(folder / "empty", steps=0)
    runs = {
        "whole": [whole],
        "evaluated": evaluated[:1],
        "both": evaluated,
        "turns": [turns],
        "empty": [empty],
        "several": [*seeds, other],
        "large": [large],
        "bare": [make_run(folder / "bare", steps=1)],
        "worse": [make_worse_run(folder / "worse")],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alpaca_ppo.report.page.package_pages", lambda: None)
        paths = {name: write_report(read_runs(of), folder / f"{name}.html", token_mb=5) for name, of in runs.items()}
        patch.setattr("alpaca_ppo.report.page.package_pages", lambda: "https://host/blob/c/")
        paths["linked"] = write_report(read_runs(runs["worse"]), folder / "linked.html")
        paths["chat"] = write_report(read_runs([make_chat_run(folder / "chat")]), folder / "chat.html")
    return paths


@pytest.fixture(scope="module")
def pages(browser):
    """One page for each size and colour scheme, made when it is first asked for."""
    made = {}

    def page_of(viewport, scheme):
        key = (viewport["width"], scheme)
        if key not in made:
            made[key] = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
            made[key].set_default_timeout(60_000)
        return made[key]

    return page_of


@pytest.fixture
def opened(pages, reports, request):
    """A function that opens a report; afterwards nothing may have gone to the console or the network."""
    complaints, requests, used = [], [], []
    listeners = {
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda made: requests.append(made.url),
    }

    def open_page(name, view="", *, viewport=WIDE, scheme="light"):
        page = pages(viewport, scheme)
        if page not in used:
            used.append(page)
            for event, listener in listeners.items():
                page.on(event, listener)
        # Another fragment alone would not load the page again.
        page.goto("about:blank")
        page.goto(f"{reports[name].as_uri()}#{view}")
        return page

    yield open_page
    for number, page in enumerate(used):
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"{request.node.name}_{number}.png")
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert complaints == []
    assert all(url.startswith(("file://", "about:")) for url in requests), requests


def text_of(page, selector):
    return page.locator(selector).inner_text()


def until(page, condition, *, seconds=60):
    """Waits for a condition in JavaScript; the page's security policy forbids Playwright's own way, which uses eval."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def change_view(page, name):
    """Clicks on a view and waits until it is shown: a page hears of its new address some time after the click."""
    page.click(f"[data-view={name}]")
    page.wait_for_selector(f"[data-view={name}][aria-current=page]")


def open_answer(page, text):
    """Searches for an answer and opens it."""
    page.fill("#search", text)
    page.locator("tr[data-answer]").first.click()


def test_the_overview_begins_with_findings_and_ends(opened):
    page = opened("whole")
    findings = page.locator(".finding")
    assert findings.count() == 2 and "✖ error The KL runs away" in findings.first.inner_text()
    assert "lower learning_rate" in findings.first.inner_text()
    # The reward is the model's score, so one tile and one chart name both.
    assert text_of(page, "#ends [data-metric='objective/scores']").split("\n") == ["Reward = model", "2 → 5"]
    assert page.locator(".essential figcaption b").all_inner_texts()[:2] == ["Reward", "KL to the reference"]
    assert "= model; mean score" in text_of(page, ".essential [data-metric='objective/scores'] figcaption")
    assert text_of(page, ".frontier option:checked") == "Reward: gold"


def test_a_finding_links_the_page_that_mends_it_where_its_address_is_known(opened):
    page = opened("worse")
    assert "Remedy: stop; see docs/troubleshooting.md#a-heading" in text_of(page, ".finding")
    assert page.locator(".finding a").count() == 0
    page = opened("linked")
    assert "Remedy: stop; see docs/troubleshooting.md#a-heading" in text_of(page, ".finding")
    link = "https://host/blob/c/docs/troubleshooting.md#a-heading"
    assert page.locator(".finding a").evaluate("link => link.href") == link


def test_every_address_in_a_finding_is_a_link(opened):
    page = opened("chat")
    said = [line for line in text_of(page, ".finding").splitlines() if line]
    assert said == ["✖ error all; https://host/why. step 1", "Remedy: see docs/a.md#b; then docs/c.md, or stop"]
    links = page.locator(".finding a").evaluate_all("links => links.map(link => link.href)")
    assert links == ["https://host/why", "https://host/blob/c/docs/a.md#b", "https://host/blob/c/docs/c.md"]


def test_a_curve_of_one_point_has_it_at_its_step_of_the_run(opened):
    page = opened("chat")
    # Of nine steps, the second is an eighth of the way: 54 + (460 - 54 - 12) / 8.
    assert page.locator(".essential [data-metric='objective/entropies'] circle[r='3']").evaluate_all(
        "dots => dots.map(dot => Number(dot.getAttribute('cx')))"
    ) == [pytest.approx(54 + 394 / 8)]
    assert page.locator(".essential [data-metric='objective/scores'] circle[r='3']").count() == 9


def test_of_a_conversation_the_question_is_shown_and_the_whole_prompt_on_demand(opened):
    page = opened("chat", "answers")
    assert sorted(page.locator("td.prompt").all_inner_texts()) == ["What is 2 + 3?", "What is 4 + 3?"]
    page.locator("td.prompt", has_text="4 + 3").click()
    box = page.locator("#inspector .bubble.prompt")
    assert box.inner_text().startswith("Prompt\nWhat is 4 + 3?\n") and "Be helpful" not in box.inner_text()
    box.locator("summary").click()
    assert "system\nBe helpful.<|im_end|>" in box.inner_text()
    page.fill("#search", "helpful 2")
    assert page.locator("td.prompt").all_inner_texts() == ["What is 2 + 3?"], "the whole prompt is searched"


def test_the_step_of_the_final_models_is_marked_and_that_they_are_worse_is_said(opened):
    page = opened("worse")
    assert text_of(page, ".weights") == (
        "final/: step 2 of 20, the best evaluation by eval/scores (3) (the dashed line in the curves); "
        "worse than before training, when eval/scores was 5"
    )
    assert page.locator(".essential [data-metric='objective/kl_sum_seq'] .best title").text_content() == (
        "step 2: the best checkpoint"
    )
    # 20 steps, of which two are averaged: 2 and 3 at the start, 20 and 21 at the end.
    assert text_of(page, "#ends [data-metric='objective/scores'] dd") == "2.5 → 20.5"
    assert text_of(page, "#ends [data-metric='eval/scores'] dd") == "5 → 3"
    assert "Means of the first and the last 2 steps" in text_of(page, "#overview-view")
    assert page.locator(".finding.error[open]").count() == 1


def test_the_essentials_are_the_first_nine_whatever_else_was_logged(opened):
    page = opened("evaluated")
    shown = [figure.get_attribute("data-metric") for figure in page.locator(".essential > *").all()]
    assert shown == [
        "objective/scores", "eval/hard/pass_at_1", "objective/kl_sum_seq", "objective/response_length",
        "objective/truncated_fraction", "ppo/val/explained_variance", "ppo/policy/entropy", "ppo/policy/approx_kl_k3",
        None,
    ]  # fmt: skip
    # pass@1 and avg@4 are the same numbers, and pass@1 has a standard error.
    caption = text_of(page, "[data-metric='eval/hard/pass_at_1'] figcaption")
    assert caption == "Evaluation: hard/pass@1 = avg@4; band: standard error"
    assert page.locator(".essential .band").count() == 1
    # An evaluation stands against the KL of its own answers: 2 nats a step.
    page.focus(".frontier svg")
    page.keyboard.press("End")
    assert text_of(page, "#tip").split("\n") == ["KL to the reference (nats) 8", "dapo\t0.75 at 8, step 4"]
    groups = page.locator("details[data-group]")
    assert groups.locator("summary").all_inner_texts() == ["Evaluation (7)", "Reward by source (3)", "Optimization (6)"]
    assert groups.locator(".chart").count() == 0
    groups.locator("summary").first.click()
    page.wait_for_selector("details[data-group] .chart")
    titles = groups.first.locator("figcaption b").all_inner_texts()
    assert titles[:3] == ["Evaluation: easy/pass@1", "Evaluation: easy/pass@4", "Evaluation: hard/pass@4"]
    # What was opened stays open.
    page.click("[data-value='5']")
    assert groups.first.locator(".chart").count() == 7


def test_a_run_without_a_step_says_so(opened):
    page = opened("empty")
    assert "No metrics yet" in text_of(page, "#overview-view") and "no step yet" in text_of(page, "#runs")
    for view in ("curves", "answers", "configuration"):
        change_view(page, view)


def test_a_curve_tells_its_numbers_to_pointer_and_keyboard(opened):
    page = opened("whole", "curves")
    curve = page.locator(".chart svg").first
    curve.hover()
    assert "whole" in text_of(page, "#tip") and "step" in text_of(page, "#tip")
    curve.focus()
    page.keyboard.press("End")
    assert text_of(page, "#tip").split() == ["step", "4", "whole", "5"]
    page.keyboard.press("ArrowLeft")
    assert text_of(page, "#tip").split() == ["step", "3", "whole", "4"]
    page.fill("[aria-label='Search metrics']", "grad_norm")
    assert page.locator(".charts figcaption b").all_inner_texts() == ["Gradient norm, policy"]


def test_runs_are_overlaid_averaged_over_seeds_and_hidden(opened):
    page = opened("several", "curves")
    curve = page.locator(".chart svg").first
    # The seeds 1 and 3 are a group, grpo another: two lines, one of them with a band.
    assert curve.locator("polyline").count() == 2 and curve.locator(".band").count() == 1
    curve.focus()
    page.keyboard.press("Home")
    # Rewards of step 1: 2 and 4, so 3 with a standard deviation of sqrt(2); grpo has seed 1.
    assert "ppo (mean of 2 runs)\t3 ± 1.41" in text_of(page, "#tip") and "grpo\t2" in text_of(page, "#tip")
    # The legend has a line and a band for the seeds, a line for the other run, in the colours of the chart.
    legend = page.locator(".line-name")
    assert legend.all_inner_texts()[0].strip().startswith("ppo (mean of 2 runs) band: one standard deviation")
    assert [swatch.locator("rect").count() for swatch in legend.all()] == [1, 0]
    stroke = "node => getComputedStyle(node).stroke"
    drawn = [line.evaluate(stroke) for line in curve.locator("polyline").all()]
    assert [line.evaluate(stroke) for line in page.locator(".line-name line").all()] == drawn and len(set(drawn)) == 2
    of_runs = [line.evaluate(stroke) for line in page.locator("button.run line").all()]
    assert of_runs == [drawn[0], drawn[0], drawn[1]]
    page.click("[data-value=runs]")
    assert page.locator(".line-name").count() == 0
    assert len({line.evaluate(stroke) for line in page.locator("button.run line").all()}) == 3
    assert page.locator(".chart svg").first.locator("polyline").count() == 3
    page.click("button.run >> nth=2")
    assert page.locator(".chart svg").first.locator("polyline").count() == 2
    for k in (0, 1):
        page.click(f"button.run >> nth={k}")
    assert text_of(page, "main") == "Every run is hidden; click one at the top to show it."
    change_view(page, "configuration")
    differences = text_of(page, "table.config >> nth=0")
    assert "learning_rate\t0.001\t0.001\t0.002" in differences and "adv_estimator" in differences


def test_what_differs_from_the_defaults_stands_first(opened):
    page = opened("whole", "configuration")
    assert text_of(page, "#configuration-view").startswith("Options that are not at their default")
    rows = [row.split("\t") for row in text_of(page, "table.config >> nth=0").split("\n")]
    assert rows[0] == ["Option", "whole", "Default"] and ["learning_rate", "0.001", "null"] in rows
    # What names the run alone comes last.
    assert [row[0] for row in rows[1:]] == ["learning_rate", "output_dir", "seed"]


def test_what_people_compare_of_where_runs_come_from_is_shown_and_the_rest_folded(opened):
    page = opened("both", "configuration")
    tables = page.locator("table.config")
    assert text_of(page, "#configuration-view").startswith("Differences between the runs\n\nThe runs have the same")
    rows = tables.nth(1).inner_text().split("\n")
    assert [row.split("\t") for row in rows[1:]] == [
        ["Preset", "dapo", "vapo"],
        ["Configuration files", "my.yaml", "my.yaml"],
        ["Git commit", "dddddddddd (main), with uncommitted changes", "vvvvvvvvvv (main), with uncommitted changes"],
        ["torch", "2.11.0", "2.11.0"],
        ["Processes", "2 on cuda", "2 on cuda"],
        ["Started", "2026-01-02T03:04:05+00:00", "2026-01-02T03:04:05+00:00"],
    ]
    assert tables.nth(1).locator("tr.differs").count() == 2
    assert not page.locator("#provenance table").is_visible()
    page.click("#provenance summary")
    assert "command_line\ttrain --preset dapo\ttrain --preset vapo" in text_of(page, "#provenance table")
    assert "provenance" not in tables.last.inner_text()


def test_columns_that_repeat_the_prompt_are_folded_and_the_tokens_in_sight(opened):
    page = opened("evaluated", "answers/0")
    page.wait_for_selector(".tokens")
    assert page.locator("dl.columns >> nth=0").inner_text() == "solution\ncellar\nasks\nduck"
    assert text_of(page, ".known summary") == "3 more columns, empty or part of the prompt: instruction, input, empty"
    assert page.locator(".bubble").count() == 1 and "correct\nyes" in text_of(page, ".facts")
    box = page.locator(".tokens").bounding_box()
    assert box["y"] + box["height"] < WIDE["height"]


def test_tokens_are_coloured_by_the_number_that_is_chosen(opened):
    page = opened("whole", "answers")
    open_answer(page, "the answer of step 1")
    tokens = page.locator("#inspector .side").first.locator(".t")
    assert tokens.all_inner_texts() == ["the", " answer", " of", " step", " 1"]
    # Advantages -1.5, -0.5, 0.5, 1.5, 2.5 around 0.
    classes = [token.get_attribute("class") for token in tokens.all()]
    assert classes == ["t below", "t below", "t above", "t above", "t above"]
    paints = [token.evaluate("node => getComputedStyle(node).backgroundColor") for token in tokens.all()]
    assert len(set(paints)) > 3
    for number, label in enumerate(("Advantage", "Value", "KL", "Log-prob", "Ratio", "Reward", "Entropy"), 1):
        page.locator("#inspector .tokens").first.focus()
        page.keyboard.press(str(number))
        assert text_of(page, "[aria-label='Colour by'] [aria-pressed=true]") == label
    assert {token.get_attribute("class") for token in tokens.all()} == {"t size"}
    page.click("[data-value=kl]")
    # -0.25 each: all of one colour.
    assert {token.get_attribute("class") for token in tokens.all()} == {"t below"}


def test_exact_numbers_come_by_hover_and_by_keyboard(opened):
    page = opened("whole", "answers")
    open_answer(page, "the answer of step 1")
    page.hover(".t >> nth=1")
    for shown in (text_of(page, "#tip"), text_of(page, "#numbers").replace("\n", "\t")):
        assert "Log-prob\t−1.5" in shown and "Ratio\t1.0625" in shown and "Entropy\t0.75" in shown
    page.locator(".tokens").first.focus()
    page.keyboard.press("End")
    assert "Token 5 of 5: “ 1”" in text_of(page, "#numbers") and "Value\n0.5" in text_of(page, "#numbers")
    page.keyboard.press("ArrowLeft")
    assert "Token 4 of 5: “ step”" in text_of(page, "#numbers")
    page.keyboard.press("Home")
    assert "Token 1 of 5: “the”" in text_of(page, "#numbers")
    # The curve below marks the token, and a click in it chooses another.
    assert page.locator("#curve .mark").get_attribute("visibility") == "visible"
    box = page.locator("#curve svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 16, box["y"] + box["height"] / 2)
    assert "Token 5 of 5" in text_of(page, "#numbers")


def test_prompt_scores_and_columns_stand_beside_an_answer(opened):
    page = opened("whole", "answers")
    open_answer(page, "the answer of step 1")
    shown = text_of(page, "#inspector")
    assert "Question 7?" in shown and "gold\n2" in shown and "model\n–" in shown
    open_answer(page, "after training")
    assert "answer\nforty-two" in text_of(page, "#inspector .columns")


def test_an_answer_is_followed_through_training_beside_the_reference(opened):
    page = opened("whole", "answers")
    page.click("[data-value=followed]")
    # The two prompts of the evaluation whose tokens are logged; those of the rollouts were sampled again by chance.
    assert page.locator("tr[data-answer]").count() == 2 and text_of(page, "#count").startswith("2 of ")
    open_answer(page, "after training")
    # What is asked stays in sight beside what is inspected.
    assert page.locator("td.prompt").first.is_visible() and "Question" in text_of(page, "td.prompt >> nth=0")
    names = page.locator(".side h3").all_inner_texts()
    assert names[0].startswith("Step 4 score 4") and "Step 0" in names[1]
    assert "before training: the reference's own answer" in names[1]
    assert page.locator(".side >> nth=1").locator(".t").all_inner_texts() == ["before", " all", " training"]
    # The other prompt's first answer has a KL in some tokens: a policy that did not start as its reference.
    page.click("tr[data-answer] >> nth=1")
    assert text_of(page, ".side >> nth=1 >> h3").endswith("· before training")
    page.click("tr[data-answer] >> nth=0")
    page.click(".steps button >> nth=1")
    assert "half way" in text_of(page, ".side >> nth=0") and "#answers/" in page.url
    page.click("[data-value=none]")
    assert page.locator(".side").count() == 1


def test_turns_are_named_by_their_roles_with_and_without_tokens(opened):
    page = opened("turns", "answers")
    who = "#inspector .bubble:not(.prompt) .who"
    page.click("[data-sort=score]")
    page.click("tr[data-answer] >> nth=1")
    assert page.locator(who).all_inner_texts() == ["Policy", "Tool and environment", "Policy"]
    assert page.locator("#inspector .bubble.environment .t").all_inner_texts() == [" 42", " sure?"]
    page.hover(".bubble.environment .t >> nth=0")
    assert "Not written by the policy" in text_of(page, "#numbers")
    page.click("tr[data-answer] >> nth=0")
    assert page.locator(who).all_inner_texts() == ["Policy", "Tool", "Environment", "Policy"]
    assert page.locator("#inspector .bubble.policy .text").all_inner_texts() == ["call", " so 42"]


def test_hostile_texts_are_shown_and_run_nothing(opened):
    page = opened("whole", "answers")
    open_answer(page, "onerror")
    assert HOSTILE[:60] in text_of(page, "#inspector .bubble.prompt")
    assert page.evaluate("window.stolen") is None
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize(
    "preset, first, count",
    [
        ("best", "9", 16),
        ("worst", "−9", 16),
        ("most-kl", "4", 16),
        ("truncated", "0.25", 1),
        ("identical", None, 10),
        ("changed", "4", 4),
    ],
)
def test_tables_find_what_they_are_named_for(preset, first, count, opened):
    page = opened("whole", "answers")
    page.click(f"[data-value={preset}]")
    assert text_of(page, "#count") == f"{count} of 16 answers"
    if first:
        assert text_of(page, "tr[data-answer] >> nth=0 >> td.score") == first


def test_five_thousand_answers_are_searched_sorted_and_scrolled_at_once(opened):
    start = time.monotonic()
    page = opened("large", "answers")
    page.wait_for_selector("tr[data-answer]")
    assert text_of(page, "#count") == "5000 of 5000 answers"
    assert page.locator("tr[data-answer]").count() < 60
    seconds = page.evaluate(
        """() => {
            const start = performance.now(), search = document.getElementById("search");
            for (const text of ["answer number 4321", "word", ""]) {
                search.value = text;
                search.dispatchEvent(new Event("input"));
            }
            for (const key of ["score", "response", "step"]) document.querySelector(`[data-sort=${key}]`).click();
            return (performance.now() - start) / 1000;
        }"""
    )
    # Six passes over all rows; even a busy machine needs a fraction of it.
    assert seconds < 3 and time.monotonic() - start < 60
    page.fill("#search", "answer number 4321")
    assert text_of(page, "#count") == "1 of 5000 answers"
    page.fill("#search", "")
    page.locator(".rows").evaluate("node => { node.scrollTop = node.scrollHeight; }")
    until(page, "document.querySelector('tr.spacer:last-child').offsetHeight === 0")
    page.fill("[aria-label='From step']", "499")
    assert text_of(page, "#count") == "20 of 5000 answers"
    change_view(page, "overview")
    page.click(".notice summary")
    assert "answers are in this file; those of" in text_of(page, ".notice")


def test_escape_empties_a_search_and_shows_everything_again(opened):
    page = opened("whole", "answers")
    page.keyboard.press("/")
    page.keyboard.type("no answer holds this")
    assert text_of(page, "#count") == "0 of 16 answers"
    page.keyboard.press("Escape")
    assert page.input_value("#search") == "" and text_of(page, "#count") == "16 of 16 answers"


def test_the_list_is_walked_by_keyboard(opened):
    page = opened("whole", "answers")
    page.keyboard.press("/")
    page.keyboard.type("the answer of")
    page.keyboard.press("Escape")
    page.locator(".rows").focus()
    page.keyboard.press("ArrowDown")
    heading = text_of(page, "#inspector h2")
    page.keyboard.press("n")
    assert text_of(page, "#inspector h2") != heading
    page.keyboard.press("p")
    assert text_of(page, "#inspector h2") == heading
    page.keyboard.press("Escape")
    assert page.locator("#inspector h2").count() == 0


def test_dark_mode_follows_the_system_and_a_button(opened):
    page = opened("whole", scheme="dark")
    background = "() => getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 23, 27)"
    page.click("#theme")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.evaluate(background) == "rgb(20, 23, 27)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_every_colour_is_readable(scheme, opened):
    """WCAG's contrast of at least 4.5 between a token's text and its darkest paint."""
    page = opened("whole", "answers", scheme=scheme)
    open_answer(page, "the answer of step 1")
    contrast = """() => {
        const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const painted = (...colours) => {
            for (const colour of colours) {
                canvas.fillStyle = colour;
                canvas.fillRect(0, 0, 1, 1);
            }
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
        };
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
        const page = getComputedStyle(document.body).backgroundColor;
        return [...document.querySelectorAll(".t")].map((token) => {
            const style = getComputedStyle(token);
            const both = [luminance(painted(page, style.backgroundColor)), luminance(painted(style.color))];
            return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        });
    }"""
    for column in ("advantages", "logprobs", "kl"):
        page.click(f"[data-value={column}]")
        assert min(page.evaluate(contrast)) >= 4.5, column


def test_a_phone_shows_everything_within_its_width(opened):
    for name, view in (
        ("whole", "overview"),
        ("several", "curves"),
        ("whole", "answers"),
        ("several", "configuration"),
    ):
        page = opened(name, view, viewport=PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
    page = opened("whole", "answers", viewport=PHONE)
    open_answer(page, "the answer of step 1")
    assert not page.locator(".listing").is_visible()
    assert page.evaluate("document.querySelector('#views').scrollWidth <= document.querySelector('#views').clientWidth")
    page.click(".t >> nth=1")
    assert "Token 2 of 5" in text_of(page, "#numbers") and not page.locator("#tip").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.click("text=← List")
    assert page.locator(".listing").is_visible()


def test_a_run_with_nothing_to_show_says_so(opened):
    page = opened("bare", "answers")
    assert "No answers were logged" in text_of(page, ".listing")
    change_view(page, "overview")
    assert page.locator(".chart").count() > 0
