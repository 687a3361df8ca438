"""Metrics that reward functions log themselves (`log_metric`), as in TRL; the trainer combines those of all ranks."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress


class LoggedMetrics:
    """What reward functions have logged on this rank since `pop`: sum and number of the values by name.

    Functions may call it from several threads; a value is added at once.
    """

    def __init__(self) -> None:
        self._values: list[tuple[str, float]] = []

    def log(self, name: str, value: float) -> None:
        """Adds one value to the metric `name`; the run logs the mean of all calls in a step.

        Raises:
            ValueError: if the name is no word, or the value no finite number.
        """
        if not isinstance(name, str) or not name or any(character.isspace() for character in name):
            raise ValueError(f"log_metric was called with the name {name!r}; give a word without spaces")
        number = math.nan
        with suppress(TypeError, ValueError):
            number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {value!r}): the value must be one finite number")
        self._values.append((name, number))

    def pop(self) -> dict[str, list[float]]:
        """Returns [sum, number] of the values of each name, and forgets them."""
        values, self._values = self._values, []
        return merged([{name: [value, 1]} for name, value in values])


def merged(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns [sum, number] of each name over `parts`, such as those of all ranks."""
    names = sorted({name for part in parts for name in part})
    of_names = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: [math.fsum(v[0] for v in found), sum(v[1] for v in found)] for name, found in of_names.items()}
