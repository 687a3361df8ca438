"""The `transformers.TrainerCallback`s of a run, with its state and control flags.

transformers' own CallbackHandler is not used, because it expects TrainingArguments and decides itself when to log,
evaluate and save.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

CONTROL_FLAGS = ("should_training_stop", "should_save", "should_evaluate", "should_log")
"""The flags of `transformers.TrainerControl` that a callback may set."""


class CallbackHandler:
    """The callbacks, state and control flags of one run.

    Args:
        callbacks: instances or classes. They are notified of train begin and end, step begin and end, log, evaluate and
            save, and may set `CONTROL_FLAGS`.
        state: the run's state, shared with the trainer.
    """

    def __init__(self, callbacks: Sequence[TrainerCallback], state: TrainerState) -> None:
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.state = state
        self.control = TrainerControl()

    def begin_step(self) -> None:
        """Clears the flags that request a single action."""
        self.control.should_save = self.control.should_evaluate = self.control.should_log = False

    def sync_control(self, gather: Callable[[list[bool]], list[list[bool]]]) -> None:
        """Sets every flag that a callback set on any rank, so that all ranks take the same actions.

        Args:
            gather: returns the flags that each rank passes to it, in rank order.
        """
        if self.callbacks:
            by_flag = zip(*gather([getattr(self.control, flag) for flag in CONTROL_FLAGS]), strict=True)
            for flag, values in zip(CONTROL_FLAGS, by_flag, strict=True):
                setattr(self.control, flag, any(values))

    def stop_if_kl_above(self, stats: Mapping[str, float], *, max_kl_to_ref: float | None) -> str | None:
        """Requests a checkpoint and the end of the run if the KL to the reference is too large.

        Args:
            stats: the step's metrics.
            max_kl_to_ref: largest allowed `objective/kl_sum_seq`, in nats; None for no limit.

        Returns:
            The reason for stopping, or None if the run continues.

        Raises:
            ValueError: if there is a limit, but no KL in `stats`.
        """
        if max_kl_to_ref is None:
            return None
        if "objective/kl_sum_seq" not in stats:
            raise ValueError(
                f"max_kl_to_ref is {max_kl_to_ref}, but record_step_stats() returned no objective/kl_sum_seq to "
                "compare it with; return it, or set max_kl_to_ref to null"
            )
        kl = stats["objective/kl_sum_seq"]
        if kl <= max_kl_to_ref:
            return None
        self.control.should_save = self.control.should_training_stop = True
        return (
            f"objective/kl_sum_seq is {kl:.4g} nats, above max_kl_to_ref ({max_kl_to_ref}): the run ends here, with a "
            "checkpoint. Raise max_kl_to_ref to resume from it, or start a new run with a higher kl_coef or a lower "
            "learning_rate"
        )

    def notify(self, event: str, args: Any, **context: Any) -> None:
        """Calls `event` (a method name of TrainerCallback) on each callback; a returned control replaces the old one.

        Raises:
            ValueError: if a callback reads an argument that `args` does not have; EarlyStoppingCallback, for one, reads
                `load_best_model_at_end`.
        """
        for callback in self.callbacks:
            try:
                self.control = getattr(callback, event)(args, self.state, self.control, **context) or self.control
            except AttributeError as error:
                if error.obj is not args:
                    raise
                raise ValueError(
                    f"{type(callback).__name__}.{event} reads args.{error.name}, which {type(args).__name__} does not "
                    "have, because it was written for another trainer; subclass it and override that method, or remove "
                    "it from callbacks"
                ) from error
