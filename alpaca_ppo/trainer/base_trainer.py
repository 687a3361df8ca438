"""`BaseTrainer`: the loop over steps, with evaluation, logging, checkpoints, callbacks and signals around each.

Steps are in `ppo_trainer`, the writing of checkpoints in `checkpoint`.
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

from alpaca_ppo.adapters.checks import UnreachedAdapters
from alpaca_ppo.checkpoint import export
from alpaca_ppo.checkpoint.compatibility import check_identity, run_identity
from alpaca_ppo.checkpoint.directory import RESUME, RunLock
from alpaca_ppo.checkpoint.manager import CheckpointManager, Component
from alpaca_ppo.checkpoint.model_card import TrainedRun
from alpaca_ppo.checkpoint.serialization import Checkpoint
from alpaca_ppo.config.checks import stop_condition
from alpaca_ppo.config.credentials import without_credentials
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, check_argument_names
from alpaca_ppo.data.schedule import StepPrompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.accelerator import hardware
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.distributed.random_states import kept_random_states, seed_random_states
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.ppo.mismatch import SamplerMismatch, last_update
from alpaca_ppo.report.refresher import ReportRefresher, refresh_report
from alpaca_ppo.tracking.callbacks import CallbackHandler, EvaluationMetrics, StopAt
from alpaca_ppo.tracking.console import Console
from alpaca_ppo.tracking.results import WeightsStep
from alpaca_ppo.tracking.run_log import check_metrics, metrics_identity
from alpaca_ppo.trainer.evaluation import Evaluator, Prompt
from alpaca_ppo.trainer.preflight import check_room, checked_hub_id
from alpaca_ppo.trainer.progress import TrainProgress
from alpaca_ppo.trainer.run_doctor import RunDoctor
from alpaca_ppo.trainer.setup import RunParts
from alpaca_ppo.types import PromptBatch, Rollouts


class BaseTrainer(ABC):
    """The loop of a run. A subclass defines `step` and sets `evaluator`; `PPOTrainer` documents the attributes."""

    evaluator: Evaluator
    last_rollouts: Rollouts | None = None

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
        """Checks, before the first rollout or evaluation of `train`, that the sampler agrees with the trained policy.

        The states of the global random generators are restored afterwards.
        """

    @abstractmethod
    def step(self, prompt_batches: Sequence[PromptBatch]) -> dict[str, float]:
        """Takes one step on this rank's prompts and returns its metrics."""

    @abstractmethod
    def log_rollouts(self) -> None:
        """Writes the table of the last step's rollouts."""

    @property
    def model(self) -> Any:
        """Policy and critic, wrapped for DDP or mixed precision if the run needs it."""
        return self.updater.engine.model

    @property
    def actor_critic(self) -> ActorCritic:
        """Policy and critic without that wrapper."""
        return self.updater.engine.actor_critic

    def prompt_batches(self, step: int) -> list[PromptBatch]:
        """This rank's prompts of `step` (from 0) as one batch, which has no rows if there are fewer prompts than ranks.

        Takes the lock on the output folder, for a training loop that does not call `train`.
        """
        self.run_lock.acquire()
        return self.collector.collate(self.train_prompts, self.step_prompts(step).indices)

    def step_prompts(self, step: int) -> StepPrompts:
        """The dataset indices of `step` (from 0), on all ranks."""
        return self.schedule.prompts_of(step, self.progress.extra_prompts(step))

    def evaluate(self) -> dict[str, float]:
        """Responds to the eval prompts, greedily or sampling (`eval_temperature`), and returns metrics `eval/*`, or
        `eval/<set>/*` with several eval sets: reward, length, KL to the reference and those of docs/evaluation.md.

        If `failed_rewards: mask` leaves no response, all but `eval/masked_rows` are NaN.

        Every evaluation uses the same random numbers, so that differences come from the policy, and restores the global
        random generators. It writes the table to eval/step_*.jsonl; called before `train`, it does not overwrite the
        table of an earlier run that has checkpoints.

        Raises:
            ValueError: when the trainer has no eval dataset, or another run is writing to `output_dir`.
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
        """Returns the current policy's answers to each prompt as text; nothing is scored or recorded.

        The same seed gives the same answers, and the run's random numbers are not affected. Under DDP and ZeRO 1 or 2
        each process may call this alone; under ZeRO 3 and FSDP2, or if the sampler has its own copy of the weights, all
        must, with the same prompts.

        Args:
            prompts: one or several texts, or conversations (lists of messages), to which the chat template and the
                run's `system_prompt` are applied. If the run's prompts are messages, a text is a user's message;
                otherwise it is the whole prompt, without a template. Schemas of tools are not added.
            num_return_sequences: answers to each prompt.
            do_sample: False = the most likely token each time.
            max_new_tokens: tokens of an answer; None = `response_len`.
            temperature: None = that of the run.
            top_k: sample from the k most likely tokens only.
            top_p: sample only from the most likely tokens that together reach this probability.
            seed: of the random numbers.

        Raises:
            ValueError: if there are no prompts, texts and conversations are mixed, a prompt has no tokens, prompt and
                response are longer than the model's positions, or a number is outside its range.
        """
        defaults = self.sampling_params
        params = replace(
            defaults,
            seed=seed,
            do_sample=do_sample,
            num_return_sequences=num_return_sequences,
            max_new_tokens=defaults.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=defaults.temperature if temperature is None else temperature,
            top_k=top_k,
            top_p=top_p,
        )
        return self.evaluator.answer_texts(prompts, params)

    def built_in_callbacks(self) -> list[TrainerCallback]:
        """The callbacks of every run, in the order in which they are notified."""
        args, log = self.args, self.run_log
        has_adapter = self.actor_critic.policy.adapters is not None
        doctor = RunDoctor(args, self.accelerator, log, has_adapter=has_adapter)
        unreached = UnreachedAdapters(self.actor_critic.policy.model, log.message)
        callbacks: list[TrainerCallback] = [Console(args, log), doctor, unreached]
        on_any_rank = partial(collectives.any_rank, accelerator=self.accelerator)
        stop_at = partial(StopAt, on_any_rank=on_any_rank, say=log.message)
        if args.stop_at is not None:
            option = f"stop_at: {args.stop_at}"
            callbacks.append(stop_at(option, stop_condition(option, args.stop_at)))
        if (limit := args.max_kl_to_ref) is not None:
            remedy = (
                ". Raise max_kl_to_ref to resume from it, or start a new run with a higher kl_coef or a lower "
                "learning_rate"
            )
            condition = ("objective/kl_sum_seq", ">", limit)
            callbacks.append(stop_at(f"max_kl_to_ref: {limit}", condition, remedy=remedy))
        if args.report:
            callbacks.append(ReportRefresher(args.output_dir, is_main=log.is_main, say=log.message))
        return callbacks

    def checkpoint_components(self) -> dict[str, Component]:
        """State of a subclass to save in checkpoints, by name: objects with `state_dict` and `load_state_dict`."""
        return {}

    def _components(self) -> dict[str, Component]:
        components: dict[str, Component] = {
            "progress": self.progress,
            "kl_controller": self.kl_controller,
            "sampler_check": self.sampler_check,
            "callbacks": self.callback_handler,
        }
        added = self.checkpoint_components()
        if taken := sorted(set(components) & set(added)):
            raise ValueError(f"checkpoint_components() returned {', '.join(taken)}, the trainer's own; rename them")
        return components | added

    def train(self, resume_from_checkpoint: bool | str | None = None) -> dict[str, float]:
        """Takes all steps and saves the final models; returns the metrics of the last step and of its evaluation.

        Seeds the global random generators of Python, NumPy and torch from `seed` and the rank, for reward functions and
        callbacks that draw from them; a resumed run restores their states.

        On SIGTERM or SIGINT the run stops after the current micro-batch or token, saves a checkpoint and exits.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one of `output_dir`.

        Raises:
            ValueError: if the run cannot start or resume in `output_dir`; other ranks may raise a RuntimeError.
            FloatingPointError: if more than `max_skipped_updates` optimizer steps had to be skipped.
            SamplerMismatch: if sampler and trainer disagree (`mismatch_action`), after saving a checkpoint of the
                previous step.
            Interrupted: after a signal, once the checkpoint is saved: a SystemExit of 143 (SIGTERM) or 130 (SIGINT).
                After SIGINT in a notebook or an interactive interpreter, KeyboardInterrupt.
        """
        with collectives.record_error(), self.run_lock.held(), self.collector.preemption.install():
            try:
                return self._train(resume_from_checkpoint)
            except Interrupted as interrupted:
                self._save_interrupted(str(interrupted))
                interrupted.return_to_prompt()
                raise
            except SamplerMismatch:
                # Before the first update there is nothing to save.
                if self.progress.is_current and self.progress.step > 0:
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
                # Again, as an override of `step_with_rollouts` may not have counted it.
                self.progress.count_step(step)
                steps.update()
                self.log_rollouts()
                self._end_step(stats)
            self.poll()
            if self.last_rollouts is not None and not self.eval_prompts:
                self.run_log.message(last_update(self.collector, self.last_rollouts))
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
        """Adds a callback, an instance or a class; call it on every process. See `CallbackHandler.add`."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes and returns a callback, or the first one of a class; None if there is none."""
        return self.callback_handler.pop(callback)

    remove_callback = pop_callback

    def push_to_hub(self, hub_model_id: str | None = None) -> str | None:
        """Uploads the current policy to `hub_model_id` (None = that of the configuration); returns the repository's URL
        on the main rank, None on others. Every rank must call it.

        Raises:
            ValueError: without a name for the repository, or if the hub cannot be written to.
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
        """Ends the run if any rank has received a signal. Every rank must call this at the same point.

        Raises:
            Interrupted: on every rank.
        """
        # Only where `progress` is up to date, so that the run can be resumed exactly.
        if self.progress.is_current:
            self.collector.preemption.poll_all_ranks()

    def save_model(self, output_dir: str | None = None, stats: dict[str, float] | None = None) -> None:
        """Writes `policy/` and `value/`, which `from_pretrained` loads, into `output_dir` (None = the run's `final/`),
        with the metrics `stats` on the model card. Unlike with TRL, the folder itself is no model: load `policy/`.
        That of `final/` is then uploaded to `hub_model_id`, if there is one. Every rank must call this.
        """
        folder = Path(output_dir) if output_dir else Path(self.args.output_dir) / "final"
        scorer = self.collector.scorer
        weights = dict(zip(scorer.names, scorer.weights, strict=True))
        config = without_credentials(asdict(self.args))
        gathered = self.updater.engine.gathered_parameters(self.actor_critic)
        lock = nullcontext() if output_dir else self.run_lock.held()
        with lock, gathered, collectives.raise_on_all_ranks(self.accelerator):
            if self.accelerator.is_main_process:
                self.train_prompts.record_wording(self.processing_class)
                run = TrainedRun(Path(self.args.output_dir), self.weights_step, stats or {}, config, weights)
                export.save_final(folder, self.actor_critic, self.processing_class, run)
        # No rank holds gathered parameters during the upload.
        if self.accelerator.is_main_process and self.args.hub_model_id and output_dir is None:
            export.push_folder(folder / "policy", self.args.hub_model_id)

    @property
    def weights_step(self) -> WeightsStep:
        """Which step of the run the weights in the models are from."""
        best, trained = self.state.best_global_step, self.state.global_step
        rules = [callback for callback in self.callback_handler.built_in if isinstance(callback, StopAt)]
        of_last = WeightsStep(trained, trained, ended_by=next((rule.reached for rule in rules if rule.reached), None))
        if best is None or not (self.checkpoints.best_is_loaded or best == trained):
            return of_last
        return replace(of_last, step=best, metric=self.checkpoints.best.metric, value=self.state.best_metric)

    def save_checkpoint(self, stats: Mapping[str, float] | None = None) -> Path:
        """Writes `checkpoint-<step>` atomically and returns its path. Every rank must call it.

        The metrics `stats` of an evaluation decide whether it becomes the best checkpoint (`metric_for_best_model`).
        """
        self.run_lock.acquire()
        folder = self.checkpoints.save(self.state.global_step, stats or {})
        self.progress.saved = self.progress.is_current
        return folder

    def _save_interrupted(self, reason: str) -> None:
        """Saves the last completed step, unless that is done, and ends the log; `reason` says why, for the user."""
        folder = self.checkpoints.folder(self.state.global_step)
        if not self.progress.saved:
            self.progress.rewind()
            self.save_checkpoint()
            self._notify("on_save")
        if not self.progress.step_ended:
            # After the checkpoint, which does not count this line: a resumed run writes it again.
            self.run_log.log(self.progress.stats, self.progress.step, report=False)
        self.run_log.message(f"{reason}: run saved to {folder}; continue with {RESUME}")
        refresh_report(self.callback_handler.built_in)
        self.run_log.finish()
        collectives.drain_collectives(self.accelerator)

    def _begin(self, resume_from_checkpoint: bool | str | None) -> None:
        """Restores a resumed run, checks disk and sampler, begins the log, evaluates before the first step, and ends a
        step that was interrupted.
        """
        folder = self.checkpoints.prepare_folder(resume_from_checkpoint, has_trained=self.progress.step > 0)
        seed_random_states(self.args.seed, self.accelerator.process_index)
        lines = self._restore(folder)
        # Also a barrier: every rank has looked for checkpoints before one of them writes to the folder.
        with collectives.raise_on_all_ranks(self.accelerator):
            # A run without steps left only writes its final models again.
            if not self._finished:
                check_room(self.args, self.start.checkpoint_size, self.schedule.num_steps - self.state.global_step)
        start_is_logged = lines > 0 or self.progress.step > 0
        logged_step = self.progress.step if start_is_logged else -1
        machine = hardware(self.accelerator, self.args)
        provenance = self.start.record.provenance(machine, resumed_step=logged_step)
        sets = {"train": self.train_prompts, **{f"eval {name}".strip(): p for name, p in self.eval_prompts.items()}}
        provenance["prompts"] = {name: str(prompts) for name, prompts in sets.items()}
        self.run_log.begin(self.start.record.config(self.args), provenance, step=logged_step, lines=lines)
        if folder is not None:
            self.run_log.message(f"resuming from {folder} (step {self.state.global_step} of {self.schedule.num_steps})")
        self.run_log.message(self._summary())
        self._notify("on_train_begin")
        if not self._finished:
            with self.run_log.bar.phase("checking the sampler"), kept_random_states():
                self.check_sampler()
        if self.eval_prompts and not start_is_logged:
            stats = self._evaluate()
            self.run_log.log(stats, 0)
            self._notify("on_evaluate", metrics=EvaluationMetrics(stats))
        if not self.progress.step_ended:
            self._end_step(self.progress.stats)

    def _restore(self, folder: Path | None) -> int:
        """Loads the checkpoint `folder`, if any; returns how many lines of metrics.jsonl precede it."""
        if folder is None:
            self.progress.advance(self.progress.stats, step_ended=self.progress.step_ended)
            return 0
        saved = self.checkpoints.load(folder)
        self.state.epoch = self.schedule.epoch_at(self.state.global_step)
        self.progress.saved = folder.resolve() == self.checkpoints.folder(self.state.global_step).resolve()
        return int(saved.identity["metrics"]["lines"])

    def _summary(self) -> str:
        padding = self.start.padding if self.args.padding_free == "auto" else ""
        fallback = self.start.sampler_fallback
        text = (
            f"{self.train_prompts}, {self.schedule.num_steps} steps, {self.updater.schedules.totals} in micro-batches "
            f"of at most {self.args.micro_batch_tokens} tokens on each of {self.accelerator.num_processes} processes"
        )
        if padding:
            text += f", with padding: {padding}"
        if fallback:
            # The padding often has the same reason.
            text += ", sampled by model.generate" + ("" if fallback in padding else f": {fallback}")
        return f"{text}\n{self.updater.schedules.unusual_rate}".rstrip()

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
        """Checks on the main process that this run may resume from the checkpoint `folder`."""
        check_identity(folder, saved.identity, self._identity(), self.args)
        check_metrics(Path(self.args.output_dir), saved.identity["metrics"])

    def _end_step(self, stats: dict[str, float]) -> None:
        """Evaluates, logs and saves after the update. If this is interrupted, the resumed run repeats it."""
        self.state.epoch = self.schedule.epoch_at(self.state.global_step)
        self.progress.advance(stats, step_ended=False)
        self._notify("on_step_end", metrics=stats)
        args, control = self.args, self.callback_handler.control
        step = self.state.global_step
        eval_is_due = self._finished or (args.eval_steps and step % args.eval_steps == 0)
        if self.eval_prompts and (eval_is_due or control.should_evaluate):
            stats = stats | self._evaluate()
            self._notify("on_evaluate", metrics=EvaluationMetrics(stats))
        # An evaluation may have ended the run.
        report = step % args.logging_steps == 0 or self._finished or control.should_log
        self.run_log.log(stats, step, report=report)
        self.progress.advance(stats, step_ended=True)
        if report:
            self.state.log_history.append({"step": step, **stats})
            self._notify("on_log", logs=stats)
        # Also after the last step, so that a run that is killed while it writes the final models loses no training.
        save_is_due = args.save_steps and (step % args.save_steps == 0 or step == self.schedule.num_steps)
        if self.checkpoints.is_best(stats) or save_is_due or control.should_save:
            with self.run_log.bar.phase("saving"):
                self.save_checkpoint(stats)
            self._notify("on_save")

    def _evaluate(self) -> dict[str, float]:
        with self.run_log.bar.phase("evaluating"):
            stats = self.evaluate()
        self.checkpoints.best.require(stats)
        return stats

    def _notify(self, event: str, **context: Any) -> None:
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
