"""Validation: an error names field, value and remedy."""

import dataclasses
import math

import pytest
import torch

from alpaca_ppo import PPOConfig, functional
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.script_arguments import ScriptArguments
from alpaca_ppo.registry import ADV_ESTIMATORS, CRITIC_HEADS, POLICY_LOSSES
from tests.registered import temporary_choices


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_batch_size": 0}, "rollout_batch_size is 0; it must be at least 1"),
        (
            {"max_tokens_per_micro_batch": 491},
            r"max_tokens_per_micro_batch \(491\) is less than query_len \+ response_len \(492\).*set it to 492 or more",
        ),
        ({"max_skipped_updates": -1}, "max_skipped_updates is -1; it must be at least 0"),
        (
            {"metric_for_best_model": "objective/scores", "save_steps": 0},
            "metric_for_best_model is 'objective/scores', but save_steps is 0",
        ),
        (
            {"load_best_model_at_end": True},
            "load_best_model_at_end is True, but metric_for_best_model is null, .* or set load_best_model_at_end: f",
        ),
        (
            {"metric_for_best_model": "eval/scores", "save_steps": 4},
            "eval_steps is 0, so only the last step would be evaluated; set eval_steps, or choose a metric of",
        ),
        (
            {"metric_for_best_model": "objective/entropies", "save_steps": 4},
            "entropy_logging_steps is 10 and old_policy is 'auto', .* set entropy_logging_steps: 1 and old_policy: r",
        ),
        (
            {"metric_for_best_model": "objective/entropies", "save_steps": 4, "old_policy": "rollout"},
            "old_policy is 'rollout', .* set entropy_logging_steps: 1 and old_policy: recompute, or choose",
        ),
        (
            {"metric_for_best_model": "objective/entropies", "old_policy": "rollout", "entropy_logging_steps": 1}
            | {"save_steps": 4},
            "old_policy is 'rollout', .* set old_policy: recompute, or choose",
        ),
        (
            {"metric_for_best_model": "objective/ref_entropies", "save_steps": 4, "entropy_coef": 0.1},
            "entropy_logging_steps is 10 .* set entropy_logging_steps: 1, or choose",
        ),
        (
            {"metric_for_best_model": "ppo/policy/entropy", "save_steps": 4, "entropy_logging_steps": 2},
            "entropy_logging_steps is 2 .* set entropy_logging_steps: 1, or choose another metric",
        ),
        ({"save_steps": -1}, "save_steps is -1; it must be at least 0"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"kl_coef": float("nan")}, "kl_coef is nan; it must be finite and at least 0"),
        ({"gamma": 1.5}, "gamma is 1.5; it must be at least 0 and at most 1"),
        ({"cliprange": 1.0}, "cliprange is 1.0; it must be above 0 and below 1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; it must be above 1 or null"),
        ({"adam_beta2": 1.0}, "adam_beta2 is 1.0"),
        ({"reward_weights": []}, r"reward_weights is \[\]; give one number for each reward source, or null"),
        ({"penalty_reward_value": float("inf")}, "penalty_reward_value is inf; it must be finite or null"),
        ({"kl_estimator": "k9"}, "kl_estimator is 'k9'; choose one of k1, abs"),
        ({"critic_layout": "twin"}, "critic_layout is 'twin'; choose one of separate, shared"),
        ({"ppo_epochs": "two"}, r"ppo_epochs is 'two' \(str\); it must be int"),
        ({"ppo_epochs": True}, r"ppo_epochs is True \(bool\); it must be int"),
        ({"report_to": 3}, r"report_to is 3 \(int\); it must be list or str"),
        ({"reward_weights": ["1e-1"]}, r"an entry of reward_weights is '1e-1' \(str\); it must be float"),
        ({"reward_weights": [True]}, r"an entry of reward_weights is True \(bool\)"),
        ({"report_to": [1]}, r"an entry of report_to is 1 \(int\); it must be str, in quotes"),
        ({"truncate_tokens": [1.5]}, r"an entry of truncate_tokens is 1.5 \(float\); it must be str or int"),
        ({"run_name": 7}, r"run_name is 7 \(int\); it must be str or null, in quotes"),
        ({"total_epochs": 1, "total_episodes": 2}, r"total_epochs \(1\) and total_episodes \(2\) are both set"),
        ({"rollout_batch_size": 8, "step_batch_size": 16}, r"step_batch_size \(16\) is larger than"),
        (
            {"rollout_batch_size": 8, "step_batch_size": 4, "critic_step_batch_size": 9},
            r"^critic_step_batch_size \(9\) is larger than the responses of a step",
        ),
        (
            {"critic_layout": "shared", "critic_epochs": 2},
            "critic_step_batch_size is None, but with critic_layout 'shared' .* set both to null",
        ),
        ({"critic_epochs": 0}, "critic_epochs is 0; it must be at least 1 or null"),
        (
            {"num_return_sequences": 33, "generation_backend": "generate"},
            r"num_return_sequences \(33\) is larger than rollout_per_device_batch_size \(32\), but generation_backend "
            r"'generate' samples .* set rollout_per_device_batch_size to 33 or more, or generation_backend: auto",
        ),
        (
            {"kl_controller": "horizon", "kl_horizon": 10, "rollout_batch_size": 64},
            "kl_horizon is 10, so one step of 64 responses could .* set it to 13 or more",
        ),
        ({"k_beta": 5.0}, "k_beta is 5.0; it must be above 0 and below 5"),
        ({"push_to_hub": True}, "hub_model_id is not set"),
        (
            {"stop_on": ["error", "kl_runway"]},
            r"stop_on names 'kl_runway', which is neither a severity \(info, warning, error\) nor a rule of the "
            "doctor; the rules are constant_reward, ",
        ),
        ({"dynamic_sampling": True}, "dynamic_sampling is True, but num_return_sequences is 1, .* 2 or more"),
        ({"max_sampling_rounds": 0}, "max_sampling_rounds is 0; it must be at least 1"),
        (
            {"overlong_buffer_len": 6, "response_len": 5},
            r"overlong_buffer_len \(6\) is larger than response_len \(5\), .* set it to 5 or less, or to null",
        ),
        ({"overlong_penalty_factor": -1.0}, "overlong_penalty_factor is -1.0; it must be at least 0"),
        ({"truncate_after": 3}, "truncate_tokens is not set"),
        ({"critic": "c52"}, "critic is 'c52'; choose one of scalar, c51, hl_gauss, quantile, iqn"),
        ({"num_atoms": 1}, "num_atoms is 1; it must be at least 2"),
        ({"num_quantiles": 0}, "num_quantiles is 0; it must be at least 1"),
        (
            {"critic_pretraining_explained_variance": 0.5},
            "critic_pretraining_explained_variance is 0.5, but critic_pretraining_steps is 0, .* set "
            "critic_pretraining_steps to the most steps",
        ),
        ({"critic": "c51", "value_support": [2.0, 2.0]}, r"value_support is \[2.0, 2.0\]"),
        ({"critic": "c51", "value_support": [1.0]}, r"value_support is \[1.0\]"),
        ({"hl_gauss_sigma": 101}, "hl_gauss_sigma is 101; it must be above 0 and at most 100"),
        ({"quantile_huber_kappa": 0.0}, "quantile_huber_kappa is 0.0; it must be above 0"),
        ({"critic": "iqn", "risk_level": 1.5}, "risk_level is '1.5'; it must be neutral, a number above 0"),
        ({"critic": "iqn", "risk_level": "bold"}, "risk_level is 'bold'; it must be neutral"),
        (
            {"risk_level": 0.1},
            "risk_level is '0.1', but critic 'scalar' predicts the mean only; .* one of c51, hl_gauss, quantile, iqn",
        ),
        ({"adv_estimator": "a2c"}, "adv_estimator is 'a2c'; choose one of gae, grpo"),
        (
            {"adv_estimator": "rloo"},
            "num_return_sequences is 1; set it to 2 or more, or choose one of gae, reinforce_plus",
        ),
        (
            {"adv_estimator": "remax", "critic": "iqn"},
            "critic is 'iqn', but adv_estimator 'remax' has no critic; .* a critic: gae",
        ),
        (
            {"policy_loss": "gspo"},
            "loss_agg_mode is 'token-mean', but policy_loss 'gspo' .* set loss_agg_mode: seq-mean",
        ),
        (
            {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_c": 3.0},
            "clip_ratio_c is 3.0, but policy_loss 'gspo' has no dual clip",
        ),
        ({"policy_loss": "gmpo"}, "loss_agg_mode is 'token-mean', but policy_loss 'gmpo' is defined for 'seq-mean"),
        ({"policy_loss": "cispo", "clip_ratio_c": 3.0}, "policy_loss 'cispo' has no dual clip"),
        (
            {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean", "cliprange_high": 0.3},
            "cliprange_high is 0.3, but policy_loss 'sapo' clips nothing; set cliprange_high: null",
        ),
        ({"warmup_steps": 5}, "warmup_steps is 5, but lr_scheduler_type 'constant' has no warm-up; set"),
        ({"critic_lr_warmup_steps": 5}, "critic_lr_warmup_steps is 5, but lr_scheduler_type 'constant' has no warm-up"),
        (
            {"adv_estimator": "grpo", "num_return_sequences": 2, "critic_layout": "shared"},
            "critic_layout is 'shared', but adv_estimator 'grpo' has no critic; set critic_layout back to 'separate'",
        ),
        ({"dppo_divergence": "js"}, "dppo_divergence is 'js'"),
        ({"sapo_tau_neg": 0.0}, "sapo_tau_neg is 0.0"),
        ({"positive_nll_coef": -0.1}, "positive_nll_coef is -0.1"),
        (
            {"use_kl_in_reward": False, "kl_controller": "proportional"},
            "kl_controller is 'proportional', but use_kl_in_reward is False",
        ),
        ({"kl_controller": "proportional", "kl_coef": 0.0}, "kl_controller is 'proportional', but kl_coef is 0"),
        (
            {"init_value_with_reward": True, "critic_layout": "shared"},
            "init_value_with_reward is True, but with critic_layout 'shared'",
        ),
        ({"lam_policy": "adaptve"}, "lam_policy is 'adaptve'; it must be adaptive, a number from 0 to 1, or null"),
        ({"lam_policy": 1.5}, "lam_policy is 1.5; it must be at least 0 and at most 1 or null"),
        ({"lam_critic": -0.1}, "lam_critic is -0.1; it must be at least 0 and at most 1 or null"),
        ({"lam_alpha": 0.0}, "lam_alpha is 0.0; it must be above 0"),
        ({"qae_quantile": 0.0}, "qae_quantile is 0.0; it must be above 0 and at most 1"),
        (
            {"adv_estimator": "remax", "lam_policy": "adaptive"},
            "lam_policy is 'adaptive', but adv_estimator 'remax' has no critic; set lam_policy back to None",
        ),
        ({"adv_estimator": "remax", "gamma": 0.9}, "gamma is 0.9, but adv_estimator 'remax' weights whole responses"),
        (
            {"reference": "none", "use_kl_in_reward": False, "max_kl_to_ref": 5.0},
            "max_kl_to_ref is 5.0, but reference is 'none'",
        ),
        ({"ignore_changes": ["data", "models"]}, "ignore_changes has 'models'"),
        (
            {"use_kl_loss": True, "kl_loss_type": "abs"},
            "kl_loss_type is 'abs', whose gradient jumps where the policy equals the reference.* set kl_loss_type to "
            r"one of k1, k2, k3, k1\+, k3\+",
        ),
        ({"use_kl_loss": True, "kl_loss_type": "k1_clamped"}, "kl_loss_type is 'k1_clamped', whose gradient jumps"),
        ({"kl_loss_type": "k4"}, "kl_loss_type is 'k4'; choose one of k1"),
        ({"old_policy": "new"}, "old_policy is 'new'; choose one of auto, recompute, rollout, correct"),
        ({"rollout_correction_threshold": 0.0}, "rollout_correction_threshold is 0.0; it must be above 0"),
        ({"target_kl_stop": -1.0}, "target_kl_stop is -1.0; it must be above 0 or null"),
        ({"critic_learning_rate": -1.0}, "critic_learning_rate is -1.0; it must be at least 0 or null"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_an_entropy_that_every_step_has_may_choose_the_best_model():
    PPOConfig(metric_for_best_model="ppo/policy/entropy", save_steps=4, entropy_coef=0.1)
    for source in ("recompute", "correct"):
        metric = {"metric_for_best_model": "objective/entropies", "entropy_logging_steps": 1}
        PPOConfig(**metric, save_steps=4, old_policy=source)


@pytest.mark.parametrize("backend", ["auto", "slots"])
def test_a_prompt_may_have_more_responses_than_slots(backend):
    args = PPOConfig(num_return_sequences=33, generation_backend=backend)
    assert args.num_return_sequences > args.rollout_per_device_batch_size


def test_an_estimator_with_a_kink_is_allowed_in_the_reward_and_where_there_is_no_kl_loss():
    for kind in ("abs", "k1_clamped"):
        assert PPOConfig(kl_estimator=kind, kl_loss_type=kind).kl_estimator == kind
        assert PPOConfig(kl_estimator=kind, use_kl_loss=True).kl_loss_type == "k3"


def test_a_registered_estimator_says_whether_it_has_a_kink():
    with temporary_choices():
        functional.register_kl_estimator("smooth")(torch.square)
        functional.register_kl_estimator("sharp", kink_at_zero=True)(torch.abs)
        assert PPOConfig(use_kl_loss=True, kl_loss_type="smooth").kl_loss_type == "smooth"
        with pytest.raises(ValueError, match="kl_loss_type is 'sharp'.* set kl_loss_type to one of k1, .*smooth$"):
            PPOConfig(use_kl_loss=True, kl_loss_type="sharp")


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().kl_coef = 1.0


def test_a_risk_level_may_be_a_number():
    assert PPOConfig(critic="c51", risk_level=0.25).risk_level == "0.25"


def test_loss_modes_are_those_of_the_functions():
    assert options_of(PPOConfig)["loss_agg_mode"].choices == functional.LOSS_AGG_MODES
    assert options_of(PPOConfig)["rollout_correction_level"].choices == functional.ROLLOUT_CORRECTION_LEVELS


def test_the_group_estimators_are_the_built_in_ones_that_need_a_group():
    names = ("grpo", "grpo_no_std", "rloo", "opo", "reinforce_plus_plus_baseline", "qae", "grpo_passk")
    # gdpo compares several scores of each response, in a function of its own.
    assert functional.GROUP_ESTIMATORS == names
    assert ADV_ESTIMATORS.names_with(needs_group=True) == (*names, "gdpo")


def test_a_single_tracker_needs_no_list():
    assert PPOConfig(report_to="tensorboard").report_to == ["tensorboard"]


def test_a_weight_may_have_no_upper_limit():
    assert PPOConfig(rollout_correction_threshold=math.inf).rollout_correction_threshold == math.inf


@pytest.fixture
def registered():
    """An estimator with a critic and one without, a critic head and a policy loss of a user."""
    with temporary_choices():
        ADV_ESTIMATORS.register("with_values", needs_critic=True)(object)
        ADV_ESTIMATORS.register("in_groups", needs_group=True, uses_gamma=True)(object)
        CRITIC_HEADS.register("gaussian", distributional=True)(object)
        POLICY_LOSSES.register("sums", loss_agg_mode="seq-mean-token-sum")(object)
        yield


@pytest.mark.parametrize(
    "settings",
    [
        {"adv_estimator": "with_values", "critic": "gaussian", "risk_level": 0.1, "gamma": 0.9},
        {"adv_estimator": "in_groups", "num_return_sequences": 2, "gamma": 0.9},
        {"policy_loss": "sums", "loss_agg_mode": "seq-mean-token-sum"},
    ],
)
def test_registered_names_are_as_valid_as_built_in_ones(registered, settings):
    args = PPOConfig(**settings)
    assert args.uses_critic == (settings.get("adv_estimator") != "in_groups")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adv_estimator": "in_groups"}, "adv_estimator is 'in_groups', which compares the responses to one prompt"),
        (
            {"adv_estimator": "in_groups", "num_return_sequences": 2, "critic_pretraining_steps": 3},
            "critic_pretraining_steps is 3, but adv_estimator 'in_groups' has no critic; set critic_pretraining_steps "
            "back to 0, or choose an estimator with a critic: gae, with_values",
        ),
        ({"policy_loss": "sums"}, "policy_loss 'sums' is defined for 'seq-mean-token-sum' only"),
        (
            {"policy_loss": "sums", "loss_agg_mode": "seq-mean-token-sum", "clip_ratio_c": 3.0},
            "clip_ratio_c is 3.0, but policy_loss 'sums' has no dual clip; set clip_ratio_c: null",
        ),
        (
            {"critic": "laplace"},
            "critic is 'laplace'; choose one of scalar, c51, hl_gauss, quantile, iqn, gaussian, or register",
        ),
    ],
)
def test_registered_traits_are_checked(registered, settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"reference": "copy_offloaded", "critic_layout": "adapter"}, {"critic_layout": "separate"}],
)
def test_a_four_bit_base_is_not_copied(settings):
    with pytest.raises(ValueError, match="load_in_4bit is True, but critic_layout is .* cannot be copied"):
        PPOConfig(load_in_4bit=True, **settings)


def test_a_four_bit_base_is_shared():
    # A folder may be named like the choice `copy`.
    for reference in ("auto", "copy_of_my_model"):
        assert PPOConfig(load_in_4bit=True, critic_layout="adapter", reference=reference).reference == reference


def test_without_a_reference_nothing_may_need_its_kl():
    with pytest.raises(ValueError, match="reference is 'none', but use_kl_in_reward is True with kl_coef 0.05"):
        PPOConfig(reference="none")
    with pytest.raises(ValueError, match="use_kl_loss is True; set both to false, or keep a reference"):
        PPOConfig(reference="none", use_kl_in_reward=False, use_kl_loss=True)
    assert PPOConfig(reference="none", kl_coef=0.0).reference == "none"


def test_a_risk_level_of_many_digits_is_refused_in_words():
    with pytest.raises(ValueError, match="risk_level is 'a number of 20001 bits'; it must be neutral, a number"):
        PPOConfig(risk_level=2**20000)


def test_a_checkpoint_of_many_digits_is_refused_by_its_name():
    needed = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"]}
    with pytest.raises(ValueError, match="resume_from_checkpoint is a number of 20001 bits .int.; it must be str"):
        ScriptArguments(**needed, resume_from_checkpoint=2**20000)
