"""Where a run stands, and the `transformers.TrainerCallback`s that listen to it.

transformers' own CallbackHandler is not used: it expects TrainingArguments and decides by itself when to log,
evaluate and save.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

FLAGS = ("should_training_stop", "should_save", "should_evaluate", "should_log")
"""What a callback may ask for."""


class CallbackHandler:
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

    def sync_control(self, gather: Callable[[list[bool]], list[list[bool]]]) -> None:
        """Raises every flag that a callback raised on any rank; ranks would wait for one another otherwise.

        Args:
            gather: what each rank passed, in rank order.
        """
        if self.callbacks:
            everywhere = zip(*gather([getattr(self.control, flag) for flag in FLAGS]), strict=True)
            for flag, raised in zip(FLAGS, everywhere, strict=True):
                setattr(self.control, flag, any(raised))

    def stop_if_kl_above(self, stats: Mapping[str, float], *, max_kl_to_ref: float | None) -> str | None:
        """Asks for a checkpoint and the end of the run where the policy has left the reference too far behind.

        Args:
            stats: of the step.
            max_kl_to_ref: bound of `objective/kl_sum_seq`, in nats; None = none.

        Returns:
            why, or None where the run goes on.

        Raises:
            ValueError: when there is a bound, but no KL in `stats`.
        """
        if max_kl_to_ref is None:
            return None
        if "objective/kl_sum_seq" not in stats:
            raise ValueError(
                f"max_kl_to_ref is {max_kl_to_ref}, but record_step_stats() returned no objective/kl_sum_seq to "
                "compare it with; add it, or null max_kl_to_ref"
            )
        kl = stats["objective/kl_sum_seq"]
        if kl <= max_kl_to_ref:
            return None
        self.control.should_save = self.control.should_training_stop = True
        return (
            f"objective/kl_sum_seq is {kl:.4g} nats, above max_kl_to_ref ({max_kl_to_ref}): the run ends here, with a "
            "checkpoint. Raise max_kl_to_ref to go on from it; or start anew with a higher kl_coef or a lower "
            "learning_rate"
        )

    def notify(self, event: str, args: Any, **context: Any) -> None:
        """Calls `event` (a method name of TrainerCallback) of each callback; a returned control takes the place of
        the old one.

        Raises:
            ValueError: when a callback reads an argument that `args` does not have, such as EarlyStoppingCallback's
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
                    "have; the callback is made for another trainer: subclass it and override that method, or leave "
                    "it out of callbacks"
                ) from error
