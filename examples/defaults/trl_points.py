"""What TRL's programs leave behind: their policy at points of a run, and the processor seconds until each."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


class Points(TrainerCallback):
    """Saves the policy, of which the time does not count, and writes points.json.

    Args:
        folder: to write to.
        number: of points, the last of which is the end.
        tokenizer: the policy's.
        policy: returns it.
        responses: returns the number of responses so far, given transformers' `TrainerState`.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        tokenizer: PreTrainedTokenizerBase,
        policy: Callable[[], PreTrainedModel],
        responses: Callable[[Any], int],
    ) -> None:
        self._folder, self._number, self._tokenizer = folder, number, tokenizer
        self._policy, self._responses = policy, responses
        self._points: list[dict[str, Any]] = []
        self.optimizer_steps = 0
        self._seconds = self._start = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.process_time()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer_steps += 1

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        self._seconds += time.process_time() - self._start
        if state.global_step in [round(state.max_steps * (n + 1) / self._number) for n in range(self._number)]:
            folder = self._folder / f"policy_{len(self._points)}"
            self._policy().save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
            point = {"policy": str(folder), "responses": self._responses(state), "seconds": self._seconds}
            self._points.append(point)
        self._start = time.process_time()

    def write(self, **facts: Any) -> None:
        """Writes points.json, with further facts of the run."""
        (self._folder / "points.json").write_text(json.dumps({"points": self._points, **facts}, indent=2), "utf-8")
