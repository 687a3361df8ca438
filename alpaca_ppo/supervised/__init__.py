"""What comes before PPO: supervised fine-tuning and reward models, with the `Trainer` of transformers."""

import shlex
import time
from typing import Any

from tqdm import tqdm
from transformers import Trainer, TrainerCallback

from alpaca_ppo.distributed.random_states import kept_random_states
from alpaca_ppo.library_output import has_screen, transformers_bars
from alpaca_ppo.tracking.console import number


class _HeldOut(TrainerCallback):
    """Evaluates the held-out data when the training begins and ends, which moves none of its random numbers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.found = trainer, list[dict[str, float]]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        with kept_random_states():
            self.found.append(self._trainer.evaluate())

    on_train_end = on_train_begin


def train_and_report(trainer: Trainer, next_command: str) -> None:
    """Trains and saves the model, and prints what the training has changed, where the model is, and what comes next.

    Args:
        trainer: of the run.
        next_command: its last argument is the model's folder.
    """
    held_out, folder, began = _HeldOut(trainer), str(trainer.args.output_dir), time.perf_counter()
    if trainer.eval_dataset is not None:
        trainer.add_callback(held_out)
    with transformers_bars(shown=has_screen()):
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
    if not trainer.is_world_process_zero():
        return
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    changed = [("training loss", losses[0], losses[-1])] if len(losses) > 1 else []
    if held_out.found:
        before, after = held_out.found
        names = [key for key in ("eval_loss", "eval_accuracy") if key in before]
        changed = [(key.replace("_", " "), before[key], after[key]) for key in names]
    print(f"done: {trainer.state.global_step} steps in {tqdm.format_interval(time.perf_counter() - began)}")
    for name, start, end in changed:
        print(f"  {name:13} {number(start):>10} -> {number(end):>10}")
    print(f"model:       {folder}\nnext:        {next_command} {shlex.quote(folder)}")
