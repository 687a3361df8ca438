"""A run from its options alone: `train_from_arguments` loads what `ScriptArguments` names and trains.

The command `alpaca-ppo train` and `examples/train_ppo.py` differ in nothing that is here.
"""

import sys

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.run_file import Provenance
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments
from alpaca_ppo.data import load_prompt_dataset
from alpaca_ppo.data.loading import load_eval_datasets
from alpaca_ppo.doctor.examination import ENDED_BY_ERROR
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.rewards import RemoteReward
from alpaca_ppo.tracking.run_record import RunRecord
from alpaca_ppo.trainer.environment_setup import GivenEnvironments, named_environments
from alpaca_ppo.trainer.measure_checks import check_value_names
from alpaca_ppo.trainer.ppo_trainer import PPOTrainer
from alpaca_ppo.trainer.preflight import check_start
from alpaca_ppo.trainer.run_doctor import RunDoctor


def train_from_arguments(
    script_args: ScriptArguments, lora: LoraArguments, args: PPOConfig, provenance: Provenance
) -> dict[str, float]:
    """Trains and returns the last step's metrics.

    Raises:
        ValueError: for a run that could not start, before anything is loaded if that can be known.
        SystemExit: with status 3, if an error of the doctor that is in `stop_on` has ended the run.
    """
    resume = script_args.resume_from_checkpoint
    check_start(args, resume)
    script_args.check_names(args)
    environments = named_environments(script_args)
    check_value_names(args, reward_sources(script_args), script_args.metric_funcs, GivenEnvironments(**environments))
    name, config = script_args.dataset_name, script_args.dataset_config
    train_dataset = None
    if name:
        train_dataset = load_prompt_dataset(name, split=script_args.dataset_train_split, config_name=config)
    trust = args.trust_remote_code
    # Models are given by name, so that the trainer checks prompts, tokens and reward functions before it loads one.
    processing_class = load_processing_class(script_args.model_name_or_path, trust_remote_code=trust)
    trainer = PPOTrainer(
        model=script_args.model_name_or_path,
        reward_funcs=reward_sources(script_args),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=load_eval_datasets(script_args),
        metric_funcs=script_args.metric_funcs,
        processing_class=processing_class,
        value_model=script_args.value_model_name_or_path,
        peft_config=lora.peft_config("CAUSAL_LM"),
        **environments,
    )
    trainer.run_record = RunRecord.of_command(provenance)
    stats = trainer.train(resume_from_checkpoint=resume)
    trainer.accelerator.end_training()
    _exit_if_ended_by_an_error(trainer)
    return stats


def _exit_if_ended_by_an_error(trainer: PPOTrainer) -> None:
    """Ends the process, with `ENDED_BY_ERROR` on every rank, if an error of the doctor has ended the run; the main
    process says which one. A run that was ended by a warning is one that ended as it was told to.
    """
    doctors = [callback for callback in trainer.callback_handler.built_in if isinstance(callback, RunDoctor)]
    errors = [finding for doctor in doctors for finding in doctor.ended_by if finding.severity == "error"]
    if not errors:
        return
    step, named = trainer.state.global_step, ", ".join(f"{found.rule} ({found.sentence})" for found in errors)
    if trainer.accelerator.is_main_process:
        print(
            f"error: stop_on ended the run at step {step} of {trainer.schedule.num_steps}, because of {named}; its "
            f"checkpoint is {trainer.checkpoints.folder(step)}",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(ENDED_BY_ERROR)


def reward_sources(script_args: ScriptArguments) -> list[str | RemoteReward]:
    """The reward sources that the options name, in the order of their weights: models, functions, the servers."""
    named: list[str | RemoteReward] = [
        *(script_args.reward_model_name_or_path or []),
        *(script_args.reward_funcs or []),
    ]
    if script_args.reward_url:
        remote = RemoteReward(
            script_args.reward_url,
            timeout=script_args.reward_url_timeout,
            name="reward_url",
        )
        named.append(remote)
    return named
