"""What a run keeps and tells: checkpoints, final models, the log, and the callbacks that listen.

`PPOTrainer` inherits from here, so that `trainer.py` holds the algorithm alone. How a folder is written is in
`checkpointing` and `export`.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerState

from alpaca_ppo import checkpointing, construction, distributed, export
from alpaca_ppo.batching import PromptSchedule
from alpaca_ppo.config import PPOConfig
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.folders import clean_leftovers
from alpaca_ppo.interruption import Interrupted, Interruption
from alpaca_ppo.kl_controllers import KLController
from alpaca_ppo.lifecycle import Lifecycle
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.resume_point import ResumePoint, UpdateProgress
from alpaca_ppo.rollouts import RolloutCollector
from alpaca_ppo.tracking import RunLog
from alpaca_ppo.updates import Updater


class RunKeeping:
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
    lifecycle: Lifecycle
    interruption: Interruption
    resume_point: ResumePoint
    run_log: RunLog | None
    evaluate: Callable[[], dict[str, float]]

    @property
    def actor_critic(self) -> ActorCritic:
        """Policy and critic without the wrapper of DDP or mixed precision around them."""
        unwrapped: ActorCritic = self.accelerator.unwrap_model(self.updater.model)
        return unwrapped

    def save_model(self, output_dir: str | None = None, stats: dict[str, float] | None = None) -> None:
        """Writes `policy/` and `value/`, folders that `from_pretrained` loads, into `output_dir` (or final/)."""
        folder = Path(output_dir) if output_dir else Path(self.args.output_dir) / "final"
        if self.accelerator.is_main_process:
            about: dict[str, Any] = {
                "figures": stats or {},
                "config": asdict(self.args),
                "merged": self.args.merge_on_save,
            }
            export.save_final(folder, self.actor_critic, self.processing_class, **about)
            if self.args.push_to_hub and output_dir is None:
                export.push_folder(folder / "policy", str(self.args.hub_model_id))
        self.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> Path:
        """Writes `checkpoint-<step>`, all that a resumed run needs, complete or not at all; returns its path."""
        folder = self._checkpoint_folder
        extra = self._progress()
        if self.accelerator.is_main_process:
            checkpointing.save_checkpoint(
                folder,
                model=self.actor_critic,
                optimizer=self.updater.optimizer,
                scheduler=self.updater.scheduler,
                extra=extra | construction.run_identity(self.args, self.schedule, self.actor_critic),
                save_total_limit=self.args.save_total_limit,
            )
        self.accelerator.wait_for_everyone()
        self.resume_point.saved = self._may_stop
        return folder

    @property
    def _checkpoint_folder(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"

    def _progress(self) -> dict[str, Any]:
        """How far the run has come; every rank tells its part."""
        point = self.resume_point if self._may_stop else ResumePoint()
        update = point.update
        return {
            "global_step": self.state.global_step,
            "kl_controller": self.kl_controller.state_dict(),
            "learning_rate": self.updater.learning_rate,
            "stats": point.stats,
            "step_ended": point.step_ended,
            "update": update and update.state_dict(distributed.gather_list(update.of_rank(), self.accelerator)),
        }

    @property
    def _may_stop(self) -> bool:
        """Whether the resume point tells where the run stands, also where a subclass trains in its own way."""
        point = self.resume_point
        return (point.step, point.updates) == (self.state.global_step, self.updater.taken)

    def _check(self) -> None:
        if self._may_stop:
            self.interruption.check_together()

    def _reach(self, **changes: Any) -> None:
        self.resume_point.move(step=self.state.global_step, updates=self.updater.taken, **changes)

    def _save_interrupted(self, interrupted: Interrupted) -> None:
        if not self.resume_point.saved:
            self.resume_point.rewind()
            self.save_checkpoint()
            self._notify("on_save")
        self._log.message(
            f"{interrupted}: {self._checkpoint_folder} holds where the run stands; go on with "
            "resume_from_checkpoint: true"
        )
        self._log.finish()
        self.run_log = None
        distributed.settle(self.accelerator)

    @property
    def _log(self) -> RunLog:
        if self.run_log is None:
            # Outside train() nothing that an earlier run left in output_dir is dropped.
            self.run_log = construction.make_run_log(self.accelerator, self.args, resume_step=None)
        return self.run_log

    def _begin(self, resume_from_checkpoint: bool | str | None) -> None:
        self.collector.scorer.around_functions = self.interruption.among_strangers
        if self.accelerator.is_main_process:
            clean_leftovers(self.args.output_dir)
        self.accelerator.wait_for_everyone()
        if resume_from_checkpoint:
            self._load_checkpoint(resume_from_checkpoint)
        else:
            checkpointing.refuse_finished_run(self.args.output_dir)
            self._reach()
        point = self.resume_point
        fresh = point.step == 0 and point.update is None
        # Every rank has looked at the folder before one of them writes to it.
        self.accelerator.wait_for_everyone()
        if self.run_log is None:
            kept = {"resume_step": -1 if fresh else point.step, "step_ended": point.step_ended}
            self.run_log = construction.make_run_log(self.accelerator, self.args, **kept)
        self._log.message(
            f"{len(self.train_prompts)} prompts ({self.train_prompts.num_dropped} dropped as over-long), "
            f"{self.schedule.num_steps} steps, {self.optimizer_steps} optimizer steps of {self.updater.micro_batches} "
            f"micro-batches on each of {self.accelerator.num_processes} processes"
        )
        self._notify("on_train_begin")
        if fresh and self.eval_prompts is not None:
            stats = self.evaluate()
            self._log.log(stats, 0)
            self._notify("on_evaluate", metrics=stats)
        if not point.step_ended:
            self._end_step(point.stats)

    def _load_checkpoint(self, resume_from_checkpoint: bool | str) -> None:
        folder = checkpointing.resolve_checkpoint(resume_from_checkpoint, self.args.output_dir)
        extra = checkpointing.load_checkpoint(
            folder,
            model=self.actor_critic,
            optimizer=self.updater.optimizer,
            scheduler=self.updater.scheduler,
            expected=construction.run_identity(self.args, self.schedule, self.actor_critic),
        )
        self.state.global_step = extra["global_step"]
        self.state.epoch = self.schedule.epoch_at(self.state.global_step)
        self.kl_controller.load_state_dict(extra["kl_controller"])
        self.updater.learning_rate = extra["learning_rate"]
        accelerator = self.accelerator
        ranks = {"rank": accelerator.process_index, "num_ranks": accelerator.num_processes}
        update = UpdateProgress.from_state(extra["update"], **ranks) if extra["update"] else None
        self._reach(stats=extra["stats"], step_ended=extra["step_ended"], update=update)
        self.resume_point.saved = folder.resolve() == self._checkpoint_folder.resolve()

    def _end_step(self, stats: dict[str, float]) -> None:
        """What follows the update: evaluation, records, checkpoint. An interrupted run comes back here."""
        self._reach(stats=stats, step_ended=False, update=None)
        self._notify("on_step_end")
        step, stats = self.state.global_step, dict(stats)
        if why := self.lifecycle.stop_beyond(stats, max_kl_to_ref=self.args.max_kl_to_ref):
            self._log.message(f"step {step}: {why}")
        last = step == self.schedule.num_steps or self.lifecycle.control.should_training_stop
        due = last or (self.args.eval_steps and step % self.args.eval_steps == 0)
        if self.eval_prompts is not None and (due or self.lifecycle.control.should_evaluate):
            stats.update(self.evaluate())
            self._notify("on_evaluate", metrics=stats)
        report = step % self.args.logging_steps == 0 or last or self.lifecycle.control.should_log
        self._log.log(stats, step, report=report)
        self._reach(stats=stats, step_ended=True)
        if report:
            self.state.log_history.append({"step": step, **stats})
            self._notify("on_log", logs=stats)
        # At the end too: a run killed while it writes the final models has nothing to compute again.
        due = self.args.save_steps and (step % self.args.save_steps == 0 or step == self.schedule.num_steps)
        if due or self.lifecycle.control.should_save:
            self.save_checkpoint()
            self._notify("on_save")

    def _notify(self, event: str, **context: Any) -> None:
        context |= {"model": self.actor_critic.policy.model, "processing_class": self.processing_class}
        context |= {"optimizer": self.updater.optimizer, "lr_scheduler": self.updater.scheduler}
        self.lifecycle.notify(event, self.args, **context)
