"""Checks before anything is loaded: output folder and disk, trackers, hub repository, the checkpoint to resume from,
the columns that rewards require, and the scores that evaluation options name.

Single options are checked in `config`, prompts in `data`, rewards in `rewards`, token ids and lengths in
`models.loading`.
"""

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModelForCausalLM

from alpaca_ppo.adapters.files import is_adapter
from alpaca_ppo.atomic_io import TEMPORARY_SUFFIX, list_committed
from alpaca_ppo.checkpoint.directory import check_kinds, check_unlocked, resolve_checkpoint
from alpaca_ppo.checkpoint.export import check_login
from alpaca_ppo.checkpoint.serialization import checkpoint_bytes, verify_files
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, explain_names
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data.loading import columns_of
from alpaca_ppo.distributed.launcher import launched_rank, watch_launcher
from alpaca_ppo.environments.kinds import EnvironmentKind, rewarding_classes
from alpaca_ppo.estimate_memory.fake_models import without_weights
from alpaca_ppo.evaluation.settings import EvaluationSettings, make_settings
from alpaca_ppo.rewards.batch import OF_EPISODES
from alpaca_ppo.rewards.build import check_columns, source_names
from alpaca_ppo.rewards.scorer import free_name
from alpaca_ppo.tracking.run_log import tracker_names

Kinds = Mapping[str | None, EnvironmentKind]
"""Environments by the value of a row's `environment` column; None = every row's."""
REWARD_ADAPTER = "reward_adapter"
"""The name of the reward source that is an adapter."""


def check_start(args: PPOConfig, resume_from_checkpoint: bool | str | None) -> None:
    """Checks, before a script loads anything, that `train` could start or resume in `output_dir`.

    Raises:
        ValueError: see `check_output_dir`; also if another run is writing to the folder, a checkpoint is missing or
            incomplete, or the run would overwrite an older one.
    """
    watch_launcher()
    check_output_dir(args)
    # The main process may have locked the folder before the others come here.
    if launched_rank() == 0:
        check_unlocked(args.output_dir)
    folder = resolve_checkpoint(resume_from_checkpoint, args.output_dir, overwrite=args.overwrite_output_dir)
    if folder is not None:
        # Hashes of large files take minutes; `train` checks them.
        verify_files(folder, hashed=())


def check_room_for_policy(args: PPOConfig, policy: str) -> None:
    """Checks, before a script loads anything, that the disk has room for a checkpoint of a policy trained as a whole,
    unless an earlier run is deleted first. `train` checks again, with the critic and all checkpoints that it will keep.

    Raises:
        ValueError: see `check_room`; also for a `policy` that has no configuration.
    """
    if launched_rank() == 0 and not args.overwrite_output_dir and not is_adapter(policy):
        model = without_weights(AutoModelForCausalLM, policy, trust_remote_code=args.trust_remote_code)
        check_room(args, checkpoint_bytes(model.parameters(), adamw=args.save_steps > 0))


def check_config_class(args: Any) -> PPOConfig:
    """Returns `args`, a configuration of this package.

    Raises:
        ValueError: for anything else; for another trainer's configuration, with the options to set instead.
    """
    if isinstance(args, PPOConfig):
        return args
    changed: dict[str, Any] = {}
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        for field in dataclasses.fields(args):
            factory, value = field.default_factory, vars(args).get(field.name)
            if field.init and value != (field.default if factory is dataclasses.MISSING else factory()):
                changed[field.name] = value
    lines = explain_names(changed, [field.name for field in dataclasses.fields(PPOConfig)], CONFIG_SECTIONS)
    raise ValueError(
        f"args is of the class {type(args).__module__}.{type(args).__qualname__}; PPOTrainer takes a PPOConfig, "
        "`from alpaca_ppo import PPOConfig`" + (f". The values that are not its defaults:\n{lines}" if lines else "")
    )


