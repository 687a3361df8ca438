"""The benchmark's arithmetic and turns, on invented steps; the programs themselves run by hand (`make bench`)."""

import pytest

from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.programs import WARM_UP, Step, take_turns
from tests.tools.benchmarks.report import (
    BARE,
    BEGIN,
    END,
    OWN,
    TRL,
    Comparison,
    Growth,
    Machine,
    claims,
    text,
    write_between_markers,
)


def step(wall, cpu, flops=None, old_policy=0.0, peak=100, recomputed=False):
    stages = {"update": wall - old_policy, "old policy": old_policy}
    return Step(wall, cpu, flops, stages, dict(stages), recomputed, response_tokens=3, peak_bytes=peak)


def test_ratios_compare_steps_of_the_same_round():
    comparison = Comparison(
        "realistic",
        workloads.fixed(4, 8),
        {TRL: step(0, 0, 300), BARE: step(0, 0, 100), OWN: step(0, 0, 150)},
        {
            TRL: [step(6, 9, peak=400), step(20, 9), step(9, 9)],
            BARE: [step(2, 2, old_policy=1), step(5, 2, old_policy=1), step(3, 2, old_policy=1)],
        },
        {TRL: [step(3, 4, peak=200), step(5, 4), step(3, 4)], BARE: [step(3, 4, peak=200), step(5, 4), step(3, 4)]},
        {},
    )
    assert claims(comparison) == [
        # 6/3, 20/5, 9/3
        "times as fast as TRL, by the clock | 3.00 (2.00 to 4.00)",
        # 3/2, 5/5, 3/3
        "of bare compute, by the clock | 1.00 (1.00 to 1.50)",
        # 3/1, 5/4, 3/2
        "of bare compute without the old policy's pass, by the clock | 1.50 (1.25 to 3.00)",
        "times as fast as TRL, in processor time | 2.25 (2.25 to 2.25)",
        "of bare compute, in processor time | 2.00 (2.00 to 2.00)",
        # 4 / (2 - 1)
        "of bare compute without the old policy's pass, in processor time | 4.00 (4.00 to 4.00)",
        "of the FLOPs of TRL | 0.50",
        "of the peak memory of TRL | 0.50",
        "of the FLOPs of bare compute | 1.50",
        "of the peak memory of bare compute | 2.00",
    ]


def test_a_reader_sees_in_how_many_steps_the_old_policys_pass_was_made():
    steps = {BARE: [step(2, 2, 1, recomputed=True)] * 3}
    own = {BARE: [step(1, 1, 1, recomputed=True), step(1, 1, 1), step(1, 1, 1)]}
    small = workloads.realistic(4, 8, num_hidden_layers=3)
    counted = {BARE: steps[BARE][0], OWN: own[BARE][0]}
    comparison = Comparison("fixed", workloads.fixed(4, 8), counted, steps, own, {})
    growth = Growth(OWN, small, {"base": [step(1, 1)] * 2, "layers": [step(2, 2, recomputed=True), step(3, 3)]})
    written = text([comparison], [growth], Machine.begin(2).end())
    assert "| steps with the old policy's pass | 3 of 3 | 1 of 3 |" in written
    assert "made the old policy's pass in 1 of 4 steps" in written
    # (2/1 + 3/1) / 2
    assert "median of 2 rounds" in written and "| many layers | 2.50 | 1.00 |" in written


def test_programs_take_turns_and_each_is_first_in_turn():
    made = []

    class Program:
        def __init__(self, name):
            self.name = name

        def step(self):
            made.append(self.name)
            return self.name

    steps = take_turns([Program("a"), Program("b")], rounds=3)
    assert made == ["a", "b"] * WARM_UP + ["a", "b", "b", "a", "a", "b"]
    assert steps == [["a"] * 3, ["b"] * 3]


def test_the_page_keeps_what_is_outside_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_between_markers(page, "new\n")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


@pytest.mark.parametrize("count, mean", [(32, 16), (16, 8), (64, 16)])
def test_lengths_have_their_mean_and_a_long_tail(count, mean):
    lengths = workloads.spread_lengths(count, mean)
    assert sum(lengths) == count * mean
    assert min(lengths) >= 1 and 3 * mean <= max(lengths) <= 8 * mean
    assert sorted(lengths)[count // 2] < mean
