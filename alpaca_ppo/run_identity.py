"""What a resumed run must have in common with the one it continues."""

from dataclasses import asdict
from typing import Any

from alpaca_ppo.batching import PromptSchedule
from alpaca_ppo.config import PPOConfig
from alpaca_ppo.models import ActorCritic

_FREE_TO_CHANGE = """
output_dir run_name report_to logging_steps save_steps save_total_limit eval_steps num_logged_rollouts push_to_hub
hub_model_id total_epochs total_episodes rollout_per_device_batch_size step_per_device_batch_size gradient_checkpointing
use_cpu logprob_chunk_size max_kl_to_ref merge_on_save max_skipped_updates eval_do_sample eval_top_p eval_top_k
trust_remote_code
""".split()


def run_identity(args: PPOConfig, schedule: PromptSchedule, actor_critic: ActorCritic) -> dict[str, Any]:
    """What a resumed run must have in common with the one it continues: the prompts' order, every field of `args` that
    decides numbers, and of adapters their configuration and base, which no checkpoint holds. A changed one would be
    ignored in part (the optimizer's state has the old learning rate).
    """
    decisive = {f"args.{name}": value for name, value in asdict(args).items() if name not in _FREE_TO_CHANGE}
    adapters = actor_critic.policy.adapters
    if adapters is not None:
        decisive |= {"peft_config": adapters.describe(), "frozen weights": adapters.fingerprint()}
    return {"data": schedule.identity(), **decisive}
