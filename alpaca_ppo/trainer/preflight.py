"""Checks of a run before anything is loaded: its output folder and disk, its trackers, its hub repository and the
checkpoint to resume from.

Single values are checked in `config`, prompts and rewards in `data` and `rewards`, the tokenizer's ids and the lengths
in `models.token_checks`, after the policy has been loaded.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from alpaca_ppo.atomic_io import TEMPORARY_SUFFIX, committed_path
from alpaca_ppo.checkpoint.directory import check_manifest, check_no_earlier_run, resolve_checkpoint
from alpaca_ppo.checkpoint.run_lock import check_unlocked
from alpaca_ppo.checkpoint.size import checkpoint_bytes
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.launcher import launched_rank, watch_launcher
from alpaca_ppo.models.skeletons import trained_parameters
from alpaca_ppo.tracking.run_log import tracker_names


def check_start(args: PPOConfig, resume_from_checkpoint: bool | str | None) -> None:
    """Checks, before a script loads anything, that `train` could start, or resume, in `output_dir`.

    Raises:
        ValueError: see `check_output_dir`; also for a folder in which another run is writing, for a checkpoint that is
            missing or incomplete, and for a run that would overwrite an older one.
    """
    watch_launcher()
    check_output_dir(args)
    # Only the main process locks the folder. It may do so before the others have come this far.
    if launched_rank() == 0:
        check_unlocked(args.output_dir)
    if not resume_from_checkpoint:
        check_no_earlier_run(args.output_dir)
        return
    folder = resolve_checkpoint(resume_from_checkpoint, args.output_dir)
    if not committed_path(folder).is_dir():
        raise ValueError(
            f"resume_from_checkpoint is {str(folder)!r}, which is not a folder; pass a checkpoint folder, or true"
        )
    check_manifest(folder)


def check_class(trainer_class: type) -> None:
    """Checks that a trainer's class sets nothing that only an option decides.

    Raises:
        ValueError: for the attribute `score_chunk_prompts`.
    """
    if hasattr(trainer_class, "score_chunk_prompts"):
        raise ValueError(
            f"{trainer_class.__name__} has the attribute score_chunk_prompts ({trainer_class.score_chunk_prompts!r}), "
            "which nothing reads: it is an option; remove the attribute, and set score_chunk_prompts in PPOConfig"
        )


def check_output_dir(args: PPOConfig) -> None:
    """Checks the trackers, the name of the hub repository, and that files can be written to `output_dir`.

    Raises:
        ValueError: for a tracker that is not installed, a `hub_model_id` that the hub would refuse, an `output_dir`
            with a file in its path, and one in which the main process can create no file.
    """
    tracker_names(args.report_to)
    if args.push_to_hub:
        _check_hub_id(str(args.hub_model_id))
    existing = _existing_folder(args)
    if not existing.is_dir():
        raise ValueError(f"output_dir is {args.output_dir!r}, but {existing} is a file; choose a folder")
    # Other ranks write nothing there; on another node the folder may not even exist.
    if launched_rank() == 0:
        _check_writable(existing, args)


class DiskCheck:
    """Whether the disk has room for one checkpoint, or for the final models of a run that saves no checkpoints.

    The size is a lower bound, taken before models are loaded. `train` checks it before its first step. The constructor
    checks it already when `model` is a path, since loading may take long, unless `output_dir` holds a finished run,
    which `train` may have nothing to add to. It cannot know whether `train` will be called: to only evaluate on a disk
    with less room, pass a loaded model.

    Args:
        args: the configuration.
        model: the policy, as the trainer takes it.
        value_start: what the critic starts from; None = the policy.
        peft_config: adapters to train on `model`.
        adamw: whether the run's optimizer is AdamW.

    Raises:
        ValueError: see `check`.
    """

    def __init__(self, args: PPOConfig, model: Any, value_start: Any, peft_config: Any, *, adamw: bool) -> None:
        self._args = args
        # Other ranks write nothing.
        self._needed = 0
        if launched_rank() == 0:
            trained = trained_parameters(model, value_start, peft_config, args)
            self._needed = checkpoint_bytes(trained, adamw=adamw and args.save_steps > 0)
            if isinstance(model, str) and not committed_path(Path(args.output_dir) / "final").exists():
                self.check()

    def check(self) -> None:
        """Checks the room that there is now.

        Raises:
            ValueError: when there is too little; names both numbers and the remedy.
        """
        usage = shutil.disk_usage(_existing_folder(self._args))
        # Some file systems, such as those in user space, do not say how large they are.
        if usage.total == 0 or usage.free >= self._needed:
            return
        save_steps, folder = self._args.save_steps, self._args.output_dir
        what = "one checkpoint (weights and the state of the optimizer)" if save_steps else "the final models"
        raise ValueError(
            f"output_dir ({folder}) has too little room: {what} will have more than {self._needed} bytes, and the "
            f"disk has {usage.free} left; free some space, choose an output_dir on another disk, or train fewer "
            "weights (--use_peft)"
        )


def _existing_folder(args: PPOConfig) -> Path:
    path = Path(args.output_dir).absolute()
    try:
        return next(place for place in (path, *path.parents) if place.exists())
    except PermissionError as error:
        raise ValueError(
            f"output_dir is {args.output_dir!r}, but this user may not look into a folder on its path ({error}); "
            "choose another folder, or have the permission to search it granted"
        ) from error


def _check_hub_id(name: str) -> None:
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise ValueError(
            f"hub_model_id is {name!r}, which the hub does not accept ({error}); write it as 'name' or "
            "'organization/name'"
        ) from error


def _check_writable(folder: Path, args: PPOConfig) -> None:
    try:
        # Permissions alone tell little: root ignores them, and a disk may be mounted read-only.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=TEMPORARY_SUFFIX):
            pass
    except OSError as error:
        raise ValueError(
            f"output_dir is {args.output_dir!r}, but no file can be created in {folder} ({error}); choose a folder "
            "that this user may write to"
        ) from error
