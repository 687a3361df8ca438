"""`BaseTrainer`: the loop over steps, and what happens around a step: evaluation, records, checkpoints, callbacks,
signals.

What a step computes is not here (`ppo_trainer`); how a checkpoint is written is in `checkpoint`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerState

from alpaca_ppo.checkpoint import export
from alpaca_ppo.checkpoint.compatibility import data_identity, expected_identity, run_identity
from alpaca_ppo.checkpoint.manager import BestCheckpoint, CheckpointManager, Component
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset, collate_prompts
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.collectives import record_error
from alpaca_ppo.distributed.preemption import Interrupted, PreemptionHandler
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.ppo.hook_checks import NonFiniteUpdate
from alpaca_ppo.ppo.kl_controllers import KLController
from alpaca_ppo.ppo.updates import Updater
from alpaca_ppo.tracking.callbacks import CallbackHandler
from alpaca_ppo.tracking.run_log import RunLog, check_metrics, metrics_identity
from alpaca_ppo.trainer import setup
from alpaca_ppo.trainer.progress import TrainProgress
from alpaca_ppo.types import PromptBatch


class BaseTrainer:
    """The loop of a run. A subclass computes a step (`step`) and an evaluation (`evaluate`).

    A subclass's constructor sets what is declared here, and then calls `set_up_run`.
    """

    args: PPOConfig
    accelerator: Accelerator
    processing_class: Any
    train_prompts: PromptDataset
    eval_prompts: PromptDataset | None
    schedule: PromptSchedule
    sampling_params: SamplingParams
    updater: Updater
    optimizer_steps: int
    """Of the whole run."""
    kl_controller: KLController
    step: Callable[[Sequence[PromptBatch]], dict[str, float]]
    evaluate: Callable[[], dict[str, float]]

    def set_up_run(self, callbacks: Sequence[Any]) -> None:
        """Builds what keeps the run: its state, its callbacks, its checkpoints and the handler of its signals."""
        self.state = TrainerState(
            max_steps=self.schedule.num_steps, is_world_process_zero=self.accelerator.is_main_process
        )
        self.callback_handler = CallbackHandler(callbacks, self.state)
        self.preemption = PreemptionHandler(self.accelerator)
        self.progress = TrainProgress(self.accelerator, self.state, self.updater)
        best = BestCheckpoint(
            self.state, self.args.metric_for_best_model, greater_is_better=self.args.greater_is_better
        )
        self.checkpoints = CheckpointManager(
            self.accelerator,
            self.args.output_dir,
            engine=self.updater.engine,
            scheduler=self.updater.scheduler,
            components=self.checkpoint_components,
            best=best,
            identity=self._saved_identity,
            expected=lambda: expected_identity(self._identity(), self.args),
            check=self._check_records,
            save_total_limit=self.args.save_total_limit,
        )
        self._run_log: RunLog | None = None

    def checkpoint_components(self) -> dict[str, Component]:
        """What a checkpoint holds besides weights, optimizer, schedule and random states, by name.

        A subclass with state of its own adds it here: anything with `state_dict` and `load_state_dict`.
        """
        return {"progress": self.progress, "kl_controller": self.kl_controller}

    @property
    def actor_critic(self) -> ActorCritic:
        """Policy and critic without the wrapper of DDP or mixed precision around them."""
        return self.updater.engine.actor_critic

    @property
    def run_log(self) -> RunLog:
        """The record of the run on disk; opened without dropping anything where `train` has not begun."""
        if self._run_log is None:
            self._run_log = setup.make_run_log(self.accelerator, self.args, resume_step=None)
        return self._run_log

    def train(self, resume_from_checkpoint: bool | str | None = None) -> dict[str, float]:
        """Runs all steps, from a checkpoint if asked, and saves the final models; returns the last step's metrics.

        SIGTERM and SIGINT end the micro-batch or the sampling under way, save a checkpoint and end the process.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one of `output_dir`.

        Raises:
            Interrupted: after a signal, once the checkpoint is written: a SystemExit of 143 (SIGTERM) or 130 (SIGINT).
        """
        with record_error(), self.preemption.install():
            try:
                return self._train(resume_from_checkpoint)
            except Interrupted as interrupted:
                self._save_interrupted(interrupted)
                raise

    def _train(self, resume_from_checkpoint: bool | str | None) -> dict[str, float]:
        self._begin(resume_from_checkpoint)
        with self.run_log.progress(self.schedule.num_steps, "ppo", initial=self.state.global_step) as bar:
            while not self._finished:
                self.poll()
                self.callback_handler.begin_step()
                self._notify("on_step_begin")
                step = self.state.global_step
                stats = self.step(self.prompt_batches(step))
                # A subclass's own `step` or `step_with_rollouts` need not count.
                self.count_step(step)
                self._end_step(stats)
                bar.update(1)
        self.poll()
        self.save_model(stats=self.progress.stats)
        self._notify("on_train_end")
        self.run_log.finish()
        collectives.drain_collectives(self.accelerator)
        return self.progress.stats

    @property
    def _finished(self) -> bool:
        return self.state.global_step >= self.schedule.num_steps or self.callback_handler.control.should_training_stop

    def count_step(self, step: int) -> None:
        """Records that `step` (from 0) is done: `state.global_step`, on which the next rollout's randomness depends, is
        `step + 1` afterwards, however often this is called.
        """
        self.state.global_step = step + 1
        self.state.epoch = self.schedule.epoch_at(step + 1)

    def poll(self) -> None:
        """Ends the run where a signal has asked for it; every rank must call this at the same point.

        Raises:
            Interrupted: on every rank, where any was asked to end.
        """
        # Elsewhere a checkpoint could not say where the run stands.
        if self.progress.is_current:
            self.preemption.poll_all_ranks()

    def prompt_batches(self, step: int) -> list[PromptBatch]:
        """This rank's prompts of `step` (from 0): one batch, or none where a ragged step has fewer prompts than
        ranks.
        """
        return self.collate(self.train_prompts, self.schedule.indices(step))

    def collate(self, prompts: PromptDataset, indices: Sequence[int]) -> list[PromptBatch]:
        """This rank's share of `prompts[indices]` as a batch; an empty list where it has none."""
        share = collectives.rank_share(indices, self.accelerator)
        return [self.prompt_batch([prompts[i] for i in share], share)] if share else []

    def prompt_batch(self, items: Sequence[Any], prompt_ids: Sequence[int]) -> PromptBatch:
        """`items` of a `PromptDataset` as one batch, left-padded to `query_len`."""
        pad = self.sampling_params.pad_token_id
        return collate_prompts(items, prompt_ids, pad_token_id=pad, query_len=self.args.query_len)

    def save_model(self, output_dir: str | None = None, stats: dict[str, float] | None = None) -> None:
        """Writes `policy/` and `value/`, folders that `from_pretrained` loads, into `output_dir` (or final/).

        Args:
            output_dir: another folder than `final/`.
            stats: figures for the model card.
        """
        folder = Path(output_dir) if output_dir else Path(self.args.output_dir) / "final"
        engine = self.updater.engine
        with engine.gathered_parameters(self.actor_critic), collectives.raise_on_all_ranks(self.accelerator):
            if self.accelerator.is_main_process:
                export.save_final(
                    folder,
                    self.actor_critic,
                    self.processing_class,
                    figures=stats or {},
                    config=asdict(self.args),
                    merged=self.args.merge_on_save,
                )
        # The others wait at the end of the run, not while parameters are gathered.
        if self.accelerator.is_main_process and self.args.push_to_hub and output_dir is None:
            export.push_folder(folder / "policy", str(self.args.hub_model_id))

    def save_checkpoint(self, stats: Mapping[str, float] | None = None) -> Path:
        """Writes `checkpoint-<step>`, all that a resumed run needs, complete or not at all; returns its path.

        `stats` are the step's metrics, by which it may become the best one (`metric_for_best_model`).
        """
        folder = self.checkpoints.save(self.state.global_step, stats or {})
        self.progress.saved = self.progress.is_current
        return folder

    def skip_update(self, refused: NonFiniteUpdate) -> None:
        """Counts and records an optimizer step that was not taken, over the whole run, resumed ones included.

        Raises:
            FloatingPointError: when `max_skipped_updates` of them were counted already.
        """
        self.progress.skipped_updates += 1
        number, step = self.progress.skipped_updates, self.state.global_step + 1
        self.run_log.log_skipped_update(
            {"number": number, "step": step, "cause": refused.cause, "prompt_ids": refused.prompt_ids}
        )
        limit = f"{number} updates were not finite in this run; max_skipped_updates is {self.args.max_skipped_updates}"
        if number > self.args.max_skipped_updates:
            raise FloatingPointError(
                f"step {step}: {refused}. {limit}; a run that is resumed from its last checkpoint may have a higher one"
            ) from refused
        self.run_log.message(f"step {step}: {refused}. {limit}")

    def _save_interrupted(self, interrupted: Interrupted) -> None:
        folder = self.checkpoints.folder(self.state.global_step)
        # The best checkpoint keeps the weights that were measured. From there a resumed run repeats the step.
        is_best = self.checkpoints.best.folder == folder
        if not self.progress.saved and not is_best:
            self.progress.rewind()
            self.save_checkpoint()
            self._notify("on_save")
        self.run_log.message(
            f"{interrupted}: {folder} holds the state of the run; go on with resume_from_checkpoint: true"
        )
        self.run_log.finish()
        self._run_log = None
        collectives.drain_collectives(self.accelerator)

    def _begin(self, resume_from_checkpoint: bool | str | None) -> None:
        folder = self.checkpoints.find(resume_from_checkpoint)
        if folder is None:
            self.progress.advance()
        else:
            extra = self.checkpoints.load(folder)
            self._compare_eval_data(extra["eval_dataset"])
            self.state.epoch = self.schedule.epoch_at(self.state.global_step)
            self.progress.saved = folder.resolve() == self.checkpoints.folder(self.state.global_step).resolve()
        # Every rank has looked at the folder before one of them writes to it.
        self.accelerator.wait_for_everyone()
        if self._run_log is None:
            self._run_log = setup.make_run_log(
                self.accelerator,
                self.args,
                resume_step=-1 if self.progress.at_start else self.progress.step,
                step_ended=self.progress.step_ended,
                resume_skipped=self.progress.skipped_updates,
            )
        self.run_log.message(
            f"{len(self.train_prompts)} prompts ({self.train_prompts.num_dropped} dropped as over-long), "
            f"{self.schedule.num_steps} steps, {self.optimizer_steps} optimizer steps of {self.updater.micro_batches} "
            f"micro-batches on each of {self.accelerator.num_processes} processes"
        )
        self._notify("on_train_begin")
        if self.eval_prompts is None:
            self.checkpoints.best.require({}, evaluation=True)
        elif self.progress.at_start:
            stats = self._evaluate()
            self.run_log.log(stats, 0)
            self._notify("on_evaluate", metrics=stats)
        if not self.progress.step_ended:
            self._end_step(self.progress.stats)

    def _identity(self) -> dict[str, Any]:
        return run_identity(self.args, self.train_prompts, self.processing_class, self.actor_critic)

    def _saved_identity(self) -> dict[str, Any]:
        """What a checkpoint holds of the run it belongs to, its records and its eval data included."""
        last_line = self.progress.last_line if self.progress.is_current else self.state.global_step
        return {
            **self._identity(),
            "metrics": metrics_identity(Path(self.args.output_dir), last_line),
            "eval_dataset": None if self.eval_prompts is None else data_identity(self.eval_prompts),
        }

    def _check_records(self, extra: Mapping[str, Any]) -> None:
        """Checks that metrics.jsonl is of the run that wrote the checkpoint."""
        check_metrics(Path(self.args.output_dir), extra["metrics"], extra["components"]["progress"]["last_line"])

    def _compare_eval_data(self, saved: Mapping[str, Any] | None) -> None:
        """Warns of other eval data, which change figures alone."""
        if saved and self.eval_prompts is not None and saved != (now := data_identity(self.eval_prompts)):
            warnings.warn(
                f"eval_dataset differs from the one that the checkpoint's run had ({now} now, {saved} then): eval/* "
                "before and after cannot be compared",
                stacklevel=5,
            )

    def _end_step(self, stats: dict[str, float]) -> None:
        """What follows the update: evaluation, records, checkpoint. An interrupted run comes back here."""
        self.progress.advance(stats=stats, step_ended=False, update=None)
        self._notify("on_step_end")
        step, stats = self.state.global_step, dict(stats)
        if reason := self.callback_handler.stop_if_kl_above(stats, max_kl_to_ref=self.args.max_kl_to_ref):
            self.run_log.message(f"step {step}: {reason}")
        last = step == self.schedule.num_steps or self.callback_handler.control.should_training_stop
        due = last or (self.args.eval_steps and step % self.args.eval_steps == 0)
        if self.eval_prompts is not None and (due or self.callback_handler.control.should_evaluate):
            stats.update(self._evaluate())
            self._notify("on_evaluate", metrics=stats)
        self.checkpoints.best.require(stats, evaluation=False)
        report = step % self.args.logging_steps == 0 or last or self.callback_handler.control.should_log
        self.run_log.log(stats, step, report=report)
        self.progress.advance(stats=stats, step_ended=True)
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
        self.checkpoints.best.require(stats, evaluation=True)
        return stats

    def _notify(self, event: str, **context: Any) -> None:
        """Calls `event` of each callback, with models and optimizer as transformers' trainer passes them."""
        self.callback_handler.notify(
            event,
            self.args,
            model=self.actor_critic.policy.model,
            processing_class=self.processing_class,
            optimizer=self.updater.optimizer,
            lr_scheduler=self.updater.scheduler,
            **context,
        )
        self.callback_handler.sync_control(partial(collectives.gather_list, accelerator=self.accelerator))
