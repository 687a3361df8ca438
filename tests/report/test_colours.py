"""The page's colours: contrast with the background, and lines that the colour-blind tell apart."""

import re
from itertools import combinations
from pathlib import Path

import pytest

CSS = (Path(__file__).parents[2] / "alpaca_ppo/report/assets/page.css").read_text()
# Simulation of full dichromacy on linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0521)),
    "deuteranopia": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "tritanopia": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def contrast(a, b):
    """WCAG's ratio of relative luminances."""
    low, high = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (a, b))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    """CIE L*a*b* of linear RGB, with white as D65."""
    rgb = [min(1.0, max(0.0, c)) for c in rgb]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(w * c for w, c in zip(row, rgb, strict=True)) / sum(row) for row in rows]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour, sight):
    return lab([sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in SIGHT[sight]])


def distance(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def colours(scheme):
    block = re.search({"light": r":root \{(.*?)\}", "dark": r'data-theme="dark"\] \{(.*?)\}'}[scheme], CSS, re.DOTALL)
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block[1]))


def test_the_measures_are_those_of_the_standards():
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#ffffff") == pytest.approx(
        4.48, abs=0.01
    )
    assert lab(linear("#ffffff")) == pytest.approx((100, 0, 0), abs=0.01)
    # Red: L* 53.2, a* 80.1, b* 67.2.
    assert lab(linear("#ff0000")) == pytest.approx((53.2, 80.1, 67.2), abs=0.1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_lines_stand_out_from_the_page(scheme):
    of = colours(scheme)
    for name in ("text", "muted", "accent", "error", "warning"):
        assert contrast(of[name], of["surface"]) >= 4.5, name
    assert contrast(of["muted"], of["raised"]) >= 4.5
    assert all(contrast(of[f"run{i}"], of["surface"]) >= 3 for i in range(7))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_signs_are_told_apart_by_the_colour_blind(scheme, sight):
    of = colours(scheme)
    runs = [seen(of[f"run{i}"], sight) for i in range(7)]
    # A difference of 10 is seen at a glance; the dashes of the lines differ, too.
    assert min(distance(a, b) for a, b in combinations(runs, 2)) >= 10
    assert distance(seen(of["below"], sight), seen(of["above"], sight)) >= 50
