"""`BaseTrainer`: the loop over steps, with evaluation, logging, checkpoints, callbacks and signals around each.

What a step computes is in `ppo_trainer`, how a checkpoint is written in `checkpoint`.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback

from alpaca_ppo.checkpoint import export
from alpaca_ppo.checkpoint.compatibility import check_identity, run_identity
from alpaca_ppo.checkpoint.directory import RESUME, RunLock
from alpaca_ppo.checkpoint.manager import CheckpointManager, Component
from alpaca_ppo.checkpoint.model_card import TrainedRun
from alpaca_ppo.checkpoint.serialization import Checkpoint
from alpaca_ppo.config.credentials import without_credentials
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, check_argument_names
from alpaca_ppo.data.schedule import StepPrompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.accelerator import hardware
from alpaca_ppo.distributed.collectives import record_error
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.distributed.random_states import kept_random_states, seed_random_states
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.ppo.mismatch import SamplerMismatch
from alpaca_ppo.ppo.rollouts import RolloutCollector
from alpaca_ppo.ppo.updates import Updater
from alpaca_ppo.report.refresher import ReportRefresher, refresh_report
from alpaca_ppo.tracking.callbacks import CallbackHandler, EvaluationMetrics, StopAboveKL
from alpaca_ppo.tracking.console import Console
from alpaca_ppo.tracking.results import WeightsStep
from alpaca_ppo.tracking.run_log import check_metrics, metrics_identity
from alpaca_ppo.trainer.evaluation import Evaluator, Prompt, answer_texts
from alpaca_ppo.trainer.preflight import check_room, checked_hub_id
from alpaca_ppo.trainer.progress import TrainProgress
from alpaca_ppo.trainer.run_doctor import RunDoctor
from alpaca_ppo.trainer.setup import RunParts
from alpaca_ppo.types import PromptBatch


class BaseTrainer(ABC):
    """The loop of a run. A subclass makes a step (`step`) and sets `evaluator`; `PPOTrainer` documents the attributes.

    Args:
        parts: what the run is made of.
        callbacks: of the user.
    """

    collector: RolloutCollector
    updater: Updater
    evaluator: Evaluator

    def __init__(self, parts: RunParts, callbacks: Sequence[TrainerCallback]) -> None:
        self.args = parts.args
        self.accelerator = parts.accelerator
        self.processing_class = parts.processing_class
        self.train_prompts = parts.train_prompts
        self.eval_prompts = parts.eval_prompts
        self.schedule = parts.schedule
        self.sampling_params = parts.sampling_params
        self.environments = parts.environments
        self.updater = parts.updater
        self.collector = parts.collector
        self.sampler_check = parts.sampler_check
        self.kl_controller = parts.kl_controller
        self.run_log = parts.run_log
        self.state = parts.state
        self.start = parts.start
        self.run_lock = RunLock(self.accelerator, self.args.output_dir)
        self.progress = TrainProgress(self.state, self.updater)
        self.callback_handler = CallbackHandler(callbacks, self.state, self.built_in_callbacks())
        self.checkpoints = CheckpointManager(
            self.accelerator,
            self.args,
            self.state,
            engine=self.updater.engine,
            scheduler=self.updater.schedules,
            components=self._components,
            # A hash of metrics.jsonl is part of what is saved.
            identity=lambda: self._identity() | {"metrics": metrics_identity(Path(self.args.output_dir))},
            check=self._check_saved,
        )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_argument_names(cls, args, kwargs, (*TRAINER_SECTIONS, *CONFIG_SECTIONS))
        return super().__new__(cls)

    @abstractmethod
    def check_sampler(self) -> None:
        """Checks, before `train` makes its first rollout or evaluation, that the sampler is the policy that is trained.

        The states of the global random generators are restored afterwards.
        """

    @abstractmethod
    def step(self, prompt_batches: Sequence[PromptBatch]) -> dict[str, float]:
        """Makes one step on this rank's prompts and returns its metrics."""

    @abstractmethod
    def log_rollouts(self) -> None:
        """Writes the table of the rollouts of the step that was made last."""

    @property
    def model(self) -> Any:
        """What a step calls: policy and critic, wrapped for DDP or mixed precision if the run needs it."""
        return self.updater.engine.model

    @property
    def actor_critic(self) -> ActorCritic:
        """Policy and critic without the wrapper of DDP or mixed precision around them."""
        return self.updater.engine.actor_critic

    def prompt_batches(self, step: int) -> list[PromptBatch]:
        """This rank's prompts of `step` (from 0) as one batch, which has no rows if the step has fewer prompts than
        there are ranks. A loop of your own holds the lock on the output folder from its first ones on.
        """
        self.run_lock.acquire()
        return self.collector.collate(self.train_prompts, self.step_prompts(step).indices)

    def step_prompts(self, step: int) -> StepPrompts:
        """The dataset indices of `step` (from 0), on all ranks."""
        return self.schedule.prompts_of(step, self.progress.extra_prompts(step))

    def evaluate(self) -> dict[str, float]:
        """Greedy (or sampled, `eval_temperature`) responses to the eval prompts: reward, length and KL to the reference
        as `eval/*`, or `eval/<set>/*` of each of several eval sets; docs/evaluation.md has the rest.

        If `failed_rewards: mask` leaves no response, all of them but `eval/masked_rows` are NaN.

        Sampled evaluations use the same random numbers each time, so that differences come from the policy, and the
        global random generators are left as they were. The table goes to eval/step_*.jsonl; called before `train`, it
        does not replace one that a run with checkpoints has left there.

        Raises:
            ValueError: when the trainer has no eval dataset.
        """
        if not self.eval_prompts:
            raise ValueError("evaluate() needs prompts, but eval_dataset is None; pass eval_dataset to PPOTrainer")
        with self.run_lock.held(), kept_random_states():
            return self.evaluator.run(self.state.global_step)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        num_return_sequences: int = 1,
        do_sample: bool = True,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[list[str]]:
        """Returns the policy's answers to each prompt as text, as it is now; nothing is scored or recorded.

        The same seed gives the same answers, and no random number of the run is touched. Each process samples what it
        is given: under DDP and ZeRO 1 or 2 one of them may call this alone, under ZeRO 3 all must, with the same
        prompts, and so must they where the sampler has weights of its own.

        Args:
            prompts: one prompt or several: texts, or conversations (lists of messages), to which the chat template is
                applied.
            num_return_sequences: answers to each prompt.
            do_sample: False takes the most likely token each time.
            max_new_tokens: tokens of an answer; None = `response_len`.
            temperature: None = that of the run.
            top_k: sample from the k most likely tokens only.
            top_p: sample only from the most likely tokens that together reach this probability.
            seed: of the random numbers.

        Raises:
            ValueError: if there are no prompts, texts and conversations are mixed, a prompt has no tokens, prompt and
                response are longer than the model's positions, or a number is outside its range.
        """
        of_run = self.sampling_params
        params = replace(
            of_run,
            step=0,
            seed=seed,
            do_sample=do_sample,
            num_return_sequences=num_return_sequences,
            max_new_tokens=of_run.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=of_run.temperature if temperature is None else temperature,
            top_k=top_k,
            top_p=top_p,
        )
        return answer_texts(self.collector, self.processing_class, prompts, params)

    def built_in_callbacks(self) -> list[TrainerCallback]:
        """The callbacks of every run, in the order in which they are notified; stop rules are among them."""
        args, log = self.args, self.run_log
        callbacks: list[TrainerCallback] = [Console(args, log), RunDoctor(args, self.accelerator, log)]
        if args.max_kl_to_ref is not None:
            callbacks.append(StopAboveKL(args.max_kl_to_ref, log.message))
        if args.report:
            callbacks.append(ReportRefresher(args.output_dir, is_main=log.is_main, say=log.message))
        return callbacks

    def checkpoint_components(self) -> dict[str, Component]:
        """Additional state of a subclass to save in checkpoints, by name: anything with `state_dict` and
        `load_state_dict`.
        """
        return {}

    def _components(self) -> dict[str, Component]:
        """What a checkpoint holds besides weights, optimizer, schedule and random states, by name."""
        own: dict[str, Component] = {
            "progress": self.progress,
            "kl_controller": self.kl_controller,
            "sampler_check": self.sampler_check,
            "callbacks": self.callback_handler,
        }
        added = self.checkpoint_components()
        if taken := sorted(set(own) & set(added)):
            raise ValueError(
                f"checkpoint_components() returned {', '.join(taken)}, which the trainer saves itself; use another name"
            )
        return own | added

    def train(self, resume_from_checkpoint: bool | str | None = None) -> dict[str, float]:
        """Runs all steps and saves the final models, resuming from a checkpoint if requested; returns the last metrics.

        Seeds the global random generators of Python, NumPy and torch from `seed` and the rank, for reward functions and
        callbacks that draw from them; a resumed run restores them from the checkpoint.

        On SIGTERM or SIGINT the run stops after the current micro-batch or token, saves a checkpoint and exits.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one of `output_dir`.

        Raises:
            ValueError: if another run is writing to `output_dir`; on the other ranks a RuntimeError with the same text.
            SamplerMismatch: if sampler and trainer disagree (`mismatch_action`), once a checkpoint of the steps before
                is written.
            Interrupted: after a signal, once the checkpoint is written: a SystemExit of 143 (SIGTERM) or 130 (SIGINT).
                After SIGINT in a notebook or an interactive interpreter, KeyboardInterrupt.
        """
        with record_error(), self.run_lock.held(), self.collector.preemption.install():
            try:
                return self._train(resume_from_checkpoint)
            except Interrupted as interrupted:
                self._save_interrupted(str(interrupted))
                interrupted.return_to_prompt()
                raise
            except SamplerMismatch:
                # The next update would be meaningless; before the first one there is nothing to save.
                if self.progress.is_current and not self.progress.at_start:
                    self._save_interrupted("sampler and trainer disagree")
                raise

    def _train(self, resume_from_checkpoint: bool | str | None) -> dict[str, float]:
        self._begin(resume_from_checkpoint)
        bar = self.run_log.bar
        with bar.steps(self.schedule.num_steps, initial=self.state.global_step) as steps:
            while not self._finished:
                self.poll()
                self.callback_handler.begin_step()
                self._notify("on_step_begin")
                step = self.state.global_step
                stats = self.step(self.prompt_batches(step))
                # An overridden `step` or `step_with_rollouts` may not have counted it.
                self.progress.count_step(step)
                steps.update()
                self.log_rollouts()
                self._end_step(stats)
            self.poll()
            if self.args.load_best_model_at_end:
                self.checkpoints.load_best(self.state.global_step)
            stats = self.checkpoints.best.stats if self.checkpoints.best_is_loaded else self.progress.stats
            with bar.phase("saving"):
                self.save_model(stats=stats)
        self._notify("on_train_end")
        self.run_log.finish()
        collectives.drain_collectives(self.accelerator)
        return self.progress.stats

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, an instance or a class, on every process alike; see `CallbackHandler.add`."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback, or the first one of a class, and returns it; None if there is none."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or the first one of a class, if there is one."""
        self.callback_handler.pop(callback)

    def push_to_hub(self, hub_model_id: str | None = None) -> str | None:
        """Uploads the policy as it is now, and returns the repository's URL; None on other ranks than the main one.

        Every rank must call it.

        Args:
            hub_model_id: the repository; None = that of the configuration.

        Raises:
            ValueError: if there is neither, or the hub cannot be written to.
        """
        with collectives.raise_on_all_ranks(self.accelerator):
            name = checked_hub_id(hub_model_id or self.args.hub_model_id)
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder, self.progress.stats)
            return export.push_folder(Path(folder) / "policy", name) if self.accelerator.is_main_process else None

    @property
    def _finished(self) -> bool:
        return self.state.global_step >= self.schedule.num_steps or self.callback_handler.control.should_training_stop

    def poll(self) -> None:
        """Ends the run if any rank has received a stop signal; every rank must call this at the same point.

        Raises:
            Interrupted: on every rank, if any rank has received a signal.
        """
        # Stop only where `progress` is up to date: from a checkpoint saved anywhere else, the run could not be resumed
        # exactly.
        if self.progress.is_current:
            self.collector.preemption.poll_all_ranks()

    def save_model(self, output_dir: str | None = None, stats: dict[str, float] | None = None) -> None:
        """Writes `policy/` and `value/`, folders that `from_pretrained` loads, into `output_dir` (or final/). Unlike
        TRL's, it writes no model into the folder itself: load `<output_dir>/policy`.

        Args:
            output_dir: where to write, instead of `<output_dir>/final`.
            stats: metrics for the model card.
        """
        folder = Path(output_dir) if output_dir else Path(self.args.output_dir) / "final"
        scorer = self.collector.scorer
        weights = dict(zip(scorer.names, scorer.weights, strict=True))
        config = without_credentials(asdict(self.args))
        engine, lock = self.updater.engine, nullcontext() if output_dir else self.run_lock.held()
        with lock, engine.gathered_parameters(self.actor_critic), collectives.raise_on_all_ranks(self.accelerator):
            if self.accelerator.is_main_process:
                self.train_prompts.record_wording(self.processing_class)
                export.save_final(
                    folder,
                    self.actor_critic,
                    self.processing_class,
                    TrainedRun(self.weights_step, stats or {}, config, weights),
                )
        # Upload outside the block above, so that the other ranks do not wait while parameters are gathered.
        if self.accelerator.is_main_process and self.args.hub_model_id and output_dir is None:
            export.push_folder(folder / "policy", self.args.hub_model_id)

    @property
    def weights_step(self) -> WeightsStep:
        """Which step of the run the weights in the models are from."""
        best, trained = self.state.best_global_step, self.state.global_step
        if best is None or not (self.checkpoints.best_is_loaded or best == trained):
            return WeightsStep(trained, trained)
        return WeightsStep(best, trained, self.checkpoints.best.metric, self.state.best_metric)

    def save_checkpoint(self, stats: Mapping[str, float] | None = None) -> Path:
        """Writes `checkpoint-<step>`, all that a resumed run needs, complete or not at all; returns its path.

        `stats` are the step's metrics; they decide whether this becomes the best checkpoint (`metric_for_best_model`).
        """
        self.run_lock.acquire()
        folder = self.checkpoints.save(self.state.global_step, stats or {})
        self.progress.saved = self.progress.is_current
        return folder

    def _save_interrupted(self, reason: str) -> None:
        folder = self.checkpoints.folder(self.state.global_step)
        if not self.progress.saved:
            self.progress.rewind()
            self.save_checkpoint()
            self._notify("on_save")
        self.run_log.message(f"{reason}: run saved to {folder}; continue with {RESUME}")
        refresh_report(self.callback_handler.built_in)
        self.run_log.finish()
        collectives.drain_collectives(self.accelerator)

    def _begin(self, resume_from_checkpoint: bool | str | None) -> None:
        folder = self.checkpoints.find(resume_from_checkpoint, has_trained=not self.progress.at_start)
        seed_random_states(self.args.seed, self.accelerator.process_index)
        lines = 0
        if folder is None:
            self.progress.advance(self.progress.stats, step_ended=self.progress.step_ended)
        else:
            lines = self.checkpoints.load(folder).identity["metrics"]["lines"]
            self.state.epoch = self.schedule.epoch_at(self.state.global_step)
            self.progress.saved = folder.resolve() == self.checkpoints.folder(self.state.global_step).resolve()
        # It also waits until every rank has looked at the folder before one of them writes to it.
        with collectives.raise_on_all_ranks(self.accelerator):
            # A run that has no step left only writes its final models again.
            if not self._finished:
                check_room(self.args, self.start.checkpoint_size, self.schedule.num_steps - self.state.global_step)
        # Whether the evaluation before the first step has been logged.
        begun = lines > 0 or not self.progress.at_start
        step = self.progress.step if begun else -1
        self.run_log.begin(
            self.start.record.config(self.args),
            self.start.record.provenance(hardware(self.accelerator), resumed_step=step),
            step=step,
            lines=lines,
        )
        if folder is not None:
            self.run_log.message(f"resuming from {folder} (step {self.state.global_step} of {self.schedule.num_steps})")
        start = self.start
        padding = f", with padding: {start.padding}" if start.padding and self.args.padding_free == "auto" else ""
        fallback = ", sampled by model.generate" if start.sampler_fallback else ""
        if start.sampler_fallback not in padding:
            fallback += f": {start.sampler_fallback}"
        self.run_log.message(
            f"{self.train_prompts}, {self.schedule.num_steps} steps, {self.updater.schedules.totals} in micro-batches "
            f"of at most {self.args.micro_batch_tokens} tokens on each of {self.accelerator.num_processes} processes"
            + padding
            + fallback
        )
        self._notify("on_train_begin")
        if not self._finished:
            with self.run_log.bar.phase("checking the sampler"), kept_random_states():
                self.check_sampler()
        if self.eval_prompts and not begun:
            stats = self._evaluate()
            self.run_log.log(stats, 0)
            self._notify("on_evaluate", metrics=EvaluationMetrics(stats))
        if not self.progress.step_ended:
            self._end_step(self.progress.stats)

    def _identity(self) -> dict[str, Any]:
        return run_identity(
            self.args,
            self.train_prompts,
            self.processing_class,
            self.actor_critic,
            start=self.start.identity,
            optimizer_steps=None if self.start.has_own_schedule else self.updater.schedules.totals,
        )

    def _check_saved(self, folder: Path, saved: Checkpoint) -> None:
        """Checks that the checkpoint `folder` is of this run, and metrics.jsonl of the run that wrote it.

        Called on the main process only, whose identity was saved and which alone writes records.
        """
        check_identity(folder, saved.identity, self._identity(), self.args)
        check_metrics(Path(self.args.output_dir), saved.identity["metrics"])

    def _end_step(self, stats: dict[str, float]) -> None:
        """Evaluates, logs and saves after the update. A run that was interrupted in here resumes here."""
        self.state.epoch = self.schedule.epoch_at(self.state.global_step)
        self.progress.advance(stats, step_ended=False)
        self._notify("on_step_end", metrics=stats)
        step, stats = self.state.global_step, dict(stats)
        last = self._finished
        due = last or (self.args.eval_steps and step % self.args.eval_steps == 0)
        if self.eval_prompts and (due or self.callback_handler.control.should_evaluate):
            stats.update(self._evaluate())
            self._notify("on_evaluate", metrics=EvaluationMetrics(stats))
        self.checkpoints.best.require(stats, evaluation=False)
        report = step % self.args.logging_steps == 0 or last or self.callback_handler.control.should_log
        self.run_log.log(stats, step, report=report)
        self.progress.advance(stats, step_ended=True)
        if report:
            self.state.log_history.append({"step": step, **stats})
            self._notify("on_log", logs=stats)
        # Also after the last step, so that a run killed while it writes the final models need not repeat any training.
        due = self.args.save_steps and (step % self.args.save_steps == 0 or step == self.schedule.num_steps)
        if self.checkpoints.is_best_evaluation(stats) or due or self.callback_handler.control.should_save:
            with self.run_log.bar.phase("saving"):
                self.save_checkpoint(stats)
            self._notify("on_save")

    def _evaluate(self) -> dict[str, float]:
        with self.run_log.bar.phase("evaluating"):
            stats = self.evaluate()
        self.checkpoints.best.require(stats, evaluation=True)
        return stats

    def _notify(self, event: str, **context: Any) -> None:
        """Calls `event` of each callback, with the model and optimizer arguments that transformers' Trainer passes."""
        self.callback_handler.notify(
            event,
            self.args,
            model=self.actor_critic.policy.model,
            processing_class=self.processing_class,
            optimizer=self.updater.engine.optimizer,
            lr_scheduler=self.updater.schedules.of_policy,
            **context,
        )
        self.callback_handler.sync_control(partial(collectives.gather_list, accelerator=self.accelerator))
