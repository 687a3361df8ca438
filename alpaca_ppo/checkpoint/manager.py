"""`CheckpointManager`: the checkpoints of one run, and which of them is the best.

What a checkpoint holds is in `serialization`, which folders there are in `directory`, what a resumed run must share
with its checkpoint in `compatibility`.
"""

import math
import operator
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import TrainerState

from alpaca_ppo.atomic_io import clean_leftovers, committed_path
from alpaca_ppo.checkpoint import directory
from alpaca_ppo.checkpoint.serialization import Checkpoint, check_fits, read_weights
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.random_states import random_states


class Component(Protocol):
    """A part of a run whose state, plain values and tensors, a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """Called on every rank."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restores what `state_dict` returned."""


class BestCheckpoint:
    """The best checkpoint of a run by `metric_for_best_model`, also kept in `TrainerState` under transformers' names.

    The trainer saves a checkpoint after every evaluation that `improves`.
    """

    def __init__(self, state: TrainerState, args: PPOConfig) -> None:
        # None = no checkpoint is the best.
        self.metric = args.metric_for_best_model
        self._state, self._greater_is_better = state, args.greater_is_better
        self._criterion = {"metric": self.metric, "greater_is_better": self._greater_is_better}
        # The metrics and the folder of the best checkpoint so far.
        self.stats: dict[str, float] = {}
        self.folder: Path | None = None

    def require(self, stats: Mapping[str, float]) -> None:
        """Raises a ValueError if `stats`, of an evaluation, lack the metric."""
        if self.metric is not None and self.metric not in stats:
            raise ValueError(f"metric_for_best_model is {self.metric!r}; choose {', '.join(sorted(stats))} or null")

    def improves(self, stats: Mapping[str, float]) -> bool:
        """Whether the metric in `stats` is better than that of the best checkpoint so far, or the first one."""
        value, best = stats.get(self.metric or "", math.nan), self._state.best_metric
        is_better = operator.gt if self._greater_is_better else operator.lt
        return math.isfinite(value) and (best is None or is_better(value, best))

    def set(self, stats: Mapping[str, float], step: int, folder: Path) -> None:
        """Makes `folder`, the checkpoint of `step` with the metrics `stats`, the best."""
        self.folder, self.stats = folder, dict(stats)
        self._state.best_metric = stats[self.metric or ""]
        self._state.best_global_step, self._state.best_model_checkpoint = step, str(folder)

    def state_dict(self) -> dict[str, Any]:
        """Metric, step and metrics of the best checkpoint."""
        return self._criterion | {"step": self._state.best_global_step, "stats": self.stats}

    def load_state_dict(self, saved: Mapping[str, Any], parent: Path) -> None:
        """Restores which checkpoint in the folder `parent` is the best. If there was none, if it is gone, or if it was
        chosen by another metric, it is chosen among later ones.
        """
        # A trainer that has trained may resume from before its best checkpoint.
        self.folder, self.stats = None, {}
        self._state.best_metric = self._state.best_global_step = self._state.best_model_checkpoint = None
        if saved["step"] is None or not self._criterion.items() <= saved.items():
            return
        best = parent / f"checkpoint-{saved['step']}"
        if committed_path(best).is_dir():
            self.set(saved["stats"], saved["step"], best)
        else:
            gone = f"{best}, the best checkpoint so far ({self.metric} = {saved['stats'][self.metric]}), is gone"
            warnings.warn(f"{gone}; the best checkpoint will be chosen among later ones", stacklevel=6)


