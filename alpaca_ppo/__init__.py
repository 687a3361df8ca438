"""Critic-based PPO for causal language models on Hugging Face Accelerate.

`PPOTrainer` is the training loop and `PPOConfig` its configuration. `functional` has the mathematics, `generation` the
sampler, `rewards` the reward sources, and `data` the prompts. Public names are imported on first use, because
transformers and accelerate take seconds to import.

The import also sets environment variables of OpenMP (`_WAITING`), unless they are set.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alpaca_ppo.config import LoraArguments as LoraArguments
    from alpaca_ppo.config import PPOConfig as PPOConfig
    from alpaca_ppo.config import ScriptArguments as ScriptArguments
    from alpaca_ppo.config import parse_args as parse_args
    from alpaca_ppo.data import load_prompt_dataset as load_prompt_dataset
    from alpaca_ppo.models import ActorCritic as ActorCritic
    from alpaca_ppo.rewards import RemoteReward as RemoteReward
    from alpaca_ppo.trainer import PPOTrainer as PPOTrainer

__version__ = "0.1.0"

_WAITING = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "0"}
"""How long a waiting thread of OpenMP keeps its core busy before it sleeps: about 0.1 ms with GNU's, not at all with
Intel's and LLVM's, which count whole milliseconds. The defaults are much longer, which makes a run many times slower
when another program needs a core. To sleep at once costs time on idle cores, because most waits are shorter than a
wake-up. OpenMP reads the variables when torch is first imported, which is after this module."""
if not {"OMP_WAIT_POLICY", *_WAITING} & os.environ.keys():
    os.environ.update(_WAITING)

_SUBPACKAGES = {
    "ActorCritic": "models",
    "LoraArguments": "config",
    "PPOConfig": "config",
    "PPOTrainer": "trainer",
    "RemoteReward": "rewards",
    "ScriptArguments": "config",
    "load_prompt_dataset": "data",
    "parse_args": "config",
}
__all__ = [*sorted(_SUBPACKAGES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module 'alpaca_ppo' has no attribute {name!r}, only {', '.join(__all__)}")
    return getattr(importlib.import_module(f"alpaca_ppo.{_SUBPACKAGES[name]}"), name)
