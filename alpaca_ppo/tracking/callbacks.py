"""The `transformers.TrainerCallback`s of a run, with its state and control flags, and `StopAt`.

transformers' CallbackHandler expects TrainingArguments and decides itself when to log, evaluate and save.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from alpaca_ppo.config.checks import COMPARISONS
from alpaca_ppo.config.names import did_you_mean

CONTROL_FLAGS = ("should_training_stop", "should_save", "should_evaluate", "should_log")


class EvaluationMetrics(dict[str, float]):
    """The metrics of an evaluation. `get` ignores a prefix "eval_", under which EarlyStoppingCallback looks for
    `eval/scores`.
    """

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, super().get(name.removeprefix("eval_"), default))


class StopAt(TrainerCallback):
    """Ends the run with a checkpoint once a metric of a step, or of an evaluation after a step, is beyond a bound.

    Args:
        option: the option that asks for it, with its value, for messages.
        condition: the metric, one of COMPARISONS, and a number, as `stop_condition` returns them.
        on_any_rank: whether its argument is true on any rank; hooks of a user may give each rank its own metrics.
        remedy: the end of the message, for a bound that nobody wants to reach, and that must not be missed.

    Attributes:
        reached: why the run has ended, in words; None as long as it goes on.
    """

    def __init__(
        self,
        option: str,
        condition: tuple[str, str, float],
        *,
        on_any_rank: Callable[[bool], bool],
        say: Callable[[str], Any],
        remedy: str = "",
    ) -> None:
        self._option, self._remedy = option, remedy
        self._metric, self._comparison, self._bound = condition
        self._on_any_rank, self._say = on_any_rank, say
        # Whether the metric has occurred, or has been said to be missing.
        self._is_settled = False
        self.reached: str | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Ends the run if the step's metric is beyond the bound. If there is no such metric once a step has trained the
        policy, says so, or raises a `ValueError` for a bound that must not be missed.
        """
        if not self._metric.startswith("eval/"):
            trains_policy = state.global_step > args.critic_pretraining_steps
            self._compare(state.global_step, control, context["metrics"], is_complete=trains_policy)

    def on_evaluate(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Ends the run likewise. Without such a metric, raises a `ValueError` before training, and later says so."""
        if self._metric.startswith("eval/"):
            self._compare(state.global_step, control, context["metrics"], is_complete=True)

    def _compare(self, step: int, control: Any, metrics: Mapping[str, float], *, is_complete: bool) -> None:
        value = metrics.get(self._metric)
        self._is_settled |= value is not None
        if is_complete and not self._is_settled:
            problem = f"{self._option}, but there is no metric {self._metric}"
            if step == 0 or self._remedy:
                raise ValueError(f"{problem}; there are {', '.join(metrics)}")
            # It may come yet: entropies are measured in some steps, and a reward function may log what it likes.
            remedy = did_you_mean(self._metric, metrics) or " see docs/metrics.md"
            self._say(f"warning: {problem} yet;{remedy}")
            self._is_settled = True
        met = value is not None and COMPARISONS[self._comparison](value, self._bound)
        # A run can only be ended after a step.
        if step and self._on_any_rank(met):
            control.should_save = control.should_training_stop = True
            was = f"was {value:.4g}" if met else "met the condition on another process"
            self.reached = f"{self._metric} {was} ({self._option})"
            self._say(f"step {step}: {self.reached}: the run ends here, with a checkpoint{self._remedy}")


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