def check_output_dir(args: PPOConfig) -> None:
    """Checks the trackers, the hub repository and the login, and that files can be written to `output_dir`.

    Raises:
        ValueError: for a tracker that is not installed, a `hub_model_id` that is invalid or set without a login, and an
            `output_dir` that is not writable, or has a file where the run has a folder or the other way round.
    """
    tracker_names(args.report_to)
    if args.hub_model_id:
        checked_hub_id(args.hub_model_id)
    # Other ranks write nothing there, and on another node the folder may not exist.
    if launched_rank() == 0:
        check_kinds(args.output_dir)
        try:
            # Permissions are not enough: root ignores them, and a disk may be mounted read-only.
            with tempfile.NamedTemporaryFile(dir=_existing_folder(args), prefix=".", suffix=TEMPORARY_SUFFIX):
                pass
        except OSError as error:
            raise ValueError(
                f"output_dir is {args.output_dir!r}, where no file can be created ({error}); choose another folder"
            ) from error


def check_room(args: PPOConfig, checkpoint_size: int, steps_left: int = 1) -> None:
    """Checks on the main process that the disk has room for the checkpoints that the run will keep, or for the final
    models of a run that saves none.

    Args:
        checkpoint_size: least size in bytes of a checkpoint, or of the final models.
        steps_left: that the run will take.

    Raises:
        ValueError: when there is too little.
    """
    if launched_rank() != 0:
        return
    # Without a limit, one: the user may delete checkpoints meanwhile.
    count = 1 if args.save_steps > 0 else 0
    if count and args.save_total_limit is not None:
        present = len(list_committed(args.output_dir, "checkpoint-*"))
        # A new checkpoint is complete before the oldest is deleted.
        most = min(present + math.ceil(steps_left / args.save_steps), args.save_total_limit + 1)
        count = max(1, most - present)
    usage = shutil.disk_usage(_existing_folder(args))
    needed = checkpoint_size * max(1, count)
    # Some file systems, such as those in user space, report no size.
    if usage.total == 0 or usage.free >= needed:
        return
    what = {0: "the final models", 1: "one checkpoint"}.get(count, f"{count} checkpoints")
    remedy = f", or lower save_total_limit ({args.save_total_limit})" if count > 1 else ""
    raise ValueError(
        f"output_dir ({args.output_dir}) has too little room: {what} will have more than {needed} bytes, and the disk "
        f"has {usage.free} left; free some space{remedy}"
    )


def _existing_folder(args: PPOConfig) -> Path:
    path = Path(args.output_dir).absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def checked_hub_id(name: str | None) -> str:
    """Returns `name`, if it is a valid name of a hub repository.

    Raises:
        ValueError: if it is not; on the main process also without a login (`export.check_login`).
    """
    try:
        validate_repo_id(name or "")
    except ValueError as error:
        raise ValueError(f"hub_model_id is {name!r}, which the hub refuses ({error}); write 'owner/name'") from error
    if launched_rank() == 0:
        check_login()
    return str(name)


def evaluation_settings(args: PPOConfig, reward_funcs: Any, metric_funcs: Any, kinds: Kinds) -> EvaluationSettings:
    """Returns the settings of evaluations, checked against the names of the reward sources and metric functions.

    Raises:
        ValueError: see `make_settings`; also for an invalid source, and for an opponent in multi-turn conversations.
    """
    if args.eval_opponent is not None and any(kind.answers for kind in kinds.values()):
        raise ValueError(f"eval_opponent is {args.eval_opponent!r}, but conversations have several turns; leave it out")
    sources = source_names(reward_funcs)
    added = [REWARD_ADAPTER] if args.reward_adapter else []
    for name in [*added, *rewarding_classes(kinds)]:
        # As the scorer names them.
        sources.append(free_name(name, sources))
    return make_settings(args, sources=sources, metrics=source_names(metric_funcs))


def check_reward_columns(given: Any, kinds: Kinds) -> None:
    """Checks that the datasets of the `setup.TrainerArguments` have the columns that reward and metric functions
    require.

    Raises:
        ValueError: see `rewards.build.check_columns`.
    """
    named = given.eval_dataset if isinstance(given.eval_dataset, Mapping) else {"": given.eval_dataset}
    eval_sets = {f"eval set {name!r}" if name else "eval set": rows for name, rows in named.items()}
    for what, rows in {"train set": given.train_dataset, **eval_sets}.items():
        # Anything else is refused by `prepare_prompts`.
        if isinstance(rows, Dataset):
            columns = [*columns_of(rows), *(OF_EPISODES if kinds else ())]
            check_columns(given.reward_funcs, what, columns)
            if what != "train set":
                check_columns(given.metric_funcs, what, columns)
