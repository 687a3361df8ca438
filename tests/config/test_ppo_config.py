"""Validation: an error names field, value and remedy."""

import dataclasses
import math

import pytest
import torch
from transformers import get_scheduler

from alpaca_ppo import PPOConfig, functional
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.registry import ADV_ESTIMATORS, CRITIC_HEADS, POLICY_LOSSES
from tests.option_types import choices
from tests.registered import temporary_choices

GRPO = {"adv_estimator": "grpo", "num_return_sequences": 2}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens_per_micro_batch": 491}, "max_tokens_per_micro_batch is 491; query_len response_len 492"),
        # Step k measures it before its update, and saves checkpoint-k after it.
        (
            {"metric_for_best_model": "objective/scores", "eval_steps": 4},
            "metric_for_best_model 'objective/scores' eval/",
        ),
        ({"reward_weights": []}, "reward_weights is []"),
        ({"total_epochs": 1, "total_episodes": 2}, "total_epochs (1) total_episodes (2)"),
        ({"max_steps": 3, "total_epochs": 1}, "total_epochs (1) max_steps (3)"),
        ({"rollout_batch_size": 8, "step_batch_size": 16}, "step_batch_size (16) 8"),
        ({"step_batch_size": 2**20000}, "step_batch_size (a number of 20001 bits)"),
        ({"rollout_batch_size": 8, "step_batch_size": 4, "critic_step_batch_size": 9}, "critic_step_batch_size (9)"),
        ({"critic_layout": "shared", "critic_epochs": 2}, "critic_epochs is 2; critic_layout shared"),
        ({"kl_controller": "horizon", "kl_horizon": 10, "rollout_batch_size": 50}, "kl_horizon is 10; 11"),
        ({"stop_on": ["error", "kl_runway"]}, "stop_on 'kl_runway' constant_reward"),
        ({"dynamic_sampling": 3}, "dynamic_sampling is 3; num_return_sequences"),
        ({"overlong_buffer_len": 6, "response_len": 5}, "overlong_buffer_len (6) response_len (5)"),
        ({"stop_strings": ["x", ""]}, "stop_strings is ['x', '']"),
        ({"critic": "c51", "value_support": [2.0, 2.0]}, "value_support is [2.0, 2.0]"),
        ({"critic": "c51", "value_support": [1.0]}, "value_support is [1.0]"),
        ({"critic": "iqn", "risk_level": 1.5}, "risk_level is '1.5'"),
        ({"critic": "iqn", "risk_level": "bold"}, "risk_level is 'bold'"),
        ({"critic": "iqn", "risk_level": 2**20000}, "risk_level is a number of 20001 bits;"),
        ({"lr_scheduler_type": "zigzag"}, "lr_scheduler_type is 'zigzag' 'constant' 'cosine'"),
        ({"adv_estimator": "a2c"}, "adv_estimator is 'a2c'; gae grpo import_modules"),
        ({"adv_estimator": "rloo"}, "num_return_sequences is 1; gae reinforce_plus_plus"),
        ({"policy_loss": "gspo"}, "loss_agg_mode token-mean; policy_loss 'gspo' seq-mean-token-mean"),
        ({"policy_loss": "gmpo"}, "loss_agg_mode token-mean"),
        ({"lam_policy": "adaptve"}, "lam_policy is 'adaptve'; adaptive"),
        ({"reference": "none"}, "reference is 'none'; kl_coef"),
        ({"reference": "none", "kl_coef": 0, "kl_loss_coef": 0.001}, "reference is 'none'; kl_loss_coef"),
        ({"kl_loss_coef": 0.001, "kl_loss_type": "abs"}, "kl_loss_type is 'abs'; k1 k2 k3 k1+ k3+"),
        ({"load_in_4bit": True}, "load_in_4bit is True; critic_layout 'separate' auto"),
        (
            {"load_in_4bit": True, "critic_layout": "adapter", "reference": "copy_offloaded"},
            "reference 'copy_offloaded'",
        ),
        ({"warmup_steps": 1.5, "lr_scheduler_type": "linear"}, "warmup_steps is 1.5"),
        ({"critic_lr_warmup_steps": 2.5, "lr_scheduler_type": "linear"}, "critic_lr_warmup_steps is 2.5"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-7}, "learning_rate is 1e-07 'polynomial'"),
        ({"lr_scheduler_type": "polynomial", "critic_learning_rate": 0.0}, "critic_learning_rate is 0.0 'polynomial'"),
        ({"eval_opponent": "reference", "reference": "none", "kl_coef": 0}, "eval_opponent 'reference' 'none'"),
    ],
)
def test_a_contradiction_names_the_options_and_their_values(settings, said):
    with pytest.raises(ValueError) as refused:
        PPOConfig(**settings)
    assert [word for word in said.replace(";", "").split() if word not in str(refused.value)] == []


