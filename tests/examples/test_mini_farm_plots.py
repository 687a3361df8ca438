"""The laboratory's two figures, and the report that shows them."""

from pathlib import Path

import pytest
from PIL import Image

from examples.mini_farm import compare, overopt, plots, report, results
from examples.mini_farm.evaluation import Summary
from examples.mini_farm.plots import GOLD, KL, PROXY, plot_run, smooth

pytestmark = pytest.mark.proof

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


def test_over_optimisation_is_concluded_from_the_numbers():
    text = overopt.reading(some_metrics(40, gold=lambda n: 10 - abs(n - 9.5)), window=2)
    # Steps 9 and 10 have 9.5 each; 39 and 40 have -19.5 and -20.5: mean -20, standard error 1 / sqrt(2) / sqrt(2).
    assert "| highest gold | 9 to 10 | 9.50 | 9.50 ± 0.00 | 3.0 |" in text
    assert "| end | 39 to 40 | 39.50 | -20.00 ± 0.50 | 3.0 |" in text
    assert "the proxy reward changed by +30.00 and the gold score by -29.50 ± 0.50" in text
    assert text.endswith("over-optimisation.")


def test_results_have_mean_and_standard_deviation_over_the_seeds():
    # Gold scores 2 and 4: mean 3, variance ((-1)^2 + 1^2) / 1 = 2.
    assert "| gold score | 3.00 | 1.41 |" in results.spread(PPO)
    assert "| win-rate over SFT (%) | 80.00 | 0.00 |" in results.spread(PPO)


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


@pytest.mark.parametrize("example", ["games", "long_horizon"])
def test_what_is_written_by_hand_outlives_a_new_table(example, tmp_path):
    page = tmp_path / "RESULTS.md"
    assert report.notes_of(page) == ""
    page.write_text("# Made elsewhere\n")
    assert report.notes_of(page) == ""
    text = (Path(report.__file__).parents[1] / example / "RESULTS.md").read_text()
    page.write_text("# New\n" + report.notes_of(Path(report.__file__).parents[1] / example / "RESULTS.md"))
    assert page.read_text() == "# New\n\n" + text[text.index("## What it means") :]


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
