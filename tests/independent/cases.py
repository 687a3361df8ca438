"""The configurations in which the trainer is compared with the independent PPO."""

from dataclasses import dataclass, field
from typing import Any

from tests.tiny_runs import acting


def even(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Three quarters for each even token, less one."""
    return [0.75 * sum(token % 2 == 0 for token in ids) - 1.0 for ids in completion_ids]


def short(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[float | None]:
    """Half a point for each token below four; no opinion on single tokens."""
    return [None if len(ids) == 1 else (4 - len(ids)) / 2 for ids in completion_ids]


def tokens(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[list[float]]:
    """A number for each token, by its place and its id."""
    return [[(token % 5) / 4 - 0.5 * (place % 2) for place, token in enumerate(ids)] for ids in completion_ids]


SOURCES = {"even": even, "short": short, "tokens": tokens}
"""Reward functions. All sums of their scores are exact in float32, in which the trainer keeps raw scores."""

BASE: dict[str, Any] = {
    "rollout_batch_size": 6,
    "rollout_per_device_batch_size": 4,
    "step_batch_size": 4,
    "step_per_device_batch_size": 3,
    "ppo_epochs": 2,
    # The critic steps with the policy.
    "critic_epochs": None,
    "kl_coef": 0.05,
    "kl_controller": "fixed",
    "response_len": 5,
    # A quarter of the vocabulary ends a response, so that lengths differ.
    "truncate_tokens": list(range(10, 26)),
    "learning_rate": 0.02,
    "vf_coef": 0.5,
    "cliprange": 0.1,
    # With a small epsilon an update hardly depends on the size of the gradient, nor on a wrong factor of the loss.
    "adam_epsilon": 0.1,
    "max_grad_norm": 1e6,
    "num_logged_rollouts": 0,
    "num_inspected_prompts": 0,
    "report": False,
    "logprob_chunk_size": 5,
}


@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        options: fields of PPOConfig that differ from BASE.
        family: of the policy's model.
        lora: whether policy (and critic, with critic_layout adapter) are adapters.
        sources: names in SOURCES.
        holes: whether responses have tokens that the policy did not choose.
        mismatch: standard deviation of the difference between the sampler's and the trainer's log-probs.
    """

    options: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    lora: bool = False
    sources: tuple[str, ...] = ("even",)
    holes: bool = False
    mismatch: float = 0.0

    def settings(self) -> dict[str, Any]:
        """All fields of PPOConfig that are set. Two of the run's three steps are trained, which the schedule sees.

        A case with holes or a mismatch changes what was sampled, so the sampler's log-probs are not the policy's.
        """
        merged = acting({**BASE, "mismatch_action": "ignore"} | self.options) | self.options
        return acting({"total_episodes": 3 * merged["rollout_batch_size"], **merged})


def case(
    *,
    family: str = "llama",
    lora: bool = False,
    sources: tuple[str, ...] = ("even",),
    holes: bool = False,
    mismatch: float = 0.0,
    **options: Any,
) -> Case:
    """A Case with `options` as keywords."""
    return Case(options, family, lora, sources, holes, mismatch)


PAIRS: dict[str, Any] = {"rollout_batch_size": 3, "num_return_sequences": 2}
TRIPLES: dict[str, Any] = {"rollout_batch_size": 2, "num_return_sequences": 3}
WITH_KL_LOSS: dict[str, Any] = {"kl_loss_coef": 0.3}
ADAPTER: dict[str, Any] = {"critic_layout": "adapter", "lora": True}
CACHED: dict[str, Any] = {"critic_layout": "cached", "critic_width": 64, "critic_depth": 1, "family": "qwen2"}
GSPO: dict[str, Any] = {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"}
TEACHER: dict[str, Any] = {"teacher_model_name_or_path": "a model in memory"}
CORRECTED: dict[str, Any] = {"old_policy": "correct", "mismatch": 0.4}

CASES: dict[str, Case] = {
    "scalar": case(),
    "scalar, values not clipped": case(cliprange_value=None, lam=1.0, gamma=0.9, sources=("tokens",)),
    "scalar, values clipped hard": case(cliprange_value=0.05, vf_coef=2.0, ppo_epochs=3, lam=0.0, holes=True),
    "scalar, shared": case(critic_layout="shared", critic_learning_rate=0.05, entropy_coef=0.1),
    "scalar, shared, warm-up": case(critic_layout="shared", critic_pretraining_steps=1, weight_decay=0.3),
    "scalar, adapter": case(**ADAPTER, temperature=0.7, weight_decay=0.2, holes=True),
    "scalar, adapter, warm-up": case(
        **ADAPTER, critic_pretraining_steps=1, critic_learning_rate=0.1, gradient_checkpointing=True
    ),
    "scalar beside an adapter": case(lora=True, reference="copy", kl_coef=0.4, **WITH_KL_LOSS, kl_loss_type="k2"),
    "scalar, shared with an adapter": case(critic_layout="shared", lora=True, loss_agg_mode="seq-mean-token-sum-norm"),
    "scalar, two responses to a prompt": case(**PAIRS, holes=True, lam=0.5),
    "quantile, adapter": case(critic="quantile", num_atoms=4, **ADAPTER, critic_pretraining_steps=1, lam=0.5),
    "c51": case(critic="c51", num_atoms=7, value_support=[-4.0, 4.0]),
    "c51, narrow support": case(
        critic="c51", num_atoms=5, value_support=[-0.5, 1.0], critic_layout="shared", loss_agg_mode="seq-mean-token-sum"
    ),
    "c51, tail": case(
        critic="c51",
        num_atoms=11,
        value_support=[-3.0, 5.0],
        risk_level="0.25",
        **ADAPTER,
        sources=("even", "short"),
        reward_weights=[0.5, -1.0],
    ),
    "c51, upper tail": case(critic="c51", num_atoms=7, value_support=[-10.0, 5.0], risk_level="upper:0.4", lam=0.5),
    "hl_gauss": case(critic="hl_gauss", num_atoms=7, value_support=[-4.0, 3.0], sources=("tokens",), holes=True),
    "hl_gauss, narrow support": case(
        critic="hl_gauss",
        num_atoms=5,
        value_support=[-0.5, 1.0],
        critic_layout="shared",
        loss_agg_mode="seq-mean-token-sum",
    ),
    "hl_gauss, upper tail": case(
        critic="hl_gauss", num_atoms=9, risk_level="upper:0.2", **ADAPTER, lam=0.6, critic_pretraining_steps=1
    ),
    "quantile": case(critic="quantile", num_atoms=4, gamma=0.95, family="gpt2"),
    "quantile, upper tail": case(
        critic="quantile", num_atoms=5, risk_level="upper:0.1", lam=0.5, learning_rate=0.05, ppo_epochs=3
    ),
    "quantile, tail inside one quantile": case(
        critic="quantile", num_atoms=5, risk_level="0.1", lam=0.5, critic_layout="shared", holes=True
    ),
    "quantile, tail": case(
        critic="quantile",
        num_atoms=6,
        risk_level="0.6",
        quantile_huber_kappa=0.3,
        **ADAPTER,
        loss_agg_mode="seq-mean-token-mean",
    ),
    "iqn": case(critic="iqn", num_atoms=4),
    "iqn, tail": case(
        critic="iqn",
        num_atoms=3,
        risk_level="0.3",
        quantile_huber_kappa=2.0,
        family="gpt2",
        critic_layout="shared",
        sources=("tokens",),
    ),
    "iqn, upper tail": case(critic="iqn", num_atoms=3, risk_level="upper:0.5", lam=0.5, ppo_epochs=3),
    "iqn, adapter, warm-up": case(
        critic="iqn", num_atoms=3, **ADAPTER, critic_pretraining_steps=1, lr_scheduler_type="linear"
    ),
    "scalar, the default steps": case(critic_epochs=4),
    "scalar, shared, which has no steps of its own": case(critic_layout="shared", critic_epochs=4),
    "scalar, steps of its own": case(family="qwen2", lam=0.5, critic_epochs=3, critic_step_batch_size=5, holes=True),
    "quantile, adapter, recomputed": case(
        **ADAPTER,
        family="qwen2",
        critic="quantile",
        num_atoms=4,
        gradient_checkpointing=True,
        max_grad_norm=0.2,
        weight_decay=0.2,
    ),
    "scalar, cached": case(
        **CACHED, critic_learning_rate=0.02, critic_epochs=3, critic_step_batch_size=5, holes=True, lam=0.5
    ),
    "c51, cached": case(critic="c51", num_atoms=7, value_support=[-4.0, 4.0], **CACHED, critic_pretraining_steps=1),
    "hl_gauss, cached": case(critic="hl_gauss", num_atoms=7, **CACHED, lora=True, critic_layers=[2]),
    "quantile, cached": case(
        critic="quantile",
        num_atoms=4,
        critic_layout="cached",
        critic_depth=2,
        critic_width=128,
        family="qwen2",
        ppo_epochs=3,
        holes=True,
    ),
    "iqn, cached": case(critic="iqn", num_atoms=4, **CACHED, critic_learning_rate=0.01, gradient_checkpointing=True),
    "gae, not whitened": case(whiten_advantages=False, kl_estimator="k3", holes=True),
    "gae, whitened rewards": case(
        whiten_rewards=True, gamma=0.8, lam=0.7, kl_estimator="k2", sources=("even", "tokens")
    ),
    "grpo": case(adv_estimator="grpo", **TRIPLES, **WITH_KL_LOSS, kl_coef=0.0, kl_loss_type="k3"),
    "grpo_no_std": case(
        adv_estimator="grpo_no_std",
        **PAIRS,
        holes=True,
        response_len=4,
        loss_agg_mode="seq-mean-token-sum-norm",
        kl_coef=0.3,
    ),
    "rloo": case(adv_estimator="rloo", **TRIPLES, loss_agg_mode="seq-mean-token-sum", kl_coef=0.3, holes=True),
    "opo": case(adv_estimator="opo", **TRIPLES, sources=("short", "even"), kl_estimator="abs", holes=True),
    "reinforce_plus_plus": case(
        adv_estimator="reinforce_plus_plus", gamma=0.9, kl_coef=0.2, holes=True, sources=("tokens",)
    ),
    "reinforce_plus_plus_baseline": case(
        adv_estimator="reinforce_plus_plus_baseline", **PAIRS, kl_coef=0.2, temperature=1.3, family="gpt2", holes=True
    ),
    "remax": case(adv_estimator="remax", kl_coef=0.2, family="gpt2", penalty_reward_value=-1.5),
    "remax of pairs": case(adv_estimator="remax", **PAIRS, sources=("tokens",), penalty_reward_value=-0.5, holes=True),
    "gae of pairs, overlong": case(
        **PAIRS, **ADAPTER, lam=0.6, gamma=0.9, holes=True, overlong_buffer_len=4, penalty_reward_value=-1.5
    ),
    "gae of triples, overlong": case(
        **TRIPLES,
        lam=0.8,
        critic="quantile",
        num_atoms=3,
        critic_layout="shared",
        sources=("tokens", "even"),
        overlong_buffer_len=2,
        whiten_rewards=True,
    ),
    "gae, decoupled and adaptive": case(lam_policy="adaptive", lam_alpha=0.7, lam_critic=1.0, gamma=0.95, holes=True),
    "qae": case(adv_estimator="qae", **TRIPLES, kl_coef=0.3, holes=True),
    "grpo_passk": case(adv_estimator="grpo_passk", **TRIPLES, kl_coef=0.3, holes=True, sources=("tokens",)),
    "gdpo": case(
        adv_estimator="gdpo",
        **TRIPLES,
        kl_coef=0.3,
        holes=True,
        sources=("even", "short", "tokens"),
        reward_weights=[1.0, -0.5, 2.0],
        penalty_reward_value=-1.5,
    ),
    "clip-higher": case(cliprange=0.02, cliprange_high=0.3, temperature=1.5, ppo_epochs=3),
    "dual clip": case(clip_ratio_c=1.05, cliprange_value=0.2, cliprange=0.03, learning_rate=0.1, ppo_epochs=3),
    "gspo": case(**GSPO, cliprange=0.02, cliprange_high=0.3, learning_rate=0.005, ppo_epochs=3),
    "gspo of groups": case(**GSPO, adv_estimator="grpo", **TRIPLES, holes=True, entropy_coef=0.05, ppo_epochs=3),
    "gspo, corrected": case(**GSPO, **CORRECTED),
    "cispo": case(policy_loss="cispo", cliprange=0.05, cliprange_high=0.2, ppo_epochs=3, holes=True),
    "cispo, corrected": case(policy_loss="cispo", loss_agg_mode="seq-mean-token-sum", **CORRECTED),
    "sapo": case(
        policy_loss="sapo", loss_agg_mode="seq-mean-token-mean", adv_estimator="grpo", **TRIPLES, ppo_epochs=3
    ),
    "gmpo": case(
        policy_loss="gmpo",
        loss_agg_mode="seq-mean-token-mean",
        cliprange=0.05,
        cliprange_high=0.15,
        ppo_epochs=3,
        holes=True,
    ),
    "dppo": case(policy_loss="dppo", cliprange=0.01, cliprange_high=0.02, clip_ratio_c=1.1, ppo_epochs=3),
    "dppo, kl": case(
        policy_loss="dppo_kl", cliprange=0.0005, cliprange_high=0.001, ppo_epochs=3, adv_estimator="rloo", **PAIRS
    ),
    "successes": case(positive_nll_coef=0.3, sources=("even", "short"), penalty_reward_value=1.0, **CORRECTED),
    "successes above a threshold": case(
        positive_nll_coef=0.5, positive_nll_threshold=0.5, sources=("tokens",), critic_layout="shared", holes=True
    ),
    "truncated responses masked": case(
        mask_truncated=True,
        response_len=4,
        critic="quantile",
        num_atoms=4,
        positive_nll_coef=0.2,
        sources=("tokens",),
        holes=True,
    ),
    "truncated responses masked, groups": case(
        mask_truncated=True,
        adv_estimator="grpo",
        **TRIPLES,
        **CORRECTED,
        loss_agg_mode="seq-mean-token-sum",
        entropy_coef=0.1,
        **WITH_KL_LOSS,
    ),
    "truncated responses masked, one a step": case(
        mask_truncated=True, step_batch_size=1, ppo_epochs=1, response_len=3, weight_decay=0.3
    ),
    "recomputed log-probs": case(old_policy="recompute", kl_coef=0.3),
    "sampler's log-probs": case(old_policy="rollout", mismatch=0.1, kl_coef=0.3),
    "corrected tokens": case(**CORRECTED, rollout_correction_threshold=1.2, entropy_coef=0.1, **WITH_KL_LOSS),
    "corrected tokens, sums of sequences": case(**CORRECTED, loss_agg_mode="seq-mean-token-sum", holes=True),
    "corrected sequences": case(
        **CORRECTED,
        rollout_correction_level="sequence",
        rollout_correction_threshold=float("inf"),
        loss_agg_mode="seq-mean-token-mean",
        holes=True,
    ),
    "corrected sequences, of pairs": case(
        **CORRECTED,
        rollout_correction_level="sequence",
        rollout_correction_threshold=1.1,
        adv_estimator="rloo",
        **PAIRS,
    ),
    "kl in the loss, k1": case(**WITH_KL_LOSS, kl_loss_type="k1", kl_coef=0.0),
    "kl in the loss, k1+": case(**WITH_KL_LOSS, kl_loss_type="k1+", kl_estimator="k1+", temperature=0.8),
    "kl in the loss, k3+": case(
        **WITH_KL_LOSS, kl_loss_type="k3+", kl_estimator="k3+", loss_agg_mode="seq-mean-token-sum-norm", holes=True
    ),
    "kl clamped": case(kl_estimator="k1_clamped", kl_coef=0.5, kl_controller="proportional", target_kl=0.5),
    "proportional controller": case(
        kl_coef=0.5, kl_controller="proportional", target_kl=0.01, kl_estimator="k3", critic_layout="shared"
    ),
    "horizon controller": case(
        kl_coef=0.5,
        kl_controller="horizon",
        target_kl=3.0,
        kl_horizon=10,
        reference="copy_offloaded",
        adv_estimator="rloo",
        **PAIRS,
    ),
    "horizon controller, low": case(
        kl_coef=0.5, kl_controller="horizon", target_kl=0.05, kl_horizon=20, kl_estimator="k2"
    ),
    # The variance of eight scores is exact in float32.
    "scaled controller": case(
        kl_coef=0.5, kl_controller="scaled", sources=("even", "short"), reward_weights=[3.0, 0.25], rollout_batch_size=8
    ),
    "no reference": case(reference="none", kl_coef=0.0, entropy_coef=0.2),
    "penalty": case(penalty_reward_value=-2.0, sources=("even", "short"), reward_weights=[1.0, 0.25]),
    "penalty of token rewards": case(penalty_reward_value=-1.0, sources=("tokens", "even"), reward_weights=[2.0, 0.5]),
    "linear with warm-up": case(
        lr_scheduler_type="linear", warmup_steps=3, weight_decay=0.5, critic_learning_rate=0.005, family="gpt2"
    ),
    "cosine with warm-up": case(
        lr_scheduler_type="cosine",
        warmup_steps=2,
        adam_beta1=0.5,
        adam_beta2=0.9,
        adam_epsilon=1e-3,
        critic_layout="shared",
    ),
    "constant with warm-up": case(lr_scheduler_type="constant_with_warmup", warmup_steps=5, adam_epsilon=1e-6),
    "critic first": case(critic_pretraining_steps=1, weight_decay=0.4, lr_scheduler_type="linear", warmup_steps=1),
    "critic first, of returns that are whitened": case(
        critic_pretraining_steps=1,
        lr_scheduler_type="linear",
        kl_controller="proportional",
        target_kl=0.5,
        gamma=0.9,
        lam=0.3,
        whiten_rewards=True,
        holes=True,
    ),
    "separate steps": case(
        critic_epochs=3,
        critic_step_batch_size=5,
        ppo_epochs=1,
        lr_scheduler_type="cosine",
        critic_lr_warmup_steps=2,
        weight_decay=0.3,
        adam_beta1=0.5,
    ),
    "separate steps, iqn, adapter, stopped by the kl": case(
        critic="iqn",
        num_atoms=3,
        **ADAPTER,
        critic_epochs=1,
        critic_pretraining_steps=1,
        target_kl_stop=0.002,
        ppo_epochs=3,
        lr_scheduler_type="linear",
        warmup_steps=1,
        critic_lr_warmup_steps=0,
    ),
    "stopped by the kl": case(target_kl_stop=0.22, ppo_epochs=3, lr_scheduler_type="linear"),
    "stopped by the kl, with a warm-up": case(
        target_kl_stop=0.27, critic_pretraining_steps=1, adv_estimator="gae", holes=True, ppo_epochs=3
    ),
    "teacher": case(**TEACHER, teacher_coef=0.7, temperature=0.8, holes=True, critic_layout="shared"),
    "teacher, of each token alone": case(**TEACHER, gamma=0.0, sources=("tokens",), kl_coef=0.0, family="gemma3"),
    "teacher, no critic": case(**TEACHER, teacher_coef=2.0, adv_estimator="grpo", **PAIRS),
    "one row left over": case(rollout_batch_size=7, step_batch_size=3, step_per_device_batch_size=2, ppo_epochs=1),
    "one batch": case(
        rollout_batch_size=5,
        step_batch_size=5,
        step_per_device_batch_size=1,
        rollout_per_device_batch_size=2,
        gamma=0.0,
    ),
    "clipped gradients, no critic": case(max_grad_norm=0.01, adv_estimator="grpo", **PAIRS),
    "clipped gradients": case(max_grad_norm=0.5, vf_coef=3.0),
    "clipped gradients of a distribution": case(
        max_grad_norm=0.3, critic_max_grad_norm=0.02, critic="c51", num_atoms=9
    ),
    "clipped gradients, shared": case(
        critic_layout="shared", max_grad_norm=0.2, critic_max_grad_norm=1.5, vf_coef=4.0, critic_pretraining_steps=1
    ),
    "clipped gradients, adapter": case(
        **ADAPTER, critic="quantile", max_grad_norm=1e6, critic_max_grad_norm=0.1, holes=True
    ),
    "AdamW's settings": case(adam_beta1=0.5, adam_beta2=0.9, adam_epsilon=0.02, weight_decay=0.2, family="gpt2"),
    "AdamW's epsilon, shared": case(
        critic_layout="shared", critic="iqn", adam_epsilon=0.5, weight_decay=0.3, lr_scheduler_type="cosine"
    ),
    "capped logits": case(family="gemma3", critic_layout="shared", temperature=0.8, entropy_coef=0.1, **WITH_KL_LOSS),
    "capped logits, adapter": case(family="gemma3", **ADAPTER, whiten_rewards=True),
    "mixture": case(family="mixtral", entropy_coef=0.05),
    "mixture, gspo of groups": case(family="mixtral", **GSPO, adv_estimator="rloo", **PAIRS),
}
