"""The presets are what their publishers use, are found by name, and are part of an installed package."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import yaml

from alpaca_ppo import PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.parser import read_preset, read_yaml
from alpaca_ppo.data import PromptForm
from alpaca_ppo.ppo.update_plan import plan_updates
from alpaca_ppo.presets import preset_names, preset_path
from tests.tiny_runs import acting, tiny_trainer, weights

ROOT = Path(__file__).parents[2]
REQUIRED = ["--model_name_or_path", "m", "--reward_funcs", "a:b"]
PPO_FIELDS = {field.name for field in dataclasses.fields(PPOConfig)}

# What the presets' comments claim, typed from the publishers' own files: AlpacaFarm's rlhf_ppo.sh and its
# TrainingArguments, TRL's PPOConfig, verl's ppo_trainer.yaml with its actor, critic and algorithm parts; and, of
# the others, from the sections of papers, the scripts and the log that their comments name.
PUBLISHED = yaml.safe_load("""
alpaca_farm: {
  critic_layout: separate,
  query_len: 192, response_len: 300, rollout_batch_size: 512, step_batch_size: 256, ppo_epochs: 2,
  total_epochs: 10, learning_rate: 3.0e-06, lr_scheduler_type: linear, warmup_steps: 5, adam_epsilon: 1.0e-05,
  max_grad_norm: 1.0, temperature: 1.0, gamma: 1.0, lam: 1.0, whiten_rewards: true, whiten_advantages: true,
  cliprange: 0.2, cliprange_value: 0.2, vf_coef: 0.1, kl_coef: 0.02, kl_estimator: k1_clamped,
  old_policy: recompute, kl_controller: fixed, init_value_with_reward: true, critic_epochs: null,
}
trl: {
  critic_layout: separate,
  response_len: 53, temperature: 0.7, ppo_epochs: 4, learning_rate: 3.0e-06, lr_scheduler_type: linear,
  max_grad_norm: 1.0, gamma: 1.0, lam: 0.95, whiten_rewards: false, whiten_advantages: true, cliprange: 0.2,
  cliprange_value: 0.2, vf_coef: 0.1, kl_coef: 0.05, kl_estimator: k1, old_policy: rollout,
  kl_controller: fixed, adam_epsilon: 1.0e-08, critic_epochs: null,
}
verl: {
  critic_layout: separate,
  query_len: 512, response_len: 512, rollout_batch_size: 1024, step_batch_size: 256, ppo_epochs: 1,
  learning_rate: 1.0e-06, critic_learning_rate: 1.0e-05, lr_scheduler_type: constant, max_grad_norm: 1.0,
  temperature: 1.0, gamma: 1.0, lam: 1.0, whiten_advantages: true, cliprange: 0.2, clip_ratio_c: 3.0,
  old_policy: recompute, vf_coef: 1.0, cliprange_value: 0.5, loss_agg_mode: token-mean, kl_coef: 0.0,
  weight_decay: 0.01, adam_epsilon: 1.0e-08, total_epochs: 30, critic_epochs: null,
}
dapo: {
  query_len: 2048,
  # 16,384 tokens and a soft margin of 4,096.
  response_len: 20480, overlong_buffer_len: 4096, mask_truncated: false, rollout_batch_size: 512,
  num_return_sequences: 16,
  # Ten rounds with the first.
  dynamic_sampling: 9,
  # 32 prompts, of 16 responses each.
  step_batch_size: 512, ppo_epochs: 1, total_epochs: 1, temperature: 1.0, eval_temperature: 1.0,
  eval_top_p: 0.7, adv_estimator: grpo, policy_loss: clip, cliprange: 0.2, cliprange_high: 0.28,
  clip_ratio_c: 10.0, loss_agg_mode: token-mean, entropy_coef: 0.0, kl_coef: 0.0, learning_rate: 1.0e-06,
  lr_scheduler_type: constant_with_warmup,
  # 20 rollouts of 16 optimizer steps.
  warmup_steps: 320, weight_decay: 0.1, max_grad_norm: 1.0,
}
cispo: {
  adv_estimator: grpo, policy_loss: cispo, cliprange_high: 0.8, loss_agg_mode: token-mean, dynamic_sampling: 9,
  overlong_buffer_len: 4096, kl_coef: 0.0, adam_beta1: 0.9, adam_beta2: 0.95, adam_epsilon: 1.0e-15,
}
gspo: {
  query_len: 2048, response_len: 8192, rollout_batch_size: 512, num_return_sequences: 16,
  # A quarter of the rollout: four optimizer steps on it.
  step_batch_size: 2048, ppo_epochs: 1, total_epochs: 10, temperature: 1.0, eval_temperature: 1.0,
  eval_top_p: 0.7, adv_estimator: grpo, policy_loss: gspo, cliprange: 0.0003, cliprange_high: 0.0004,
  loss_agg_mode: seq-mean-token-mean, entropy_coef: 0.0, kl_coef: 0.0, learning_rate: 1.0e-06,
  lr_scheduler_type: constant_with_warmup,
  # 5 % of 500 rollouts, of four optimizer steps each.
  warmup_steps: 100, weight_decay: 0.1, max_grad_norm: 1.0,
}
vapo: {
  critic_layout: separate,
  rollout_batch_size: 512, num_return_sequences: 16, step_batch_size: 512, eval_temperature: 1.0,
  eval_top_p: 0.7, temperature: 1.0, adv_estimator: gae, gamma: 1.0, lam_policy: adaptive, lam_alpha: 0.05,
  lam_critic: 1.0, policy_loss: clip, cliprange: 0.2, cliprange_high: 0.28, loss_agg_mode: token-mean,
  positive_nll_coef: 0.1, critic_pretraining_steps: 50, learning_rate: 1.0e-06, critic_learning_rate: 2.0e-06,
  lr_scheduler_type: constant_with_warmup,
}
vc_ppo: {
  critic_layout: separate,
  lam_policy: 0.95, lam_critic: 1.0,
  # The plain PPO of VAPO's paper.
  rollout_batch_size: 8192, num_return_sequences: 1, step_batch_size: 512, adv_estimator: gae, gamma: 1.0,
  policy_loss: clip, cliprange: 0.2, cliprange_high: null, loss_agg_mode: seq-mean-token-mean,
  positive_nll_coef: 0.0, critic_pretraining_steps: 50, learning_rate: 1.0e-06, critic_learning_rate: 2.0e-06,
  lr_scheduler_type: constant_with_warmup,
}
orz: {
  critic_layout: separate,
  query_len: 2048, response_len: 8000, penalty_reward_value: 0.0, rollout_batch_size: 128,
  num_return_sequences: 64,
  # One optimizer step of the policy on all responses.
  step_batch_size: 8192, ppo_epochs: 1, critic_epochs: 1, total_epochs: 20, temperature: 1.0,
  adv_estimator: gae, gamma: 1.0, lam: 1.0, lam_policy: null, lam_critic: null, whiten_advantages: true,
  cliprange: 0.2, cliprange_value: 0.2, entropy_coef: 0.0, kl_coef: 0.0, critic_pretraining_steps: 0,
  learning_rate: 1.0e-06, critic_learning_rate: 5.0e-06, lr_scheduler_type: constant_with_warmup,
  warmup_steps: 50, weight_decay: 0.0, adam_beta1: 0.9, adam_beta2: 0.95, max_grad_norm: 1.0,
}
""")

# What the files set besides, because their sources do not say it or say it of something else.
OWN_CHOICES = {
    "alpaca_farm": {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "prompt_template"}
    | {"eval_steps"},
    "trl": {"rollout_batch_size", "init_value_with_reward"},
    "verl": set(),
    "dapo": set(),
    "cispo": {
        "learning_rate",
        "query_len",
        "response_len",
        "rollout_batch_size",
        "num_return_sequences",
        "step_batch_size",
    }
    | {"ppo_epochs", "cliprange", "lr_scheduler_type", "warmup_steps", "weight_decay"},
    "gspo": set(),
    "vapo": {"query_len", "response_len", "ppo_epochs", "kl_coef", "vf_coef", "critic_epochs", "warmup_steps"},
    "vc_ppo": {"query_len", "response_len", "ppo_epochs", "kl_coef", "vf_coef", "critic_epochs", "warmup_steps"},
    "orz": {"vf_coef", "critic_step_batch_size"},
}

# Memory and speed, or how a thing is computed that the sources have in another form.
EVERYWHERE = {"step_per_device_batch_size", "gradient_checkpointing", "reference", "old_policy"}

# What the others have: no preset changes when a default does.
PLAIN = yaml.safe_load("""
{ num_return_sequences: 1, step_batch_size: 64, temperature: 1.0, learning_rate: null, policy_loss: clip,
  critic_step_batch_size: null, critic_learning_rate: null, critic_lr_warmup_steps: null,
  critic_pretraining_steps: 0, init_value_with_reward: false, lam_policy: null, lam_critic: null, lam_alpha: 0.05,
  cliprange_high: null, clip_ratio_c: null, positive_nll_coef: 0.0, positive_nll_threshold: 0.0, whiten_rewards: false,
  whiten_advantages: true, entropy_coef: 0.0, dynamic_sampling: 0, mask_truncated: false }
