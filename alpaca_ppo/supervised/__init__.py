"""What comes before PPO: supervised fine-tuning and reward models, with the `Trainer` of transformers."""

import shlex
import time

from tqdm import tqdm
from transformers import Trainer

from alpaca_ppo.distributed.random_states import kept_random_states
from alpaca_ppo.library_output import has_screen, transformers_bars
from alpaca_ppo.tracking.console import number


def train_and_report(trainer: Trainer, next_command: str) -> None:
    """Trains and saves the model, and prints what the training has changed, where the model is, and what comes next.

    Held-out data are evaluated before and after, which moves no random number of the training; not under DeepSpeed,
    which cannot evaluate before it trains.

    Args:
        trainer: of the run.
        next_command: its last argument is the model's folder.
    """
    folder, resumed, began = str(trainer.args.output_dir), trainer.args.resume_from_checkpoint, time.perf_counter()
    evaluates = trainer.eval_dataset is not None and not resumed and not trainer.is_deepspeed_enabled
    with transformers_bars(shown=has_screen()):
        with kept_random_states():
            before = trainer.evaluate() if evaluates else {}
        trainer.train(resume_from_checkpoint=resumed)
        trainer.save_model()
        after = trainer.evaluate() if evaluates else {}
    if not trainer.is_world_process_zero():
        return
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    changed = [("training loss", losses[0], losses[-1])] if len(losses) > 1 else []
    held_out = [key for key in ("eval_loss", "eval_accuracy") if key in before]
    changed = [(key.replace("_", " "), before[key], after[key]) for key in held_out] or changed
    print(f"done: {trainer.state.global_step} steps in {tqdm.format_interval(time.perf_counter() - began)}")
    for name, start, end in changed:
        print(f"  {name:13} {number(start):>10} -> {number(end):>10}")
    print(f"model:       {folder}\nnext:        {next_command} {shlex.quote(folder)}")
