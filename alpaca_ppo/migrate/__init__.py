"""Translates configurations of TRL's GRPO and PPO, and of verl, into this package's options.

What their names are here is in the table of `config.foreign_names`; their defaults are in defaults.yaml. Nothing of the
other project is imported or executed.
"""

from alpaca_ppo.migrate.command import translate
from alpaca_ppo.migrate.translation import Translation

__all__ = ["Translation", "translate"]