""")


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_preset_has_the_defaults_that_were_published(name):
    required = [*REQUIRED, *([] if "dataset_name" in read_preset(name) else ["--dataset_name", "d"])]
    script, args = parse_args([ScriptArguments, PPOConfig], ["--preset", name, *required])
    plain = {field: value for field, value in PLAIN.items() if field not in OWN_CHOICES[name]}
    expected = {**plain, **PUBLISHED[name]}
    assert {field: {**vars(script), **vars(args)}[field] for field in expected} == expected


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_lists_what_differs_from_the_defaults_each_with_a_reason(name):
    lines = preset_path(name).read_text().splitlines()
    assert [line for line in lines if "# " not in line or len(line) > 120] == []
    options = options_of(ScriptArguments) | options_of(PPOConfig)
    assert {field for field, value in read_preset(name).items() if value == options[field].default} == set()


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_preset_sets_nothing_that_is_neither_published_nor_declared_a_choice_of_its_own(name):
    assert set(read_preset(name)) - EVERYWHERE - set(PUBLISHED[name]) == OWN_CHOICES[name]


def test_the_critic_of_open_reasoner_zero_takes_twelve_steps_on_each_rollout():
    _, args = parse_args([ScriptArguments, PPOConfig], ["--preset", "orz", "--dataset_name", "d", *REQUIRED])
    steps = plan_updates(args.responses_per_step, args, 0, critic_only=False)
    assert [step.part for step in steps] == ["critic"] * 12 + ["policy"]
    assert [len(step.rows) for step in steps] == [683] * 11 + [679, 8192]


# Smaller in size, and one response more or less a mini-batch; what is computed stays.
TINY = {
    "query_len": 4,
    "response_len": 4,
    "rollout_batch_size": 2,
    "rollout_per_device_batch_size": 4,
    "step_batch_size": 2,
    "step_per_device_batch_size": 2,
    "total_epochs": None,
}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in ("alpaca_farm", "trl", "verl")])
def test_a_preset_takes_a_step(name, tmp_path):
    given = {option: value for option, value in read_preset(name).items() if option in PPO_FIELDS}
    sizes = {
        "num_return_sequences": 2 if "num_return_sequences" in given else 1,
        "overlong_buffer_len": 2 if "overlong_buffer_len" in given else None,
        "critic_step_batch_size": 1 if "critic_step_batch_size" in given else None,
        "critic_pretraining_steps": 1 if "critic_pretraining_steps" in given else 0,
        "warmup_steps": 0,
        "eval_steps": 0,
        "total_episodes": 4 if "critic_pretraining_steps" in given else 2,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    settings = acting({**given, **TINY, **sizes, "prompt_template": None, "user_template": None, "system_prompt": None})
    trainer = tiny_trainer(tmp_path, **settings)
    before = weights(trainer)
    stats = trainer.train()
    assert math.isfinite(stats["ppo/loss/policy"])
    changed = {key.split(".")[0] for key, value in weights(trainer).items() if not torch.equal(value, before[key])}
    assert changed == ({"policy"} if "adv_estimator" in given else {"policy", "critic"})


def test_every_preset_is_checked_here_and_names_no_model_reward_or_folder():
    assert set(preset_names()) == set(PUBLISHED)
    for name in preset_names():
        given = read_preset(name)
        assert not {"model_name_or_path", "reward_funcs", "reward_model_name_or_path", "output_dir"} & set(given)


def test_the_prompt_on_gsm8k_is_messages_with_the_system_prompt_that_qwens_template_writes_by_default():
    request = "1 + 1?\nReason step by step. Write the result on a last line of the form #### number."
    messages = [
        {"role": "system", "content": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
        {"role": "user", "content": request},
    ]
    given = read_yaml(str(ROOT / "examples/configs/gsm8k_qwen.yaml"))
    form = PromptForm(**{name: given.get(name) for name in ("prompt_template", "user_template", "system_prompt")})
    assert form.prompt_of({"question": "1 + 1?", "answer": "2"}) == messages


def test_the_example_on_gsm8k_gives_the_critic_a_larger_rate_and_a_start():
    _, args = parse_args([ScriptArguments, PPOConfig], ["--config", str(ROOT / "examples/configs/gsm8k_qwen.yaml")])
    # The default's three times.
    assert args.critic_rate(has_adapter=False) == pytest.approx(3e-6)
    assert args.critic_pretraining_steps > 0
    # transformers' schedule "constant" has no warm-up.
    assert args.lr_scheduler_type == "constant_with_warmup" and args.warmup_steps > 0


def test_a_preset_is_a_file_that_is_found_by_name():
    assert preset_path("trl").read_text().startswith("# TRL's last PPOTrainer")


def test_config_reads_files_and_preset_reads_presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl").write_text("seed: 7\n")
    required = ["--dataset_name", "d", *REQUIRED]
    for flag, seed in (("--config", 7), ("--preset", 42)):
        assert parse_args([ScriptArguments, PPOConfig], [flag, "trl", *required])[1].seed == seed
    with pytest.raises(ValueError, match="--config is 'verl', but .* did you mean --preset verl"):
        parse_args([ScriptArguments, PPOConfig], ["--config", "verl", *required])