class CheckpointManager:
    """Saves, finds, loads and rotates the checkpoints of a run. Every rank must call its methods at the same points.

    Args:
        components: returns what else a checkpoint holds, by name.
        identity: returns `compatibility.run_identity`; called on the main process when saving.
        check: called on the main process with the folder and its checkpoint, before anything changes; raises if the run
            cannot resume from it. It must not contain collectives.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: PPOConfig,
        state: TrainerState,
        *,
        engine: Engine,
        scheduler: Any,
        components: Callable[[], Mapping[str, Component]],
        identity: Callable[[], dict[str, Any]],
        check: Callable[[Path, Checkpoint], Any],
    ) -> None:
        self._accelerator, self._args, self._output_dir = accelerator, args, Path(args.output_dir)
        self._engine, self._scheduler, self._components = engine, scheduler, components
        self._identity, self._check, self._state = identity, check, state
        self.best = BestCheckpoint(state, args)
        # Whether the models hold the weights of the best checkpoint instead of the last step's.
        self.best_is_loaded = False

    def folder(self, step: int) -> Path:
        """The folder of the checkpoint after `step` completed steps."""
        return self._output_dir / f"checkpoint-{step}"

    def save(self, step: int, stats: Mapping[str, float]) -> Path:
        """Writes the checkpoint of `step` atomically, removes surplus older ones, and returns its folder. `stats`, the
        metrics of its evaluation, decide whether it is the best one. Raises a ValueError after `load_best`.
        """
        folder = self.folder(step)
        if self.best_is_loaded:
            problem = f"load_best_model_at_end has put the weights of {self.best.folder} into the models"
            raise ValueError(f"{folder} cannot be saved: {problem}; save before the end of train(), or use save_model")
        if self.is_best(stats):
            self.best.set(stats, step, folder)
        # All ranks gather the sharded state; the main process writes it.
        weights, optimizer = self._engine.weights(), self._engine.optimizer_state()
        rng = collectives.gather_list(random_states(), self._accelerator)
        components = {name: component.state_dict() for name, component in self._components().items()}
        with collectives.raise_on_all_ranks(self._accelerator):
            if self._accelerator.is_main_process:
                scheduler, best = self._scheduler.state_dict(), self.best.state_dict()
                Checkpoint(weights, optimizer, scheduler, rng, components, best, self._identity()).write(folder)
                clean_leftovers(self._output_dir)
                kept = [folder] if self.best.folder is None else [folder, self.best.folder]
                directory.rotate_checkpoints(self._output_dir, self._args.save_total_limit, keep=kept)
        return folder

    def is_best(self, stats: Mapping[str, float]) -> bool:
        """Whether an evaluation with the metrics `stats` is the best so far, as the main process sees it: a user's
        `evaluate` may return other metrics on each rank, but all ranks must save and load the same checkpoints.
        """
        return self.best.metric is not None and collectives.gather_list(self.best.improves(stats), self._accelerator)[0]

    def prepare_folder(self, resume_from_checkpoint: bool | str | None, *, has_trained: bool = False) -> Path | None:
        """Returns the checkpoint to resume from, or None; raises as `directory.resolve_checkpoint`. Removes from the
        output folder what killed processes left and, with `overwrite_output_dir`, an earlier run, but not the one to
        resume, nor one of this trainer if it `has_trained`.
        """
        overwrite = self._args.overwrite_output_dir and not has_trained
        folder = directory.resolve_checkpoint(resume_from_checkpoint, self._output_dir, overwrite=overwrite)
        # Another run may still be writing to the folder, so nothing is removed until every rank has checked it.
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            clean_leftovers(self._output_dir)
            if overwrite and (folder is None or not directory.is_in(folder, self._output_dir)):
                directory.remove_run(self._output_dir)
        self._accelerator.wait_for_everyone()
        return folder

    def load(self, folder: Path) -> Checkpoint:
        """Restores everything from the checkpoint `folder` and returns it; if it is in the output folder, abandons
        later ones there. Raises a ValueError, before anything changes, for one that is damaged or of another run.
        """
        components = self._components()
        with collectives.raise_on_all_ranks(self._accelerator):
            saved = Checkpoint.read(folder)
            if saved.components.keys() != components.keys():
                then, now = (", ".join(sorted(names)) for names in (saved.components, components))
                problem = f"holds the components {then}, but this trainer has {now}"
                raise ValueError(f"checkpoint {folder} {problem}; resume with the trainer class that wrote it")
            # The saved identity is the main process's. Those of other ranks may differ, for example in the device or
            # port of a reward function.
            if self._accelerator.is_main_process:
                self._check(folder, saved)
        check_fits(folder, saved, self._engine)
        saved.restore(self._engine, self._scheduler, self._accelerator.process_index)
        for name, component in components.items():
            component.load_state_dict(saved.components[name])
        self.best.load_state_dict(saved.best, folder.parent)
        self.best_is_loaded = False
        # Until every rank has read it, no folder may move.
        self._accelerator.wait_for_everyone()
        # In another run's folder, later checkpoints stay: this run does not look there, and holds no lock on it.
        is_own = directory.is_in(folder, self._output_dir)
        if is_own and self._accelerator.is_main_process and (moved := directory.abandon_later_checkpoints(folder)):
            print(f"{folder} is not the newest checkpoint; later ones are now {', '.join(path.name for path in moved)}")
        return saved

    def load_best(self, step: int) -> None:
        """Puts the weights of the best checkpoint into the models, unless that is the one of the last `step`. The
        optimizer stays as it is, so no checkpoint can be saved afterwards.
        """
        if self.best.folder is not None and self._state.best_global_step != step:
            self._engine.load_weights(read_weights(self.best.folder))
            self.best_is_loaded = True
            # No rank deletes or replaces the folder while another one reads it.
            self._accelerator.wait_for_everyone()
