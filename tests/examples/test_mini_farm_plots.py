"""The laboratory's two figures, and the report that shows them."""

import json
from dataclasses import fields

import pytest
from PIL import Image

from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.config.ppo_config import PPOConfig
from examples.mini_farm import compare, lora, overopt, plots, report, results
from examples.mini_farm.evaluation import Summary
from examples.mini_farm.pipeline import LabArguments
from examples.mini_farm.plots import GOLD, KL, PROXY, plot_overoptimisation, plot_run, read_metrics, smooth

SFT = Summary("SFT", 0.0, 1.0, 0.05, 0.5, 0.0, 10.0, 0.0)
BEST = Summary("best-of-16", 1.0, 1.9, 0.05, 0.75, 15.0, 12.0, 1.84)
PPO = [Summary(f"PPO, seed {seed}", 1.5 + seed, 2.0 + seed, 0.05, 0.8, 20.0, 14.0, 3.0 + seed) for seed in (0, 2)]


def some_metrics(steps=20, **columns):
    """Steps 1, 2, ...; `columns` are functions of the step."""
    length, explained = "objective/response_length", "ppo/val/explained_variance"
    given = {PROXY: lambda n: n, GOLD: lambda n: -n, KL: lambda n: 3.0, length: lambda n: 9.0, explained: lambda n: 0.5}
    given |= {key: columns[name] for name, key in (("proxy", PROXY), ("gold", GOLD), ("kl", KL)) if name in columns}
    return [{"step": n, **{key: float(value(n)) for key, value in given.items()}} for n in range(1, steps + 1)]


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved."""
    saved = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (saved.append(figure), save(figure, path)))
    return saved


def test_the_running_mean_is_over_fewer_steps_at_the_start():
    # 1; (1+3)/2; (1+3+5)/3; (3+5+10)/3
    assert smooth([1.0, 3.0, 5.0, 10.0], window=3) == [1.0, 2.0, 3.0, 6.0]


def test_metrics_are_read_step_by_step(tmp_path):
    rows = some_metrics(3)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_metrics(tmp_path) == rows


def test_the_figure_of_a_run_has_six_labeled_panels_with_its_numbers(figures, tmp_path):
    metrics = some_metrics(proxy=lambda n: 10 * n)
    plot_run({"PPO": metrics}, [SFT, BEST, PPO[0]], tmp_path / "results.png")
    axes = figures[0].axes
    assert len(axes) == 6
    assert all(axis.get_title() and axis.get_xlabel() and axis.get_ylabel() for axis in axes)
    each, mean = axes[0].lines
    assert list(each.get_ydata()) == [10.0 * n for n in range(1, 21)]
    assert list(mean.get_ydata()) == smooth([10.0 * n for n in range(1, 21)])
    assert [text.get_text() for text in axes[5].get_legend().get_texts()] == ["SFT", "best-of-16", "PPO, seed 0"]
    with Image.open(tmp_path / "results.png") as image:
        assert image.format == "PNG" and min(image.size) >= 500


def test_a_seed_has_one_colour_in_every_panel(figures, tmp_path):
    runs = {line.method: some_metrics() for line in PPO}
    plot_run(runs, [SFT, *PPO], tmp_path / "results.png")
    curves, points = figures[0].axes[0].lines[1::2], figures[0].axes[5].containers[1:]
    assert [line.get_label() for line in curves] == [point.get_label() for point in points] == list(runs)
    colours = [line.get_color() for line in curves]
    assert colours == [point.lines[0].get_color() for point in points]
    assert len(set(colours)) == 2


def test_the_figure_of_over_optimisation_shows_gains_and_where_gold_is_highest(figures, tmp_path):
    # Gold rises to step 9 and falls; its mean over 5 steps is highest two steps later.
    metrics = some_metrics(40, proxy=lambda n: 5 + n, gold=lambda n: 10 - abs(n - 9), kl=lambda n: 2 * n)
    plot_overoptimisation(metrics, tmp_path / "overopt.png")
    over_time, over_kl = figures[0].axes
    assert over_time.lines[0].get_ydata()[:3].tolist() == [0.0, 1.0, 2.0]
    labels = [text.get_text() for text in over_time.get_legend().get_texts()]
    assert labels == ["proxy: reward model", "gold: annotators", "gold is highest: step 11"]
    # The mean KL of steps 7 to 11.
    assert over_kl.get_legend().get_texts()[-1].get_text() == "gold is highest: 18 nats"
    assert (tmp_path / "overopt.png").stat().st_size > 0


def test_over_optimisation_is_concluded_from_the_numbers():
    text = overopt.reading(some_metrics(40, gold=lambda n: 10 - abs(n - 9.5)), window=2)
    # Steps 9 and 10 have 9.5 each; 39 and 40 have -19.5 and -20.5: mean -20, standard error 1 / sqrt(2) / sqrt(2).
    assert "| highest gold | 9 to 10 | 9.50 | 9.50 ± 0.00 | 3.0 |" in text
    assert "| end | 39 to 40 | 39.50 | -20.00 ± 0.50 | 3.0 |" in text
    assert "the proxy reward changed by +30.00 and the gold score by -29.50 ± 0.50" in text
    assert text.endswith("over-optimisation.")


@pytest.mark.parametrize(
    "columns",
    [{"gold": lambda n: n}, {"gold": lambda n: -n, "proxy": lambda n: -n}, {"gold": lambda n: (-1) ** n - 0.01 * n}],
)
def test_a_run_without_over_optimisation_is_reported_as_such(columns):
    assert "This is not over-optimisation" in overopt.reading(some_metrics(40, **columns))


def test_the_last_recorded_answers_are_listed(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for step, answer in ((2, "Old."), (10, "New.")):
        row = {"prompt": "Who?\n", "response": f"{answer}<eos>", "score": 1.25}
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
    assert overopt.last_answers(tmp_path) == "- *Who?* New. (proxy 1.2)"


def test_results_have_mean_and_standard_deviation_over_the_seeds():
    # Gold scores 2 and 4: mean 3, variance ((-1)^2 + 1^2) / 1 = 2.
    assert "| gold score | 3.00 | 1.41 |" in results.spread(PPO)
    assert "| win-rate over SFT (%) | 80.00 | 0.00 |" in results.spread(PPO)


def test_results_count_the_seeds_that_reach_the_targets():
    weak = Summary("PPO, seed 9", 1.0, 1.1, 0.05, 0.64, 20.0, 14.0, 9.0)
    runs = {line.method: some_metrics(20, kl=lambda n: n) for line in [*PPO, weak]}
    text = results.reading(SFT, BEST, [*PPO, weak], runs)
    assert text.startswith("2 of 3 seeds reach")
    # (2 + 4 + 1.1) / 3 - 1 = 1.37; steps 11 to 20 have a mean of 15.5, steps 1 to 10 of 5.5.
    assert "1.37 in gold score over SFT" in text
    assert "15.5, 15.5, 15.5 nats per answer (10 steps earlier: 5.5, 5.5, 5.5; highest of all steps: 20.0)" in text


@pytest.mark.parametrize("weak", [{"win_rate": 0.64}, {"gain_errors": 4.0}])
def test_a_seed_must_reach_both_targets(weak):
    line = Summary(**(vars(PPO[0]) | weak))
    assert results.reading(SFT, BEST, [line, line], {"a": some_metrics()}).startswith("0 of 2 seeds")


def test_one_seed_is_refused():
    with pytest.raises(ValueError, match=r"seeds is \[1, 1\]; a standard deviation needs at least two different seeds"):
        results.ResultsArguments(seeds=[1, 1])


def test_sections_of_the_report_are_written_separately_and_stay_in_order(tmp_path):
    figure = tmp_path / "root" / "overopt.png"
    figure.parent.mkdir()
    figure.write_bytes(b"drawn")
    path = tmp_path / "report" / "RESULTS.md"
    path.parent.mkdir()
    last, first = report.SECTIONS[1], report.SECTIONS[0]
    report.write_section(path, last, "Long.", figure)
    report.write_section(path, first, "Old.", figure)
    report.write_section(path, first, "Short.", figure)
    assert path.read_text() == (
        f"{report.TITLE}\n\n## {first}\n\nShort.\n\n![{first}](overopt.png)\n\n"
        f"## {last}\n\nLong.\n\n![{last}](overopt.png)\n"
    )
    assert path.with_name("overopt.png").read_bytes() == b"drawn"


def outcome(gold, **given):
    return compare.Outcome(
        **{"gold": gold, "win_rate": 80.0, "kl": 5.0, "explained_variance": 0.5, "seconds": 10.0, "truncated": 30.0}
        | given
    )


def test_the_comparison_has_means_and_standard_deviations():
    # Gold scores 2 and 4: mean 3, standard deviation sqrt(2) = 1.41.
    runs = {compare.BASELINE: [outcome(2.0), outcome(4.0)], "GRPO": [outcome(1.0, explained_variance=None)] * 2}
    lines = compare.table(runs).splitlines()
    assert lines[2].startswith(
        f"| {compare.BASELINE} | 3.00 ± 1.41 | 80.0 ± 0.0 | 5.00 ± 0.00 | 0.50 ± 0.00 | 10 ± 0 |"
    )
    assert lines[3] == "| GRPO | 1.00 ± 0.00 | 80.0 ± 0.0 | 5.00 ± 0.00 | no critic | 10 ± 0 |"
    assert compare.table(runs, truncated="cut (%)").splitlines()[2].endswith("| 5.00 ± 0.00 | 30 ± 0 |")
    # 1 - 3 = -2; the standard error is sqrt(2 / 2 + 0 / 2) = 1.
    assert "- GRPO: -2.00 ± 1.00 in gold score, +0.0 nats, 1.00 times the seconds." in compare.reading(runs)


def test_every_algorithm_has_the_same_number_of_answers_and_kl_coefficient():
    preset = {"kl_coef": 0.08, "rollout_batch_size": 128, "total_episodes": 6400}
    assert compare.settings_of("k3 KL in the loss", preset)["kl_loss_coef"] == 0.08
    group = compare.settings_of("GRPO", preset)
    assert group["num_return_sequences"] * group["rollout_batch_size"] == 128
    assert group["num_return_sequences"] * group["total_episodes"] == 6400
    assert compare.settings_of(compare.BASELINE, preset) == {}


def test_every_line_of_the_tables_is_a_configuration_with_its_critic():
    preset = read_yaml(LabArguments().ppo_preset)

    def with_changes(changes):
        given = {key: value for key, value in changes.items() if key in {option.name for option in fields(PPOConfig)}}
        return PPOConfig(**{"output_dir": "none", **preset, **given})

    lines = {name: with_changes(compare.settings_of(name, preset)) for name in compare.VARIANTS}
    critics = ["scalar", "c51", "hl_gauss", "quantile", "iqn", "scalar"]
    assert [line.critic for line in lines.values() if line.uses_critic] == critics
    assert [name for name, line in lines.items() if not line.uses_critic] == ["GRPO", "RLOO"]
    assert all(list(line.value_support) == [-4.0, 4.0] for line in (lines["c51 critic"], lines["hl_gauss critic"]))
    short = [with_changes(compare.settings_of(name, preset)) for name in compare.SHORT_VARIANTS]
    assert [line.response_len for line in short] == [20] * 4
    assert [line.mask_truncated for line in short] == [False, False, True, False]
    layouts = [with_changes({**lora.LORA, **changes}).critic_layout for changes in lora.LAYOUTS.values()]
    assert layouts == ["separate", "shared", "adapter", "adapter"]


@pytest.mark.parametrize(
    ("win_rate", "verdict"), [(75.1, "-4.9 points of win-rate, within"), (74.0, "-6.0 points of win-rate, not within")]
)
def test_adapters_are_compared_with_full_fine_tuning(win_rate, verdict):
    runs = {compare.BASELINE: [outcome(2.0)] * 2, "LoRA, shared": [outcome(2.0, win_rate=win_rate)] * 2}
    assert f"- LoRA, shared: {verdict} 5 of full fine-tuning." in lora.reading(runs)
