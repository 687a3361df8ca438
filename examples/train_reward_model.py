"""Pairwise reward modelling (Bradley-Terry): the chosen completion's score is raised over the rejected one's.

    python examples/train_reward_model.py --config reward.yaml --output_dir outputs/reward_model

It does what `alpaca-ppo reward` does, for launchers that start a script. The output folder is an
`AutoModelForSequenceClassification` with one label and its tokenizer, and `train_ppo.py --reward_model_name_or_path`
scores a response exactly as it was scored here: prompt and completion as one text, or as messages through the chat
template. Every argument of `transformers.TrainingArguments` is a flag too; with `--use_peft` the folder is an adapter,
which `train_ppo.py --reward_adapter` puts on the policy's base.
"""

import sys

from alpaca_ppo.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(["reward", *sys.argv[1:]]))
