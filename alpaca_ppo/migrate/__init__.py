"""Translates the configuration of other trainers into this package's options: TRL's GRPO and PPO, and verl's.

What a name of theirs is here is in the table of names (`config.foreign_names`), which the errors for foreign names read
too; their defaults are in defaults.yaml. Nothing of the other project is imported or executed: of a Python script, the
literal arguments of the calls that are known here are read, and all others are listed.
"""

from alpaca_ppo.migrate.command import translate
from alpaca_ppo.migrate.translation import Translation

__all__ = ["Translation", "translate"]
