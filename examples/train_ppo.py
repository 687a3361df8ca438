"""PPO on any causal language model, prompts and reward: `accelerate launch examples/train_ppo.py --config run.yaml`.

Every field of `PPOConfig`, `ScriptArguments` and `LoraArguments` is a flag and a YAML key; `--help` lists them by
group. `--config trl` reads a preset, and `--import_modules my.py` adds the estimators, losses, critics and backends
that the file registers. Relative paths count from the current folder.
"""

import sys
from pathlib import Path

from alpaca_ppo import LoraArguments, PPOConfig, PPOTrainer, ScriptArguments, load_prompt_dataset, parse_args
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.trainer.preflight import check_start

# `python examples/train_ppo.py` puts examples/ on the path, not the folder that `examples.rewards.gsm8k:correct`
# counts from.
sys.path.insert(0, str(Path.cwd()))


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Parses the arguments, trains, and returns the last step's metrics."""
    script_args, lora, args = parse_args([ScriptArguments, LoraArguments, PPOConfig], argv)
    resume = script_args.resume_from_checkpoint
    check_start(args, resume)
    script_args.check_names(args)
    name, split, config = script_args.dataset_name, script_args.dataset_test_split, script_args.dataset_config
    train_dataset = load_prompt_dataset(name, split=script_args.dataset_train_split, config_name=config)
    eval_dataset = None
    if script_args.eval_dataset_name or split:
        if script_args.eval_dataset_name:
            name, config = script_args.eval_dataset_name, script_args.eval_dataset_config
        eval_dataset = load_prompt_dataset(name, split=split, config_name=config)
    trust = args.trust_remote_code
    # Models are given by name, so that the trainer checks prompts, tokens and reward functions before it loads one.
    trainer = PPOTrainer(
        model=script_args.model_name_or_path,
        reward_funcs=[*(script_args.reward_model_name_or_path or []), *(script_args.reward_funcs or [])],
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=load_processing_class(script_args.model_name_or_path, trust_remote_code=trust),
        value_model=script_args.value_model_name_or_path,
        peft_config=lora.peft_config("CAUSAL_LM"),
    )
    stats = trainer.train(resume_from_checkpoint=resume)
    trainer.accelerator.end_training()
    return stats


if __name__ == "__main__":
    main()
