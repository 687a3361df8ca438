"""The demonstration that critics learn return distributions: true values, results of shorter runs, table and figure."""

import math

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from examples.critics import return_distributions
from examples.critics.distributions import DISTRIBUTIONS, QUARTILES, TAIL, Prediction
from examples.critics.plots import plot_distributions
from examples.critics.return_distributions import KINDS, DistributionReward, predict, table, train_critic

LEVELS = torch.tensor(QUARTILES, dtype=torch.float64)


@pytest.fixture(scope="module", params=KINDS)
def learned(request, tmp_path_factory):
    """The kind of a critic, and what it predicts for each distribution after a short run."""
    # A low quantile that is too low rises only by the small weight of its level. In an iqn critic all levels share
    # their parameters as well, so it needs the full run. A mean is found sooner.
    steps = {"iqn": return_distributions.STEPS, "scalar": 25}.get(request.param, 50)
    critic = train_critic(request.param, tmp_path_factory.mktemp(request.param), seed=0, steps=steps)
    return request.param, {name: predict(critic, name) for name in DISTRIBUTIONS}


@pytest.mark.proof
def test_every_critic_learns_the_mean_within_five_percent(learned):
    _, predictions = learned
    for name, distribution in DISTRIBUTIONS.items():
        assert predictions[name].mean == pytest.approx(distribution.tail_mean(1.0), rel=0.05), name


@pytest.mark.proof
def test_every_distributional_critic_learns_the_lowest_tenth_within_ten_percent(learned):
    kind, predictions = learned
    for name, distribution in DISTRIBUTIONS.items():
        if kind == "scalar":
            assert predictions[name].tail_mean is None
        else:
            assert predictions[name].tail_mean == pytest.approx(distribution.tail_mean(TAIL), rel=0.1), name


@pytest.mark.proof
def test_quantile_critics_learn_the_quartiles_within_a_tenth_of_the_deviation(learned):
    kind, predictions = learned
    for name, distribution in DISTRIBUTIONS.items():
        if kind in ("quantile", "iqn"):
            assert predictions[name].quartiles == pytest.approx(
                distribution.quantiles(LEVELS).tolist(), abs=0.1 * distribution.deviation()
            )
        else:
            assert predictions[name].quartiles is None


@pytest.mark.proof
def test_distribution_functions_begin_at_the_first_atom_or_the_first_upper_edge(learned):
    kind, predictions = learned
    # 129 atoms over [-8, 8], or 129 bins of 16 / 129.
    ends = {"c51": (-8.0, 8.0), "hl_gauss": (-8 + 16 / 129, 8.0)}
    for prediction in predictions.values():
        if kind in ends:
            assert (prediction.returns[0], prediction.returns[-1]) == pytest.approx(ends[kind], abs=1e-6)
            assert len(prediction.returns) == len(prediction.levels) == 129
            assert prediction.levels[-1] == pytest.approx(1.0, abs=1e-5)


def test_the_true_values_equal_the_closed_forms():
    # N(m, s): quartiles m -+ 0.67449 s; mean of the lower tenth m - s * density(-1.28155) / 0.1 = m - 1.75498 s.
    steady, gamble, costly = (DISTRIBUTIONS[name] for name in ("steady", "gamble", "costly"))
    assert_close(steady.quantiles(LEVELS), 3 + 0.5 * torch.tensor([-0.67449, 0, 0.67449]).double(), rtol=0, atol=1e-5)
    assert steady.tail_mean(0.1) == pytest.approx(3 - 0.5 * 1.75498, abs=1e-4)
    # 0.2 * -1 + 0.8 * 4 = 3. The lower tenth is the lower half of N(-1, 0.4): -1 - 0.4 * sqrt(2 / pi).
    assert gamble.tail_mean(1.0) == pytest.approx(3.0, abs=1e-4)
    assert gamble.tail_mean(0.1) == pytest.approx(-1 - 0.4 * math.sqrt(2 / math.pi), abs=1e-4)
    # Variance within the components 0.2 * 0.4^2 + 0.8 * 0.6^2 = 0.32, between them 0.2 * 0.8 * 5^2 = 4.
    assert gamble.deviation() == pytest.approx(math.sqrt(4.32), rel=1e-3)
    # -1 - Exp(1) at level tau is -1 + log(tau); mean of the lower tenth -1 - (1 + log 10).
    assert_close(costly.quantiles(LEVELS), LEVELS.log() - 1)
    assert costly.tail_mean(0.1) == pytest.approx(-2 - math.log(10), rel=1e-4)


def test_scores_follow_the_distribution_of_each_prompt_and_the_seed():
    prompts = ["play steady", "play gamble", "play costly"] * 4000
    scores = torch.tensor(DistributionReward(0)(prompts, [""] * len(prompts))).view(-1, 3)
    for name, drawn in zip(DISTRIBUTIONS, scores.T, strict=True):
        # Three standard errors.
        assert float(drawn.mean()) == pytest.approx(
            DISTRIBUTIONS[name].tail_mean(1.0), abs=3 * DISTRIBUTIONS[name].deviation() / 63
        )
        below = (drawn.unsqueeze(1) < DISTRIBUTIONS[name].quantiles(LEVELS)).double().mean(dim=0)
        assert_close(below, LEVELS, rtol=0, atol=0.024)
    assert DistributionReward(0)(prompts[:9], [""] * 9) == DistributionReward(0)(prompts[:9], [""] * 9)
    assert DistributionReward(0)(prompts[:9], [""] * 9) != DistributionReward(1)(prompts[:9], [""] * 9)


def made_up_predictions():
    """Two seeds: the critics of one predict the true values, those of the other 0.1 more."""
    predictions = {}
    for name, distribution in DISTRIBUTIONS.items():
        for kind in KINDS:
            of_critic = []
            for error in (0.0, 0.1):
                returns, levels = (distribution.quantiles(LEVELS) + error).tolist(), list(QUARTILES)
                tail = None if kind == "scalar" else distribution.tail_mean(TAIL) + error
                points = (None, None) if kind == "scalar" else (returns, levels)
                quartiles = returns if kind in ("quantile", "iqn") else None
                of_critic.append(Prediction(distribution.tail_mean(1.0) + error, tail, quartiles, *points))
            predictions[kind, name] = of_critic
    return predictions


def test_the_table_has_the_mean_error_and_the_largest_over_the_seeds():
    lines = table(made_up_predictions()).splitlines()
    # For each distribution 5 means, 4 tail means, 2 * 3 quartiles; and the header.
    assert len(lines) == 1 + 3 * (5 + 4 + 6)
    # True 3, learned 3.0 and 3.1: mean 3.05, error 0.05 / 3 = 1.7 %, largest error 0.1 / 3 = 3.3 %.
    assert lines[1].split() == ["steady", "scalar", "mean", "3.000", "3.050", "3.000", "..", "3.100", "+1.7%", "3.3%"]


@pytest.mark.proof
def test_the_command_writes_table_and_figure_to_the_output_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        return_distributions, "run", lambda **given: made_up_predictions() if given["seeds"] == 2 else None
    )
    return_distributions.main(["--output", str(tmp_path / "out"), "--seeds", "2"])
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["return_distributions.png", "return_distributions.txt"]
    assert (tmp_path / "out" / "return_distributions.txt").read_text() in capsys.readouterr().out


@pytest.mark.proof
def test_the_figure_is_large_enough_and_its_file_is_small(tmp_path):
    plot_distributions(made_up_predictions(), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.format == "PNG" and min(image.size) >= 500
    assert (tmp_path / "figure.png").stat().st_size < 150_000
