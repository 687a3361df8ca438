"""The evaluation of a model without a run: that of a trainer which never trains. `alpaca-ppo evaluate` calls it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig

from alpaca_ppo.adapters import is_adapter
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data.loading import load_eval_datasets
from alpaca_ppo.evaluation.opponents import REFERENCE, is_stored
from alpaca_ppo.evaluation.results import write_results
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.trainer.environment_setup import GivenEnvironments, named_environments
from alpaca_ppo.trainer.from_arguments import reward_sources
from alpaca_ppo.trainer.measure_checks import check_value_names
from alpaca_ppo.trainer.ppo_trainer import PPOTrainer

ANSWERS = "answers.jsonl"


def evaluate_alone(model: str, script_args: Any, config: Callable[..., PPOConfig]) -> dict[str, Any] | None:
    """Evaluates `model` and writes results.json, answers.jsonl and the tables; returns what results.json holds, on the
    main process only.

    The reference is that of the configuration, or the model that the run started from, or an adapter's base. An
    opponent that is another model answers first, with its own tokenizer.

    Args:
        model: folder or hub id.
        script_args: the eval sets, rewards and metrics (`ScriptArguments`), and `results_dir`.
        config: returns the configuration with the changes that are given to it.

    Raises:
        ValueError: without prompts, or without anything to measure.
    """
    folder, args = Path(script_args.results_dir), config()
    metrics, opponent = script_args.metric_funcs, args.eval_opponent
    environments = named_environments(script_args)
    given = GivenEnvironments(**environments)
    check_value_names(args, reward_sources(script_args), metrics, given)
    datasets = load_eval_datasets(script_args)
    if datasets is None:
        raise ValueError(
            "there are no prompts to evaluate on; give eval_dataset_name or eval_datasets, or dataset_name with "
            "dataset_test_split"
        )
    rewards = reward_sources(script_args)
    scored = bool(rewards or args.reward_adapter or given.source_names)
    if not (scored or metrics or opponent):
        raise ValueError(
            "there is nothing to measure; give reward_funcs, metric_funcs, eval_opponent or an environment with rewards"
        )
    changes = {"reference": reference_of(model, script_args, args)}
    if opponent is not None and opponent != REFERENCE and not is_stored(opponent):
        of_opponent: dict[str, Any] = {"eval_opponent": None, "eval_judge": "scores"}
        of_opponent |= {"eval_success_above": None, "eval_success_by": "scores"}
        of_opponent |= {"eval_num_samples": 1, "reference": "none", "output_dir": str(folder / "opponent")}
        trainer = _trainer(opponent, [no_reward], None, datasets, config(**of_opponent), {})
        trainer.evaluate()
        if trainer.accelerator.is_main_process:
            write_results(folder / "opponent", {"model": opponent, "metrics": {}}, trainer.evaluator.answers)
        trainer.accelerator.wait_for_everyone()
        trainer.run_log.finish()
        changes["eval_opponent"] = str(folder / "opponent" / ANSWERS)
    sources: list[Any] = [*rewards] or ([] if given.source_names else [no_reward])
    trainer = _trainer(model, sources, metrics, datasets, config(**changes), environments)
    stats = trainer.evaluate()
    trainer.run_log.finish()
    answers = trainer.evaluator.answers
    if not scored:
        stats = {name: value for name, value in stats.items() if not is_of_reward(name)}
        answers = [{name: value for name, value in row.items() if not is_of_reward(name)} for row in answers]
    if not trainer.accelerator.is_main_process:
        return None
    results = {"model": model, "opponent": opponent, **_procedure(trainer), "metrics": stats}
    write_results(folder, results, answers)
    return results


def _procedure(trainer: PPOTrainer) -> dict[str, Any]:
    """How the answers were drawn, and which of them are successes."""
    args, settings = trainer.args, trainer.evaluator.settings
    above = settings.success_above
    return {
        "prompts": {name: len(prompts) for name, prompts in trainer.eval_prompts.items()},
        "samples_per_prompt": settings.num_samples,
        "temperature": args.eval_temperature,
        "success": None if above is None else f"{settings.success_by} above {above:g}",
    }


def reference_of(model: str, script_args: Any, args: PPOConfig) -> str:
    """Returns what the KL is measured to: the reference that the configuration names, or what `model` started from."""
    if args.reference not in REFERENCES:
        return args.reference
    base = script_args.model_name_or_path
    if not base and is_adapter(model):
        base = PeftConfig.from_pretrained(model).base_model_name_or_path
    return base if base and base != model and args.reference != "none" else "none"


def no_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Scores nothing: what an evaluation without a reward has in its place."""
    return [0.0] * len(completions)


def is_of_reward(metric: str) -> bool:
    """Whether a metric is about the reward, and means nothing without one."""
    parts = metric.split("/")
    return any(part.removesuffix("_se") in ("scores", "scores_std", "rewards") for part in parts)


def _trainer(
    model: str, rewards: list[Any], metrics: Any, datasets: Any, args: PPOConfig, environments: dict[str, Any]
) -> PPOTrainer:
    return PPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=args,
        # It is never trained on.
        train_dataset=next(iter(datasets.values())) if isinstance(datasets, dict) else datasets,
        eval_dataset=datasets,
        processing_class=load_processing_class(model, trust_remote_code=args.trust_remote_code, field="model"),
        metric_funcs=metrics,
        **environments,
    )