SILENT = [
    {"metric_for_best_model": "eval/scores"},
    {"greater_is_better": True, "metric_for_best_model": "eval/scores", "eval_steps": 1, "save_steps": 0},
    {"load_best_model_at_end": True},
    {"save_total_limit": 1, "save_steps": 0},
    {"eval_top_p": 0.9},
    {"eval_num_samples": 4},
    {"eval_judge": "m:f"},
    {"truncate_after": 3},
    {"run_name": "mine", "report_to": "none"},
    {"eval_success_by": "gold"},
    {"prompt_column": "question", "prompt_template": "{question}"},
    {"prompt_column": "question", "user_template": "{question}"},
    {"user_template": "{question}", "prompt_template": "{question}"},
    {"system_prompt": "Be brief.", "prompt_template": "{question}"},
    *({**GRPO, **one} for one in (
        {"gamma": 0.9}, {"lam": 0.5}, {"lam_policy": "adaptive"}, {"lam_critic": 1.0}, {"turn_gamma": 0.5},
        {"critic": "iqn"}, {"critic_layout": "shared"}, {"vf_coef": 1.0}, {"cliprange_value": 0.5},
        {"critic_learning_rate": 1e-5}, {"critic_epochs": 2}, {"critic_pretraining_steps": 3},
        {"init_value_with_reward": True}, {"whiten_rewards": True},
    )),
    {"lam_alpha": 0.1},
    {"lam": 0.5, "lam_policy": 0.9, "lam_critic": 1.0},
    {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean", "cliprange": 0.3},
    {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean", "cliprange_high": 0.3},
    {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_c": 3.0},
    {"policy_loss": "cispo", "clip_ratio_c": 3.0},
    {"positive_nll_threshold": 0.5},
    {"rollout_correction_level": "sequence"},
    {"rollout_correction_threshold": 5.0},
    {"target_kl": 3.0},
    {"kl_coef": 0.0, "kl_controller": "proportional"},
    {"kl_controller": "proportional", "kl_horizon": 9},
    {"kl_controller": "scaled", "target_kl": 3.0},
    {"kl_loss_type": "k2"},
    {"reference": "none", "kl_coef": 0.0, "max_kl_to_ref": 5.0},
    {"critic": "c51", "cliprange_value": 0.5},
    {"critic_layout": "shared", "init_value_with_reward": True},
    {"warmup_steps": 5, "lr_scheduler_type": "constant"},
    {"critic_lr_warmup_steps": 5, "lr_scheduler_type": "constant"},
    {"num_atoms": 11},
    {"generation_backend": "vllm", "vllm_urls": ["http://a:1"], "vllm_python": "b/python"},
    {"generation_backend": "vllm", "vllm_urls": ["http://a:1"], "vllm_args": ["--max-num-seqs"]},
    {"generation_backend": "vllm", "vllm_urls": ["http://a:1"], "vllm_gpu_memory_utilization": 0.5},
    {"risk_level": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("settings", SILENT, ids=str)
def test_an_option_that_could_not_act_is_refused(settings):
    with pytest.raises(ValueError, match="without effect") as refused:
        PPOConfig(**settings)
    assert any(f"{name} is {value!r}, without" in str(refused.value) or f"{name} is '{value}'" in str(refused.value)
               for name, value in settings.items())  # fmt: skip


def test_a_kl_is_scaled_by_default_and_one_of_weight_0_may_be_fixed():
    assert (PPOConfig().kl_controller, PPOConfig().kl_coef) == ("scaled", 0.05)
    # As in a preset, or a file of an earlier run, with `kl_coef: 0` on the command line.
    assert PPOConfig(kl_coef=0.0, kl_controller="fixed").kl_coef == 0.0


def test_an_estimator_with_a_kink_is_allowed_in_the_reward_and_where_there_is_no_kl_loss():
    for kind in ("abs", "k1_clamped"):
        assert PPOConfig(kl_estimator=kind).kl_estimator == kind
        assert PPOConfig(kl_estimator=kind, kl_loss_coef=0.001).kl_loss_type == "k3"


def test_a_registered_estimator_says_whether_it_has_a_kink():
    with temporary_choices():
        functional.register_kl_estimator("smooth")(torch.square)
        functional.register_kl_estimator("sharp", kink_at_zero=True)(torch.abs)
        assert PPOConfig(kl_loss_coef=0.001, kl_loss_type="smooth").kl_loss_type == "smooth"
        with pytest.raises(ValueError, match="kl_loss_type is 'sharp'.* set it to k1 .* or smooth$"):
            PPOConfig(kl_loss_coef=0.001, kl_loss_type="sharp")


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().kl_coef = 1.0


def test_loss_modes_are_those_of_the_functions():
    assert choices(options_of(PPOConfig)["loss_agg_mode"]) == functional.LOSS_AGG_MODES
    assert choices(options_of(PPOConfig)["rollout_correction_level"]) == functional.ROLLOUT_CORRECTION_LEVELS


def test_the_group_estimators_are_the_built_in_ones_that_need_a_group():
    names = ("grpo", "grpo_no_std", "rloo", "opo", "reinforce_plus_plus_baseline", "qae", "grpo_passk")
    # gdpo compares several scores of each response, in a function of its own.
    assert functional.GROUP_ESTIMATORS == names
    assert ADV_ESTIMATORS.names_with(needs_group=True) == (*names, "gdpo")


def test_every_schedule_is_one_of_transformers_that_needs_no_further_argument():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for name in choices(options_of(PPOConfig)["lr_scheduler_type"]):
        assert get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=2).optimizer is optimizer


def test_the_output_folder_counts_from_where_the_configuration_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert PPOConfig(output_dir="run").output_dir == str(tmp_path / "run")


def test_a_single_tracker_needs_no_list():
    assert PPOConfig(report_to="tensorboard").report_to == ["tensorboard"]


def test_a_weight_may_have_no_upper_limit():
    assert (
        PPOConfig(old_policy="correct", rollout_correction_threshold=math.inf).rollout_correction_threshold == math.inf
    )


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
        ({"adv_estimator": "in_groups"}, "adv_estimator is 'in_groups', .* num_return_sequences is 1"),
        (
            {"adv_estimator": "in_groups", "num_return_sequences": 2, "critic_pretraining_steps": 3},
            "critic_pretraining_steps is 3, without effect: needs adv_estimator: gae or with_values",
        ),
        ({"policy_loss": "sums"}, "loss_agg_mode seq-mean-token-sum, not token-mean"),
        ({"policy_loss": "sums", "loss_agg_mode": "seq-mean-token-sum", "clip_ratio_c": 3.0}, "clip_ratio_c is 3.0"),
        ({"critic": "laplace"}, "critic is 'laplace'; choose one of scalar, c51, hl_gauss, quantile, iqn, gaussian"),
    ],
)
def test_registered_traits_are_checked(registered, settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_a_four_bit_base_is_shared():
    # A folder may be named like the choice `copy`.
    for reference in ("auto", "copy_of_my_model"):
        assert PPOConfig(load_in_4bit=True, critic_layout="adapter", reference=reference).reference == reference
    # Without a critic nothing is copied, whatever its layout would be.
    assert not PPOConfig(load_in_4bit=True, adv_estimator="grpo", num_return_sequences=2).uses_critic


def test_without_a_reference_there_is_no_kl():
    assert PPOConfig(reference="none", kl_coef=0.0).reference == "none"
