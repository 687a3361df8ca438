"""Checks of a run before anything is loaded: its output folder and disk, its trackers, its hub repository and the
checkpoint to resume from.

Single values are checked in `config`, prompts and rewards in `data` and `rewards`, the tokenizer's ids and the lengths
in `models.token_checks`, after the policy has been loaded.
"""

import dataclasses
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from alpaca_ppo.atomic_io import TEMPORARY_SUFFIX, list_committed
from alpaca_ppo.checkpoint.directory import check_no_earlier_run, resolve_checkpoint, verify_files
from alpaca_ppo.checkpoint.hub import check_login
from alpaca_ppo.checkpoint.run_lock import check_unlocked
from alpaca_ppo.checkpoint.serialization import checkpoint_bytes
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, explain_names
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.launcher import launched_rank, watch_launcher
from alpaca_ppo.models import ActorCritic
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
        if not args.overwrite_output_dir:
            check_no_earlier_run(args.output_dir)
        return
    folder = resolve_checkpoint(resume_from_checkpoint, args.output_dir, overwrite_output_dir=args.overwrite_output_dir)
    # Hashes of large files take minutes; `train` checks them.
    verify_files(folder, hashed=())


def check_config_class(args: Any) -> PPOConfig:
    """Returns `args`, a configuration of this package.

    Raises:
        ValueError: for anything else; of another trainer's configuration, with what its values are here.
    """
    if isinstance(args, PPOConfig):
        return args
    if args is None:
        raise ValueError("args is missing; pass a PPOConfig, with at least its output_dir")
    changed: dict[str, Any] = {}
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        fields = [field for field in dataclasses.fields(args) if field.init]
        changed = {field.name: value for field in fields if (value := vars(args).get(field.name)) != field.default}
    valid = [field.name for field in dataclasses.fields(PPOConfig)]
    lines = explain_names(changed, valid, CONFIG_SECTIONS)
    raise ValueError(
        f"args is of the class {type(args).__module__}.{type(args).__qualname__}; PPOTrainer takes a PPOConfig, "
        "`from alpaca_ppo import PPOConfig`" + (f". The values that are not its defaults:\n{lines}" if lines else "")
    )


def check_output_dir(args: PPOConfig) -> None:
    """Checks the trackers, the hub repository and the login, and that files can be written to `output_dir`.

    Raises:
        ValueError: for a tracker that is not installed, a `hub_model_id` that the hub would refuse or that is set
            without a login, an `output_dir` with a file in its path, and one in which the main process can create no
            file.
    """
    tracker_names(args.report_to)
    if args.push_to_hub:
        checked_hub_id(args.hub_model_id)
    existing = _existing_folder(args)
    if not existing.is_dir():
        raise ValueError(f"output_dir is {args.output_dir!r}, but {existing} is a file; choose a folder")
    # Other ranks write nothing there; on another node the folder may not even exist.
    if launched_rank() == 0:
        try:
            # Permissions alone tell little: root ignores them, and a disk may be mounted read-only.
            with tempfile.NamedTemporaryFile(dir=existing, prefix=".", suffix=TEMPORARY_SUFFIX):
                pass
        except OSError as error:
            raise ValueError(
                f"output_dir is {args.output_dir!r}, but no file can be created in {existing} ({error}); choose a "
                "folder that this user may write to"
            ) from error


class DiskCheck:
    """Whether the disk has room for the checkpoints that the run will keep, or for the final models of a run that saves
    no checkpoints; `train` checks it before its first step.

    Args:
        args: the configuration.
        actor_critic: what is trained, before it is sharded.
        adamw: whether the run's optimizer is AdamW.
    """

    def __init__(self, args: PPOConfig, actor_critic: ActorCritic, *, adamw: bool) -> None:
        trained = [parameter for parameter in actor_critic.parameters() if parameter.requires_grad]
        # Other ranks write nothing.
        rank_bytes = 0 if launched_rank() else checkpoint_bytes(trained, adamw=adamw and args.save_steps > 0)
        self._args, self._needed = args, rank_bytes

    def check(self, steps_left: int = 1) -> None:
        """Checks the room that there is now.

        Args:
            steps_left: steps that the run will make.

        Raises:
            ValueError: when there is too little; names both numbers and the remedy.
        """
        usage, count = shutil.disk_usage(_existing_folder(self._args)), self._new_checkpoints(steps_left)
        needed = self._needed * max(1, count)
        # Some file systems, such as those in user space, do not say how large they are.
        if usage.total == 0 or usage.free >= needed:
            return
        args, what, remedy = self._args, "the final models", ""
        if args.save_steps:
            what = "one checkpoint" if count == 1 else f"{count} checkpoints"
            what += " (weights and the state of the optimizer)"
            remedy = "save none (save_steps: 0), "
        if count > 1:
            what += f", as many as there are before the oldest is deleted (save_total_limit: {args.save_total_limit}),"
            remedy = "keep fewer checkpoints (save_total_limit: 1) or none (save_steps: 0), "
        raise ValueError(
            f"output_dir ({args.output_dir}) has too little room: {what} will have more than {needed} bytes, and the "
            f"disk has {usage.free} left; free some space, choose an output_dir on another disk, {remedy}or train "
            "fewer weights (--use_peft)"
        )

    def _new_checkpoints(self, steps_left: int) -> int:
        """How many checkpoints more than now the folder will hold at one time; without `save_total_limit`, where the
        user may delete them while the run goes on, one.
        """
        args = self._args
        if not args.save_steps or args.save_total_limit is None:
            return int(args.save_steps > 0)
        saved = math.ceil(steps_left / args.save_steps)
        present = len(list_committed(args.output_dir, "checkpoint-*"))
        # A new one is complete before the oldest is deleted.
        return max(1, min(present + saved, args.save_total_limit + 1) - present)


def _existing_folder(args: PPOConfig) -> Path:
    path = Path(args.output_dir).absolute()
    try:
        return next(place for place in (path, *path.parents) if place.exists())
    except PermissionError as error:
        raise ValueError(
            f"output_dir is {args.output_dir!r}, but this user may not look into a folder on its path ({error}); "
            "choose another folder, or have the permission to search it granted"
        ) from error


def checked_hub_id(name: str | None) -> str:
    """Returns the name of a hub repository that this user may be able to write to.

    Raises:
        ValueError: if there is none, the hub does not accept it, or, on the main process, see `hub.check_login`.
    """
    if not name:
        raise ValueError("hub_model_id is not set; name the repository to push to, 'name' or 'organization/name'")
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise ValueError(
            f"hub_model_id is {name!r}, which the hub does not accept ({error}); write it as 'name' or "
            "'organization/name'"
        ) from error
    if launched_rank() == 0:
        check_login()
    return name
