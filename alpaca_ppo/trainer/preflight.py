"""Checks of a run before anything is loaded: its output folder, its trackers and the checkpoint to resume from.

Single values are checked in `config`, prompts and rewards in `data` and `rewards`, the tokenizer's ids and the lengths
in `models.token_checks`, after the policy has been loaded.
"""

from pathlib import Path

from alpaca_ppo.atomic_io import committed_path
from alpaca_ppo.checkpoint.directory import check_manifest, check_no_earlier_run, resolve_checkpoint
from alpaca_ppo.checkpoint.run_lock import check_unlocked
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.launcher import launched_rank
from alpaca_ppo.tracking.run_log import tracker_names


def check_start(args: PPOConfig, resume_from_checkpoint: bool | str | None) -> None:
    """Checks, before a script loads anything, that `train` could start, or resume, in `output_dir`.

    Raises:
        ValueError: see `check_output_dir`; also for a folder in which another run is writing, for a checkpoint that is
            missing or incomplete, and for a run that would overwrite an older one.
    """
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


def check_output_dir(args: PPOConfig) -> None:
    """Checks the trackers and that `output_dir` can be a folder.

    Raises:
        ValueError: for a tracker that is not installed, or an `output_dir` with a file in its path.
    """
    tracker_names(args.report_to)
    path = Path(args.output_dir).absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"output_dir is {args.output_dir!r}, but {existing} is a file; choose a folder")
