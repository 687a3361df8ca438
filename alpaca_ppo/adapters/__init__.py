"""LoRA: several adapters on one base model, the checks on them, their files on disk, and merging."""

from alpaca_ppo.adapters.adapter_set import (
    POLICY,
    REFERENCE,
    REWARD,
    VALUE,
    AdapterSet,
    add_policy_adapter,
    from_peft_model,
    load_adapters,
)
from alpaca_ppo.adapters.checks import inject_adapter
from alpaca_ppo.adapters.files import (
    check_adapter_shapes,
    check_whole_model,
    is_adapter,
    read_policy_adapter,
    read_reward_adapter,
    read_value_adapter,
)
from alpaca_ppo.adapters.merging import merged_weights

__all__ = [
    "POLICY", "REFERENCE", "REWARD", "VALUE", "AdapterSet", "from_peft_model", "add_policy_adapter",
    "check_adapter_shapes", "check_whole_model", "is_adapter", "load_adapters", "merged_weights", "inject_adapter",
    "read_policy_adapter", "read_reward_adapter", "read_value_adapter",
]  # fmt: skip
