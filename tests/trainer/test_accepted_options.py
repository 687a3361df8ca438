"""What `PPOConfig` accepts survives a step: every preset, and every pair of options of critic and advantages, with the
critic pretrained before.
"""

import dataclasses
from typing import Any

import pytest
import yaml

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.presets import preset_names, preset_path
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import prompts, tiny_config, tiny_trainer

SETTINGS: list[dict[str, Any]] = [
    {"lam": 0.9},
    {"lam_policy": 0.9},
    {"lam_policy": "adaptive", "lam_alpha": 0.5},
    {"lam_critic": 0.8},
    {"gamma": 0.9},
    {"turn_gamma": 0.9},
    {"turn_lam": 0.9},
    {"whiten_rewards": True},
    {"whiten_advantages": False},
    {"critic": "c51", "num_atoms": 5, "value_support": [-9.0, 9.0]},
    {"critic": "hl_gauss", "value_support": [-9.0, 9.0]},
    {"critic": "quantile", "quantile_huber_kappa": 0.5},
    {"critic": "iqn", "risk_level": 0.5},
    {"critic_layout": "shared"},
    {"critic_epochs": 2},
    {"critic_step_batch_size": 3},
    {"critic_learning_rate": 0.01},
    {"critic_lr_warmup_steps": 1, "lr_scheduler_type": "constant_with_warmup"},
    {"critic_max_grad_norm": 0.1},
    {"cliprange_value": 0.2},
    {"vf_coef": 0.5},
]


class MayLeaveHoles(PPOTrainer):
    """With a `_generate` of its own, so that options of several turns are accepted."""

    def _generate(self, prompts, sampling_params):
        return super()._generate(prompts, sampling_params)


SMALL = {"response_len": 3, "rollout_batch_size": 4, "total_episodes": 8, "critic_pretraining_steps": 1}


def two_steps(output_dir: Any, args: PPOConfig, **arguments: Any) -> None:
    """A step that trains the critic alone, if there is pretraining, and one that trains the policy too."""
    model = tiny_causal_lm("llama", num_hidden_layers=1)
    arguments |= {"args": args, "model": model}
    trainer = tiny_trainer(output_dir, trainer_class=MayLeaveHoles, trainer_arguments=arguments)
    for step in range(2):
        stats = trainer.step(trainer.prompt_batches(step))
        assert bool(stats["ppo/policy/optimizer_steps"]) is (step >= args.critic_pretraining_steps)
    trainer.run_lock.release()


def accepted(output_dir: Any, **settings: Any) -> PPOConfig | None:
    """The configuration with these settings, if there can be one."""
    try:
        return tiny_config(output_dir, **{**SMALL, **settings})
    except ValueError:
        return None


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_every_option_survives_critic_pretraining(settings, tmp_path):
    args = accepted(tmp_path, **settings)
    assert args is not None
    two_steps(tmp_path, args)


def test_lambda_does_nothing_in_pretraining_where_the_policy_has_its_own(tmp_path):
    args = accepted(tmp_path, lam=0.9, lam_policy=0.95)
    assert args is not None
    two_steps(tmp_path, args)


@pytest.mark.proof
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_every_accepted_pair_of_options_survives_critic_pretraining(number, tmp_path):
    survived = 0
    for place, other in enumerate(SETTINGS):
        both = {**SETTINGS[number], **other}
        if place == number or any(both[name] != value for name, value in SETTINGS[number].items()):
            continue
        args = accepted(tmp_path / str(place), **both)
        if place > number and args is not None:
            two_steps(tmp_path / str(place), args)
        survived += args is not None
    # No option excludes all others.
    assert survived > 9


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_survives_a_step_and_the_critic_pretraining_before_it(name, tmp_path):
    fields = {field.name for field in dataclasses.fields(PPOConfig)}
    preset = {key: value for key, value in yaml.safe_load(preset_path(name).read_text()).items() if key in fields}
    small = {"query_len": 4, "response_len": 3, "rollout_batch_size": 4, "step_batch_size": 4, "report": False}
    small |= {
        "use_cpu": True,
        "report_to": ["none"],
        "output_dir": str(tmp_path),
        "total_epochs": None,
        "max_steps": 2,
        "prompt_template": None,
    }
    if "overlong_buffer_len" in preset:
        small["overlong_buffer_len"] = 2
    if "num_return_sequences" in preset:
        small["num_return_sequences"] = 2
    if "critic_step_batch_size" in preset:
        small["critic_step_batch_size"] = 3
    if "adv_estimator" not in preset:
        small["critic_pretraining_steps"] = 1
    args = PPOConfig(**{**preset, **small})
    scorer = tiny_sequence_classifier("llama", num_hidden_layers=1)
    rewards = {"reward_funcs": scorer, "reward_processing_classes": tiny_tokenizer()}
    two_steps(tmp_path, args, eval_dataset=prompts(), **rewards)
