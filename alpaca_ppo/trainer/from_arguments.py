"""A run from its options alone: `train_from_arguments` loads what `ScriptArguments` names and trains;
`evaluate_from_arguments` evaluates a model.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from alpaca_ppo.adapters.files import is_adapter, read_adapter
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.modules import load_function
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments
from alpaca_ppo.data import load_prompt_dataset
from alpaca_ppo.data.loading import load_eval_datasets
from alpaca_ppo.data.prompts import prompt_text
from alpaca_ppo.doctor.examination import ENDED_BY_ERROR
from alpaca_ppo.environments.kinds import make_kinds
from alpaca_ppo.evaluation.results import write_results
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.rewards.build import reward_sources
from alpaca_ppo.tracking.run_record import RunRecord
from alpaca_ppo.trainer.ppo_trainer import PPOTrainer
from alpaca_ppo.trainer.preflight import check_room_for_policy, check_start
from alpaca_ppo.trainer.run_doctor import RunDoctor
from alpaca_ppo.trainer.setup import make_prompts


def train_from_arguments(
    script_args: ScriptArguments, lora: LoraArguments, args: PPOConfig, record: RunRecord
) -> dict[str, float]:
    """Trains and returns the last step's metrics.

    Raises:
        ValueError: for a run that cannot start, before anything is loaded if possible.
        SystemExit: with status 3, if an error in `stop_on` has ended the run.
    """
    resume = script_args.resume_from_checkpoint
    peft_config = lora.peft_config("CAUSAL_LM")
    check_start(args, resume)
    policy = model_folder("model_name_or_path", script_args.model_name_or_path)
    environments, rewards = named_environments(script_args), reward_sources(script_args)
    if not resume and peft_config is None:
        check_room_for_policy(args, policy)
    name, config, split = script_args.dataset_name, script_args.dataset_config, script_args.dataset_train_split
    # Models are passed by name, so that the trainer checks prompts, tokens and reward functions before it loads one.
    trainer = PPOTrainer(
        model=policy,
        reward_funcs=rewards,
        args=args,
        train_dataset=load_prompt_dataset(name, split=split, config_name=config) if name else None,
        eval_dataset=load_eval_datasets(script_args),
        metric_funcs=script_args.metric_funcs,
        value_model=script_args.value_model_name_or_path,
        peft_config=peft_config,
        **environments,
    )
    trainer.start = replace(trainer.start, record=record)
    stats = trainer.train(resume_from_checkpoint=resume)
    trainer.accelerator.end_training()
    for callback in trainer.callback_handler.built_in:
        # A run that a warning has ended is successful.
        if isinstance(callback, RunDoctor) and any(finding.severity == "error" for finding in callback.ended_by):
            raise SystemExit(ENDED_BY_ERROR)
    return stats


def evaluate_from_arguments(model: str, script_args: Any, args: PPOConfig) -> dict[str, Any] | None:
    """Evaluates `model` and writes results.json, answers.jsonl and the tables; returns the content of results.json on
    the main process, None on others.

    `model` is a folder or hub id; `script_args` name the eval sets, rewards and metrics (`ScriptArguments`).

    Raises:
        ValueError: without prompts or a reward.
    """
    environments, rewards = named_environments(script_args), reward_sources(script_args)
    datasets = load_eval_datasets(script_args)
    if datasets is None:
        raise ValueError("there are no eval prompts; give eval_dataset_name, eval_datasets or dataset_test_split")
    trainer = PPOTrainer(
        model,
        rewards,
        replace(args, reference=_reference_of(model, script_args, args)),
        # Never trained on.
        train_dataset=next(iter(datasets.values())) if isinstance(datasets, dict) else datasets,
        eval_dataset=datasets,
        processing_class=load_processing_class(model, trust_remote_code=args.trust_remote_code, field="model"),
        metric_funcs=script_args.metric_funcs,
        **environments,
    )
    stats = trainer.evaluate()
    trainer.run_log.finish()
    if not trainer.accelerator.is_main_process:
        return None
    settings = trainer.evaluator.settings
    above = settings.success_above
    results = {
        "model": model,
        "opponent": args.eval_opponent,
        "prompts": {name: len(prompts) for name, prompts in trainer.eval_prompts.items()},
        "samples_per_prompt": settings.num_samples,
        "temperature": args.eval_temperature,
        "success": None if above is None else f"{settings.success_by} above {above:g}",
        "metrics": stats,
    }
    write_results(Path(args.output_dir), results, trainer.evaluator.answers)
    return results


class Answer(NamedTuple):
    """The texts of a prompt, of the policy's answer and, if there is a reference, of its own."""

    prompt: str
    response: str
    of_reference: str | None


def answers_to(dataset: Dataset, model: str, processing_class: Any, script_args: Any, args: PPOConfig) -> list[Answer]:
    """The answers of `model`, a folder or hub id, and of the reference to the prompts of `dataset`, sampled as in an
    evaluation; of the policy alone, if there is no reference, or there are environments or tools. `script_args` name
    these, and the model that the run started from.
    """
    environments = named_environments(script_args)
    kinds = make_kinds(environments["tools"], environments["environment_factory"])
    # More tokens than any model reads, so that no prompt is dropped.
    prompts = make_prompts(dataset, processing_class, replace(args, query_len=1_000_000), kinds)
    query_len = args.query_len
    if args.overlong_prompts != "truncate":
        query_len = max(query_len, *(len(item["input_ids"]) for item in prompts))
    # An opponent has one turn.
    reference = "none" if kinds else _reference_of(model, script_args, args)
    opponent = None if reference == "none" else "reference"
    trainer = PPOTrainer(
        model,
        lambda completions, **columns: [0.0] * len(completions),
        replace(args, query_len=query_len, reference=reference, eval_opponent=opponent),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=processing_class,
        **environments,
    )
    trainer.evaluate()
    trainer.run_log.finish()
    return [
        Answer(prompt_text(item, processing_class), answer["response"], answer.get("opponent"))
        for item, answer in zip(prompts, trainer.evaluator.answers, strict=True)
    ]


def _reference_of(model: str, script_args: Any, args: PPOConfig) -> str:
    """The KL's reference: what the configuration names, if that is a model or none. Otherwise the model that the run
    started from, or an adapter's base; none if neither is known, or it is `model` itself.
    """
    if args.reference not in REFERENCES or args.reference == "none":
        return args.reference
    base = None
    if script_args.model_name_or_path:
        base = model_folder("model_name_or_path", script_args.model_name_or_path)
    elif is_adapter(model):
        base = read_adapter("model", model).base_model_name_or_path
    return "none" if not base or os.path.realpath(base) == os.path.realpath(model) else base


def named_environments(script_args: ScriptArguments) -> dict[str, Any]:
    """The arguments of `PPOTrainer` that the options `environments`, `tools` and `tool_call_parser` name.

    Raises:
        ValueError: for what cannot be imported, and for several environments without distinct names.
    """
    # `name=module:class`, or `module:class`.
    specs = [spec.rpartition("=") for spec in script_args.environments or ()]
    names = [name for name, _, _ in specs]
    factory: Any = None
    if names == [""]:
        factory = load_function(specs[0][2], what="environment")
    elif specs:
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(f"environments is {script_args.environments}; give each its own name: name=module:class")
        factory = {name: load_function(spec, what="environment") for name, _, spec in specs}
    parser = script_args.tool_call_parser
    return {
        "environment_factory": factory,
        "tools": [load_function(spec, what="tool") for spec in script_args.tools or ()] or None,
        "tool_call_parser": None if parser is None else load_function(parser, what="tool_call_parser"),
    }
