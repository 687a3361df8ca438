"""PPO on any causal language model, prompts and reward: `accelerate launch examples/train_ppo.py --config run.yaml`.

Every field of `PPOConfig` and `ScriptArguments` is a flag and a YAML key; `--help` lists them. Relative paths in a
reward function's name count from the current folder.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from alpaca_ppo import PPOConfig, PPOTrainer, ScriptArguments, load_prompt_dataset, parse_args
from alpaca_ppo.models import load_causal_lm, load_sequence_classifier

# `python examples/train_ppo.py` puts examples/ on the path, not the folder that `examples.rewards.gsm8k:correct`
# counts from.
sys.path.insert(0, str(Path.cwd()))


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Parses the arguments, trains, and returns the last step's metrics."""
    script_args, args = parse_args([ScriptArguments, PPOConfig], argv)
    trust = script_args.trust_remote_code
    data = {"config_name": script_args.dataset_config}
    train_dataset = load_prompt_dataset(script_args.dataset_name, split=script_args.dataset_train_split, **data)
    eval_dataset = None
    if script_args.eval_dataset_name or script_args.dataset_test_split:
        name = script_args.eval_dataset_name or script_args.dataset_name
        eval_dataset = load_prompt_dataset(name, split=script_args.dataset_test_split, **data)
    value, reference = script_args.value_model_name_or_path, script_args.ref_model_name_or_path
    trainer = PPOTrainer(
        model=load_causal_lm(script_args.model_name_or_path, trust_remote_code=trust),
        reward_funcs=[*(script_args.reward_model_name_or_path or []), *(script_args.reward_funcs or [])],
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=AutoTokenizer.from_pretrained(script_args.model_name_or_path, trust_remote_code=trust),
        value_model=value and load_sequence_classifier(value, trust_remote_code=trust),
        ref_model=reference and load_causal_lm(reference, trust_remote_code=trust),
    )
    resume = script_args.resume_from_checkpoint
    return trainer.train(resume_from_checkpoint=True if resume in ("true", "True") else resume)


if __name__ == "__main__":
    main()
