"""The picture in a model card: reward and KL over the run, as an SVG that needs no library."""

from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 60, 40, 180
_CURVES = (
    ("objective/scores", "reward, training prompts", "#1f5fa8", "left"),
    ("eval/scores", "reward, held-out prompts", "#c2570c", "left"),
    ("objective/kl_sum_seq", "KL to the reference, nats (right)", "#6b7280", "right"),
)
_MOST_POINTS = 400


def training_curve(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG of the rewards (left axis) and the KL (right axis) by step; "" with fewer than two steps.

    Args:
        records: the lines of metrics.jsonl.
    """
    points = {
        name: [(record["step"], record[name]) for record in records if record.get(name) is not None]
        for name, *_ in _CURVES
    }
    steps = [step for series in points.values() for step, _ in series]
    if not steps or min(steps) == max(steps):
        return ""
    parts, legend = [], 0
    for axis in ("left", "right"):
        of_axis = [curve for curve in _CURVES if curve[3] == axis and points[curve[0]]]
        values = [value for name, *_ in of_axis for _, value in points[name]]
        if not values:
            continue
        low, high = min(values), max(values)
        x, anchor = (_LEFT - 6, "end") if axis == "left" else (_WIDTH - _RIGHT + 6, "start")
        parts += [_text(x, _BOTTOM, f"{low:.3g}", anchor), _text(x, _TOP + 8, f"{high:.3g}", anchor)]
        for name, label, color, _ in of_axis:
            parts.append(_line(points[name], (min(steps), max(steps)), (low, high), color))
            parts.append(_text(_LEFT + 185 * legend, 20, label, "start", color))
            legend += 1
    parts += [_text(_LEFT, _BOTTOM + 20, f"step {min(steps)}", "start")]
    parts += [_text(_WIDTH - _RIGHT, _BOTTOM + 20, str(max(steps)), "end")]
    frame = f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_WIDTH - _RIGHT}V{_TOP}" fill="none" stroke="#9ca3af"/>'
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11">\n'
        + "\n".join([background, frame, *parts])
        + "\n</svg>\n"
    )


def _line(series: Sequence[tuple[int, float]], steps: tuple[int, int], values: tuple[float, float], color: str) -> str:
    stride = -(-len(series) // _MOST_POINTS)
    shown = [*series[:-1:stride], series[-1]]
    span = (values[1] - values[0]) or 1.0
    places = [
        (
            _LEFT + (step - steps[0]) / (steps[1] - steps[0]) * (_WIDTH - _LEFT - _RIGHT),
            _BOTTOM - (value - values[0]) / span * (_BOTTOM - _TOP),
        )
        for step, value in shown
    ]
    return (
        f'<polyline fill="none" stroke="{color}" stroke-width="2" points="'
        + " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        + '"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, color: str = "#374151") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{text}</text>'
