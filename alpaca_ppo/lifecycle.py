"""Where a run stands, and the `transformers.TrainerCallback`s that listen to it.

transformers' own CallbackHandler is not used: it expects TrainingArguments and decides by itself when to log,
evaluate and save.
"""

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState


class Lifecycle:
    """State, control flags and callbacks of one run.

    Args:
        callbacks: instances or classes, told of train begin and end, step begin and end, log, evaluate, save; may set
            `should_training_stop`, `should_save`, `should_evaluate` and `should_log`.
        state: the run's state, shared with the trainer.
    """

    def __init__(self, callbacks: Sequence[TrainerCallback], state: TrainerState) -> None:
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.state = state
        self.control = TrainerControl()

    def begin_step(self) -> None:
        """Clears the flags, each of which asks for one action."""
        self.control.should_save = self.control.should_evaluate = self.control.should_log = False

    def notify(self, event: str, args: Any, **context: Any) -> None:
        """Calls `event` (a method name of TrainerCallback) of each callback; a returned control takes the place of
        the old one.
        """
        for callback in self.callbacks:
            self.control = getattr(callback, event)(args, self.state, self.control, **context) or self.control
