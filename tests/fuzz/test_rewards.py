"""Whatever a reward function returns: its numbers are the rewards, or the function is named with what is wrong."""

import math
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from hypothesis import strategies as st

from alpaca_ppo.rewards import build_reward
from alpaca_ppo.rewards.batch import RewardError
from alpaca_ppo.rewards.reward_function import FailureHandling
from tests.fuzz.mutations import deep, mutated_tree, values
from tests.fuzz.oracle import Refused, fuzz, outcome

PROMPTS, COMPLETIONS = ["p one", "p two", "p three"], ["a", "b c", ""]
IDS = [[5], [6, 7], [8, 9, 10]]
ROWS = [{"prompt": prompt, "answer": i} for i, prompt in enumerate(PROMPTS)]
LARGEST = (2 - 2**-23) * 2.0**127
CYCLE: list = []
CYCLE.append(CYCLE)

odd = st.sampled_from(
    [Decimal("0.5"), Fraction(1, 3), Fraction(10**400), 1j, object(), CYCLE, print, b"1", {"score": 1.0}, deep(900)]
    + [2**20000, -(10**400), LARGEST, -LARGEST, LARGEST * (1 + 2**-20), np.float16(0.1), np.longdouble(0.5)]
    + [np.int64(3)]
    + [np.bool_(True), np.datetime64("2020-01-01"), np.array(0.5), np.array([0.5]), np.str_("1"), np.ma.masked]
    + [torch.tensor(0.5), torch.tensor([0.5], requires_grad=True), torch.tensor(1, dtype=torch.int8), pd.NA, pd.NaT]
    + [torch.tensor(1j), torch.empty(0), torch.tensor(0.5, device="meta"), torch.tensor([[1.0]]).to_sparse()]
)
VALID = st.sampled_from([[0.5, -1.0, 2], [0.5, None, 1], [[0.5], [1, 2], [3.0, 0, 1]], [1.0, [0.5, 0.5], [1, None, 2]]])
SHAPES = st.sampled_from([(), (0,), (3,), (3, 1), (1, 3), (3, 3), (4,), (2, 2, 2)])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64]
STRANGE = [
    lambda: (score for score in [1.0] * 3),
    lambda: {0: 1.0},
    lambda: {1.0, 2.0},
    lambda: "1.0",
    lambda: None,
    lambda: True,
    lambda: range(3),
    lambda: pd.Series([1.0] * 3),
    lambda: pd.DataFrame({"x": [1.0] * 3}),
    lambda: CYCLE,
    lambda: NotImplemented,
    lambda: np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
    lambda: b"123",
    lambda: [torch.ones(3)] * 3,
]


@st.composite
def results(draw: Any) -> Any:
    """What a function may return, built anew for every call."""
    scores = draw(
        VALID.flatmap(lambda tree: mutated_tree(tree, values=values | odd)) | st.lists(values | odd, max_size=4)
    )
    kind = draw(st.sampled_from(["list", "list", "list", "tuple", "tensor", "numpy", "strange"]))
    if kind == "tuple":
        return lambda: tuple(scores) if isinstance(scores, list) else scores
    if kind == "tensor":
        shape, dtype, grad = draw(SHAPES), draw(st.sampled_from(DTYPES)), draw(st.booleans())
        return lambda: torch.ones(shape, dtype=dtype).requires_grad_(grad and dtype.is_floating_point)
    if kind == "numpy":
        shape = draw(SHAPES)
        dtype = draw(st.sampled_from(["f4", "f8", "i8", "u8", "?", "c16", "O", "U3", "M8[s]", "f2", "g", "i4,f4"]))
        return lambda: np.ones(shape).astype(dtype) if dtype != "i4,f4" else np.zeros(shape, dtype)
    if kind == "strange":
        return draw(st.sampled_from(STRANGE))
    return lambda: scores


def number_of(score: Any) -> Any:
    """A score as a plain number, list of numbers or None; the text "bad" if it is none of these."""
    if isinstance(score, torch.Tensor | np.ndarray | np.generic):
        try:
            score = score.tolist()
        except Exception:
            return "bad"
    if isinstance(score, list | tuple):
        parts = [_float(part) for part in score]
        return "bad" if "bad" in parts else parts
    return score if score is None else _float(score)


def _float(number: Any) -> Any:
    try:
        return float(number) if isinstance(number, Real) else "bad"
    except OverflowError:
        return "bad"


@fuzz(900, result=results(), is_async=st.booleans(), mask=st.sampled_from([False, False, True]))
def test_what_a_function_returns_is_its_reward_or_refused_by_its_name(result, is_async, mask):
    def judge(prompts: Any, completions: Any, **columns: Any) -> Any:
        return result()

    async def judge_later(prompts: Any, completions: Any, **columns: Any) -> Any:
        return result()

    scorer = build_reward(judge_later if is_async else judge, failure_handling=FailureHandling(mask_rows=mask))
    found = outcome(
        lambda: scorer(PROMPTS, COMPLETIONS, IDS, ROWS), names=("reward source 'judge",), accept=(RewardError,)
    )
    if isinstance(found, Refused):
        return
    returned = result()
    scores = list(map(number_of, returned.tolist() if isinstance(returned, torch.Tensor | np.ndarray) else returned))
    kept = [row for row in range(3) if row not in found.failures]
    assert mask or len(kept) == 3
    assert "bad" not in [scores[row] for row in kept]
    # A row's total in float64, rounded once, is what the source is reported with.
    for row in kept:
        total = math.fsum(scores[row]) if isinstance(scores[row], list) else scores[row]
        assert torch.equal(next(iter(found.by_source.values()))[row], torch.tensor(total, dtype=torch.float32))
        rewards = found.rewards[row]
        assert torch.isfinite(rewards).all()
        assert torch.equal(rewards.sum() if rewards.dim() else rewards, torch.tensor(total, dtype=torch.float32)) or (
            isinstance(scores[row], list) and torch.allclose(rewards.sum(), torch.tensor(total, dtype=torch.float32))
        )
    for row in found.failures:
        assert not found.rewards[row].any()
