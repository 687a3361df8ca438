"""PPO on any causal language model, prompts and reward: `accelerate launch examples/train_ppo.py --config run.yaml`.

It does what `alpaca-ppo train` does, for launchers that start a script. Every field of `PPOConfig`, `ScriptArguments`
and `LoraArguments` is a flag and a YAML key; `--help` lists them by group. `--preset trl` reads a preset, and
`--import_modules my.py` adds the estimators, losses, critics and backends that the file registers. Relative paths count
from the current folder.
"""

import sys

from alpaca_ppo.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
