"""What a run keeps and tells: checkpoints, final models, the log, and the callbacks that listen.

`PPOTrainer` inherits from here, so that `trainer.py` holds the algorithm alone. How a folder is written is in
`checkpointing` and `export`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerState

from alpaca_ppo.atomic_io import clean_leftovers
from alpaca_ppo.checkpoint import directory, export, serialization
from alpaca_ppo.checkpoint.best import best_of, compare_with_best, require_metric, restore_best
from alpaca_ppo.checkpoint.compatibility import REMEDIES, data_identity, expected_identity, run_identity
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.preemption import Interrupted, PreemptionHandler
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.ppo.hook_checks import NonFiniteUpdate
from alpaca_ppo.ppo.kl_controllers import KLController
from alpaca_ppo.ppo.rollouts import RolloutCollector
from alpaca_ppo.ppo.updates import Updater
from alpaca_ppo.tracking.callbacks import CallbackHandler
from alpaca_ppo.tracking.run_log import RunLog, check_metrics, metrics_identity
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.progress import TrainProgress, UpdateProgress
from alpaca_ppo.types import Rollouts


class BaseTrainer:
    """The part of a trainer that outlives a step. The trainer's constructor sets what is declared here."""

    args: PPOConfig
    accelerator: Accelerator
    processing_class: Any
    train_prompts: PromptDataset
    eval_prompts: PromptDataset | None
    schedule: PromptSchedule
    updater: Updater
    optimizer_steps: int
    kl_controller: KLController
    state: TrainerState
    collector: RolloutCollector
    callback_handler: CallbackHandler
    interruption: PreemptionHandler
    progress: TrainProgress
    run_log: RunLog | None
    skipped_updates: int
    evaluate: Callable[[], dict[str, float]]

    @property
    def actor_critic(self) -> ActorCritic:
        """Policy and critic without the wrapper of DDP or mixed precision around them."""
        return self.updater.engine.actor_critic

    def save_model(self, output_dir: str | None = None, stats: dict[str, float] | None = None) -> None:
        """Writes `policy/` and `value/`, folders that `from_pretrained` loads, into `output_dir` (or final/)."""
        folder = Path(output_dir) if output_dir else Path(self.args.output_dir) / "final"
        with (
            self.updater.engine.gathered_parameters(self.actor_critic),
            collectives.raise_on_all_ranks(self.accelerator),
        ):
            self._write_models(folder, stats or {})
        # The others wait at the end of the run, not in the middle of a gathering.
        if self.accelerator.is_main_process and self.args.push_to_hub and output_dir is None:
            export.push_folder(folder / "policy", str(self.args.hub_model_id))

    def _write_models(self, folder: Path, stats: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            about: dict[str, Any] = {
                "figures": stats,
                "config": asdict(self.args),
                "merged": self.args.merge_on_save,
            }
            export.save_final(folder, self.actor_critic, self.processing_class, **about)

    def save_checkpoint(self, stats: Mapping[str, float] | None = None) -> Path:
        """Writes `checkpoint-<step>`, all that a resumed run needs, complete or not at all; returns its path.

        `stats` are the step's metrics, by which it may become the best one (`metric_for_best_model`).
        """
        folder, progress = self._checkpoint_folder, self._progress()
        compare_with_best(self.state, stats or {}, folder, self.args)
        engine = self.updater.engine
        # Ranks put together what lies in parts on them; one writes it.
        state: dict[str, Any] = {"weights": engine.weights(), "optimizer": engine.optimizer_state()}
        state["rng"] = collectives.gather_list(serialization.random_states(), self.accelerator)
        extra = progress | {"skipped_updates": self.skipped_updates, "best": best_of(self.state, self.args)}
        with collectives.raise_on_all_ranks(self.accelerator):
            if self.accelerator.is_main_process:
                extra["metrics"] = metrics_identity(Path(self.args.output_dir), progress["last_line"])
                extra["eval_dataset"] = None if self.eval_prompts is None else data_identity(self.eval_prompts)
                serialization.save_checkpoint(
                    folder,
                    **state,
                    scheduler=self.updater.scheduler,
                    extra=extra | self._identity(),
                    save_total_limit=self.args.save_total_limit,
                    best=self.state.best_model_checkpoint,
                )
        self.progress.saved = self._can_checkpoint
        return folder

    @property
    def _checkpoint_folder(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"

    def _progress(self) -> dict[str, Any]:
        """How far the run has come; every rank tells its part."""
        point = self.progress if self._can_checkpoint else TrainProgress()
        update = point.update
        return {
            "global_step": self.state.global_step,
            "last_line": point.last_line if self._can_checkpoint else self.state.global_step,
            "kl_controller": self.kl_controller.state_dict(),
            "learning_rate": self.updater.learning_rate,
            "stats": point.stats,
            "step_ended": point.step_ended,
            "update": update and update.state_dict(collectives.gather_list(update.rank_state(), self.accelerator)),
        }

    @property
    def _can_checkpoint(self) -> bool:
        """Whether the resume point tells where the run stands, also where a subclass trains in its own way."""
        point = self.progress
        return (point.step, point.updates) == (self.state.global_step, self.updater.num_updates)

    def _check(self) -> None:
        if self._can_checkpoint:
            self.interruption.poll_all_ranks()

    def _update_progress(self, rollouts: Rollouts) -> UpdateProgress:
        """How far the update on `rollouts` is. Others than the step's, which a subclass may pass, begin anew: a resumed
        run would not find them.
        """
        update = self.progress.update
        return update if update is not None and update.rollouts is rollouts else UpdateProgress(rollouts, {})

    def _advance(self, **changes: Any) -> None:
        self.progress.advance(step=self.state.global_step, updates=self.updater.num_updates, **changes)

    def _save_interrupted(self, interrupted: Interrupted) -> None:
        # The best checkpoint keeps the weights that were measured. From there a resumed run does the step anew.
        is_best = self.state.best_model_checkpoint == str(self._checkpoint_folder)
        if not self.progress.saved and not is_best:
            self.progress.rewind()
            self.save_checkpoint()
            self._notify("on_save")
        self._log.message(
            f"{interrupted}: {self._checkpoint_folder} holds where the run stands; go on with "
            "resume_from_checkpoint: true"
        )
        self._log.finish()
        self.run_log = None
        collectives.drain_collectives(self.accelerator)

    @property
    def _log(self) -> RunLog:
        if self.run_log is None:
            # Outside train() nothing that an earlier run left in output_dir is dropped.
            self.run_log = setup.make_run_log(self.accelerator, self.args, resume_step=None)
        return self.run_log

    def _begin(self, resume_from_checkpoint: bool | str | None) -> None:
        self.collector.scorer.interruptible_call = self.interruption.interruptible_call
        folder = self._refuse_or_resolve(resume_from_checkpoint)
        if folder is not None:
            self._load_checkpoint(folder)
        else:
            self._advance()
        point = self.progress
        # Every rank has looked at the folder before one of them writes to it.
        self.accelerator.wait_for_everyone()
        if self.run_log is None:
            kept = {"resume_step": -1 if point.at_start else point.step, "step_ended": point.step_ended}
            kept["resume_skipped"] = self.skipped_updates
            self.run_log = setup.make_run_log(self.accelerator, self.args, **kept)
        self._log.message(
            f"{len(self.train_prompts)} prompts ({self.train_prompts.num_dropped} dropped as over-long), "
            f"{self.schedule.num_steps} steps, {self.optimizer_steps} optimizer steps of {self.updater.micro_batches} "
            f"micro-batches on each of {self.accelerator.num_processes} processes"
        )
        self._notify("on_train_begin")
        if self.eval_prompts is None:
            require_metric(self.args, {}, evaluation=True)
        elif point.at_start:
            stats = self._evaluate()
            self._log.log(stats, 0)
            self._notify("on_evaluate", metrics=stats)
        if not point.step_ended:
            self._end_step(point.stats)

    def _refuse_or_resolve(self, resume_from_checkpoint: bool | str | None) -> Path | None:
        """The checkpoint to go on from, or None; what killed processes left in `output_dir` is gone afterwards."""
        folder, output_dir = None, self.args.output_dir
        if resume_from_checkpoint:
            folder = directory.resolve_checkpoint(resume_from_checkpoint, output_dir)
        else:
            directory.refuse_finished_run(output_dir)
        # Not before every rank has seen that the folder is this run's: in another's, a live run may be writing.
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            clean_leftovers(output_dir)
        self.accelerator.wait_for_everyone()
        return folder

    def _load_checkpoint(self, folder: Path) -> None:
        extra = serialization.load_checkpoint(
            folder,
            trained=self.updater.engine,
            scheduler=self.updater.scheduler,
            rank=self.accelerator.process_index,
            expected=expected_identity(self._identity(), self.args),
            remedies=REMEDIES,
            check=lambda extra: check_metrics(Path(self.args.output_dir), extra["metrics"], extra["last_line"]),
        )
        self._compare_eval_data(extra["eval_dataset"])
        restore_best(self.state, extra["best"], folder.parent, self.args)
        self.state.global_step = extra["global_step"]
        self.state.epoch = self.schedule.epoch_at(self.state.global_step)
        self.kl_controller.load_state_dict(extra["kl_controller"])
        self.skipped_updates = extra["skipped_updates"]
        self.updater.learning_rate = extra["learning_rate"]
        ranks = {"rank": self.accelerator.process_index, "num_ranks": self.accelerator.num_processes}
        update = UpdateProgress.from_state(extra["update"], **ranks) if extra["update"] else None
        self._advance(stats=extra["stats"], step_ended=extra["step_ended"], update=update, resumed=True)
        self.progress.saved = folder.resolve() == self._checkpoint_folder.resolve()
        # Every rank has read what it resumes from.
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process and (moved := directory.set_aside_later(folder)):
            print(f"{folder} is not the newest checkpoint; later ones are now {', '.join(path.name for path in moved)}")

    def _identity(self) -> dict[str, Any]:
        return run_identity(self.args, self.train_prompts, self.processing_class, self.actor_critic)

    def _compare_eval_data(self, saved: Mapping[str, Any] | None) -> None:
        """Warns, for it changes figures alone."""
        if saved and self.eval_prompts is not None and saved != (now := data_identity(self.eval_prompts)):
            warnings.warn(
                f"eval_dataset is not the one that the checkpoint's run had ({now} now, {saved} then): eval/* before "
                "and after cannot be compared",
                stacklevel=4,
            )

    def _skip_update(self, refused: NonFiniteUpdate) -> None:
        """Counts and records an optimizer step that was not taken, over the whole run, resumed ones included.

        Raises:
            FloatingPointError: when `max_skipped_updates` of them were counted already.
        """
        self.skipped_updates += 1
        record = {"number": self.skipped_updates, "step": self.state.global_step + 1, "cause": refused.cause}
        self._log.log_skipped_update({**record, "prompt_ids": refused.prompt_ids})
        limit = f"{self.skipped_updates} updates were not finite in this run; max_skipped_updates is"
        if self.skipped_updates > self.args.max_skipped_updates:
            raise FloatingPointError(
                f"step {record['step']}: {refused}. {limit} {self.args.max_skipped_updates}; a run that is resumed "
                "from its last checkpoint may have a higher one"
            ) from refused
        self._log.message(f"step {record['step']}: {refused}. {limit} {self.args.max_skipped_updates}")

    def _end_step(self, stats: dict[str, float]) -> None:
        """What follows the update: evaluation, records, checkpoint. An interrupted run comes back here."""
        self._advance(stats=stats, step_ended=False, update=None)
        self._notify("on_step_end")
        step, stats = self.state.global_step, dict(stats)
        if why := self.callback_handler.stop_if_kl_above(stats, max_kl_to_ref=self.args.max_kl_to_ref):
            self._log.message(f"step {step}: {why}")
        last = step == self.schedule.num_steps or self.callback_handler.control.should_training_stop
        due = last or (self.args.eval_steps and step % self.args.eval_steps == 0)
        if self.eval_prompts is not None and (due or self.callback_handler.control.should_evaluate):
            stats.update(self._evaluate())
            self._notify("on_evaluate", metrics=stats)
        require_metric(self.args, stats, evaluation=False)
        report = step % self.args.logging_steps == 0 or last or self.callback_handler.control.should_log
        self._log.log(stats, step, report=report)
        self._advance(stats=stats, step_ended=True)
        if report:
            self.state.log_history.append({"step": step, **stats})
            self._notify("on_log", logs=stats)
        # At the end too: a run killed while it writes the final models has nothing to compute again.
        due = self.args.save_steps and (step % self.args.save_steps == 0 or step == self.schedule.num_steps)
        if due or self.callback_handler.control.should_save:
            self.save_checkpoint(stats)
            self._notify("on_save")

    def _evaluate(self) -> dict[str, float]:
        stats = self.evaluate()
        require_metric(self.args, stats, evaluation=True)
        return stats

    def _notify(self, event: str, **context: Any) -> None:
        context |= {"model": self.actor_critic.policy.model, "processing_class": self.processing_class}
        context |= {"optimizer": self.updater.optimizer, "lr_scheduler": self.updater.scheduler}
        self.callback_handler.notify(event, self.args, **context)
        self.callback_handler.sync_control(partial(collectives.gather_list, accelerator=self.accelerator))
