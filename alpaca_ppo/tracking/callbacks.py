"""The `transformers.TrainerCallback`s of a run, with its state and control flags, and `StopAboveKL`.

transformers' CallbackHandler expects TrainingArguments and decides itself when to log, evaluate and save.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

CONTROL_FLAGS = ("should_training_stop", "should_save", "should_evaluate", "should_log")


class EvaluationMetrics(dict[str, float]):
    """The metrics of an evaluation. `get` ignores a prefix "eval_", under which EarlyStoppingCallback looks for
    `eval/scores`.
    """

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, super().get(name.removeprefix("eval_"), default))


class StopAboveKL(TrainerCallback):
    """Ends the run with a checkpoint once the KL to the reference exceeds `max_kl_to_ref`, in nats per response."""

    def __init__(self, max_kl_to_ref: float, say: Callable[[str], Any]) -> None:
        self._limit, self._say = max_kl_to_ref, say

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Ends the run if the step's KL is above the limit. Raises `ValueError` if the metrics lack it."""
        if (kl := context["metrics"].get("objective/kl_sum_seq")) is None:
            raise ValueError(f"max_kl_to_ref is {self._limit}, but record_step_stats() gave no objective/kl_sum_seq")
        if kl > self._limit:
            control.should_save = control.should_training_stop = True
            self._say(
                f"step {state.global_step}: objective/kl_sum_seq is {kl:.4g} nats, above max_kl_to_ref "
                f"({self._limit}): the run ends here, with a checkpoint; to resume from it, raise the limit"
            )


class CallbackHandler:
    """The callbacks, state and control flags of one run.

    Args:
        callbacks: instances or classes.
        built_in: the trainer's own, notified before the others. They see the same on every rank, so the flags that they
            set are not gathered.
    """

    def __init__(
        self, callbacks: Sequence[TrainerCallback], state: TrainerState, built_in: Sequence[TrainerCallback] = ()
    ) -> None:
        self.callbacks, self.built_in = list[TrainerCallback](), list(built_in)
        self.state, self.control = state, TrainerControl()
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Removes and returns `callback`, or the first one of that class, of the user's first, or None."""
        for callbacks in (self.callbacks, self.built_in):
            for i, other in enumerate(callbacks):
                if other is callback or isinstance(callback, type) and isinstance(other, callback):
                    return callbacks.pop(i)
        return None

    def begin_step(self) -> None:
        """Clears the flags that request a single action."""
        self.control.should_save = self.control.should_evaluate = self.control.should_log = False

    def sync_control(self, gather: Callable[[list[bool]], list[list[bool]]]) -> None:
        """Sets every flag that is set on any rank; `gather` returns what each rank passes to it."""
        if self.callbacks:
            by_flag = zip(*gather([getattr(self.control, flag) for flag in CONTROL_FLAGS]), strict=True)
            for flag, values in zip(CONTROL_FLAGS, by_flag, strict=True):
                setattr(self.control, flag, any(values))

    def state_dict(self) -> dict[str, Any]:
        """Returns the attributes of each callback with an `ExportableState`, by class name."""
        attributes: dict[str, Any] = {}
        for callback in self.callbacks:
            if isinstance(callback, ExportableState):
                attributes.setdefault(type(callback).__name__, []).append(callback.state()["attributes"])
        return attributes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the attributes in the current callbacks of the same classes, in order."""
        remaining = {name: list(instances) for name, instances in state.items()}
        for callback in self.callbacks:
            if isinstance(callback, ExportableState) and remaining.get(type(callback).__name__):
                vars(callback).update(remaining[type(callback).__name__].pop(0))

    def notify(self, event: str, args: Any, **context: Any) -> None:
        """Calls the method `event` of each callback; a returned control replaces the old one."""
        for callback in [*self.built_in, *self.callbacks]:
            self.control = getattr(callback, event)(args, self.state, self.control, **context) or self.control
