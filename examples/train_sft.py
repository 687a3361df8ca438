"""Supervised fine-tuning of a causal language model on prompts and completions; the loss is on the completions only.

    python examples/train_sft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name tatsu-lab/alpaca \
        --completion_column output --output_dir outputs/sft --learning_rate 1e-5

It does what `alpaca-ppo sft` does, for launchers that start a script. Every argument of
`transformers.TrainingArguments` is a flag too, and `--config run.yaml` reads them from a file. The output folder is a
model folder with its tokenizer, ready for `train_reward_model.py` and `train_ppo.py`, which prepare prompts by the same
code.
"""

import sys

from alpaca_ppo.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
