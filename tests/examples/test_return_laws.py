"""The demonstration that critics recover the law of the return: its truth, its outcome on smaller runs, its output."""

import math

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from examples.critics import return_laws
from examples.critics.laws import LAWS, QUARTILES, TAIL, Reading
from examples.critics.plots import plot_laws
from examples.critics.return_laws import KINDS, LawReward, read_critic, table, train_critic

LEVELS = torch.tensor(QUARTILES, dtype=torch.float64)


@pytest.fixture(scope="module", params=KINDS)
def learned(request, tmp_path_factory):
    """Kind of a critic, and its reading of each law after a short run."""
    # A quantile of low level that lies too low is raised by that level's small weight only, and in an iqn critic all
    # levels share their weights: it needs the whole run.
    steps = return_laws.STEPS if request.param == "iqn" else 50
    critic = train_critic(request.param, tmp_path_factory.mktemp(request.param), seed=0, steps=steps)
    return request.param, {name: read_critic(critic, name) for name in LAWS}


def test_every_critic_learns_the_mean_within_five_percent(learned):
    _, readings = learned
    for name, law in LAWS.items():
        assert readings[name].mean == pytest.approx(law.tail_mean(1.0), rel=0.05), name


def test_every_distributional_critic_learns_the_lowest_tenth_within_ten_percent(learned):
    kind, readings = learned
    for name, law in LAWS.items():
        if kind == "scalar":
            assert readings[name].tail_mean is None
        else:
            assert readings[name].tail_mean == pytest.approx(law.tail_mean(TAIL), rel=0.1), name


def test_quantile_critics_learn_the_quartiles_within_a_tenth_of_the_deviation(learned):
    kind, readings = learned
    for name, law in LAWS.items():
        if kind in ("quantile", "iqn"):
            assert readings[name].quartiles == pytest.approx(law.quantiles(LEVELS).tolist(), abs=0.1 * law.deviation())
        else:
            assert readings[name].quartiles is None


def test_the_true_numbers_are_those_of_the_closed_forms():
    # N(m, s): quartiles m -+ 0.67449 s, lower tenth m - s * density(-1.28155) / 0.1 = m - 1.75498 s.
    steady, gamble, costly = LAWS["steady"], LAWS["gamble"], LAWS["costly"]
    assert_close(steady.quantiles(LEVELS), 3 + 0.5 * torch.tensor([-0.67449, 0, 0.67449]).double(), rtol=0, atol=1e-5)
    assert steady.tail_mean(0.1) == pytest.approx(3 - 0.5 * 1.75498, abs=1e-4)
    # 0.2 * -1 + 0.8 * 4 = 3. The lower tenth is the lower half of N(-1, 0.4): -1 - 0.4 * sqrt(2 / pi).
    assert gamble.tail_mean(1.0) == pytest.approx(3.0, abs=1e-4)
    assert gamble.tail_mean(0.1) == pytest.approx(-1 - 0.4 * math.sqrt(2 / math.pi), abs=1e-4)
    # Within the parts 0.2 * 0.4^2 + 0.8 * 0.6^2 = 0.32, between them 0.2 * 0.8 * 5^2 = 4.
    assert gamble.deviation() == pytest.approx(math.sqrt(4.32), rel=1e-3)
    # -1 - Exp(1) at level tau is -1 + log(tau); mean of the lower tenth -1 - (1 + log 10).
    assert_close(costly.quantiles(LEVELS), LEVELS.log() - 1)
    assert costly.tail_mean(0.1) == pytest.approx(-2 - math.log(10), rel=1e-4)


def test_scores_are_drawn_from_the_law_of_each_prompt_and_by_the_seed():
    prompts = ["play steady", "play gamble", "play costly"] * 4000
    scores = torch.tensor(LawReward(0)(prompts, [""] * len(prompts))).view(-1, 3)
    for name, drawn in zip(LAWS, scores.T, strict=True):
        # Three standard errors.
        assert float(drawn.mean()) == pytest.approx(LAWS[name].tail_mean(1.0), abs=3 * LAWS[name].deviation() / 63)
        below = (drawn.unsqueeze(1) < LAWS[name].quantiles(LEVELS)).double().mean(dim=0)
        assert_close(below, LEVELS, rtol=0, atol=0.024)
    assert LawReward(0)(prompts[:9], [""] * 9) == LawReward(0)(prompts[:9], [""] * 9)
    assert LawReward(0)(prompts[:9], [""] * 9) != LawReward(1)(prompts[:9], [""] * 9)


def made_up_readings():
    """Two seeds whose critics say the truth, and the truth plus 0.1."""
    readings = {}
    for name, law in LAWS.items():
        for kind in KINDS:
            said = []
            for error in (0.0, 0.1):
                returns, levels = (law.quantiles(LEVELS) + error).tolist(), list(QUARTILES)
                tail = None if kind == "scalar" else law.tail_mean(TAIL) + error
                points = (None, None) if kind == "scalar" else (returns, levels)
                quartiles = returns if kind in ("quantile", "iqn") else None
                said.append(Reading(law.tail_mean(1.0) + error, tail, quartiles, *points))
            readings[kind, name] = said
    return readings


def test_the_table_gives_mean_error_and_the_worst_seed():
    lines = table(made_up_readings()).splitlines()
    # Of each law: 4 means, 3 tail means, 2 * 3 quartiles; and the head.
    assert len(lines) == 1 + 3 * (4 + 3 + 6)
    # True 3, learned 3.0 and 3.1: mean 3.05, off by 0.05 / 3 = 1.7 %, at worst 0.1 / 3 = 3.3 %.
    assert lines[1].split() == ["steady", "scalar", "mean", "3.000", "3.050", "3.000", "..", "3.100", "+1.7%", "3.3%"]


def test_the_command_writes_table_and_figure_into_the_folder_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(return_laws, "run", lambda **given: made_up_readings() if given["seeds"] == 2 else None)
    return_laws.main(["--output", str(tmp_path / "out"), "--seeds", "2"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["return_laws.png", "return_laws.txt"]
    assert (tmp_path / "out" / "return_laws.txt").read_text() in capsys.readouterr().out


def test_the_figure_shows_each_law_and_is_small(tmp_path):
    plot_laws(made_up_readings(), tmp_path / "laws.png")
    with Image.open(tmp_path / "laws.png") as image:
        assert image.format == "PNG" and min(image.size) >= 500
    assert (tmp_path / "laws.png").stat().st_size < 150_000
