"""Translates the configuration of other trainers into this package's options: TRL's GRPO and PPO scripts, and verl's
ppo_trainer.yaml and command lines.

`python -m alpaca_ppo.migrate FILE` prints the translation. Nothing of the other project is imported or executed.
"""

from alpaca_ppo.migrate.command import main, translate
from alpaca_ppo.migrate.translation import Translation
from alpaca_ppo.migrate.trl import translate_trl
from alpaca_ppo.migrate.verl import translate_verl

__all__ = ["Translation", "main", "translate", "translate_trl", "translate_verl"]
