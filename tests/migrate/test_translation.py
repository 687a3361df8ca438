"""TRL's scripts and verl's configurations, translated: the values are worked out by hand beside each example."""

import os
from pathlib import Path

import pytest
import yaml

from alpaca_ppo.cli import migrate as command
from alpaca_ppo.config import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.migrate import Translation, translate, translate_trl, translate_verl

EXAMPLES = Path(__file__).parent / "examples"
PPO_FLAGS = (
    "--dataset_name trl-lib/tldr --dataset_test_split validation --output_dir models/ppo --learning_rate 3e-6 "
    "--per_device_train_batch_size 16 --gradient_accumulation_steps 4 --total_episodes 1000000 "
    "--model_name_or_path EleutherAI/pythia-1b-deduped --sft_model_path cleanrl/sft --reward_model_path cleanrl/rm "
    "--local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos --eval_strategy steps "
    "--eval_steps 100"
).split()


def accepted(result: Translation, folder: Path) -> dict:
    """The options of a translation, once `parse_args` has accepted them."""
    path = folder / "run.yaml"
    path.write_text(result.as_yaml())
    parsed = parse_args([ScriptArguments, LoraArguments, PPOConfig], ["--config", str(path)])
    return {name: value for part in parsed for name, value in vars(part).items()}


def some(options: dict, **expected) -> None:
    assert {name: options[name] for name in expected} == expected


def test_the_grpo_quickstart_with_trls_defaults(tmp_path):
    result = translate(str(EXAMPLES / "grpo_quickstart.py"))
    options = accepted(result, tmp_path)
    some(
        options,
        model_name_or_path="Qwen/Qwen2-0.5B-Instruct",
        dataset_name="trl-lib/tldr",
        dataset_train_split="train",
        output_dir="Qwen2-0.5B-GRPO",
        reward_funcs=["rewards.py:reward_len"],
        # TRL: 8 completions on a device, 1 process, 1 micro-batch: one prompt with its 8 completions.
        rollout_batch_size=1,
        num_return_sequences=8,
        step_batch_size=8,
        step_per_device_batch_size=8,
        ppo_epochs=1,
        response_len=512,
        adv_estimator="grpo",
        loss_agg_mode="token-mean",
        # beta is 0 by default.
        reference="none",
        use_kl_in_reward=False,
        use_kl_loss=False,
        learning_rate=1e-6,
        lr_scheduler_type="linear",
        total_epochs=3,
        save_steps=500,
        eval_steps=0,
        bf16=True,
        gradient_checkpointing=True,
        report_to=["none"],
    )
    assert any("move reward_len into rewards.py" in note for note in result.to_do_in_yaml)


def test_grpo_with_vllm_lora_several_rewards_and_argparse(tmp_path):
    flags = ["--use_vllm", "--learning-rate", "2e-6"]
    result = translate(str(EXAMPLES / "grpo_vllm_lora.py"), flags, num_processes=2)
    options = accepted(result, tmp_path)
    some(
        options,
        model_name_or_path="Qwen/Qwen2.5-3B-Instruct",
        reward_model_name_or_path=["my/reward-model"],
        reward_funcs=[f"{os.path.relpath(EXAMPLES)}/grpo_vllm_lora.py:correctness", "trl.rewards:think_format_reward"],
        dataset_name="openai/gsm8k",
        dataset_config="main",
        dataset_test_split="test",
        use_peft=True,
        lora_r=64,
        lora_alpha=64,
        lora_target_modules=["q_proj", "v_proj"],
        output_dir="outputs/Qwen/Qwen2.5-3B-Instruct-grpo",
        seed=7,
        learning_rate=2e-6,
        # steps_per_generation 16: 4 * 2 processes * 16 = 128 completions, 128 / 16 = 8 prompts.
        rollout_batch_size=8,
        num_return_sequences=16,
        # 4 * 2 processes * 8 = 64 completions in an optimizer step, so 2 on a rollout, twice (num_iterations).
        step_batch_size=64,
        ppo_epochs=2,
        # A process generates 128 / 2 completions at once.
        rollout_per_device_batch_size=64,
        # 250 optimizer steps / 4 = 62.5, rounded up to 63 rollouts.
        max_steps=63,
        total_episodes=None,
        total_epochs=None,
        save_steps=12,
        eval_steps=25,
        # TRL evaluates on as many sampled responses as it trains on.
        eval_do_sample=True,
        eval_num_samples=16,
        logging_steps=1,
        # A tenth of the run, as there.
        warmup_steps=0.1,
        attn_implementation="flash_attention_2",
        model_init_kwargs=None,
        query_len=256,
        response_len=768,
        adv_estimator="grpo_no_std",
        loss_agg_mode="seq-mean-token-sum-norm",
        cliprange_high=0.28,
        use_kl_loss=True,
        kl_loss_coef=0.04,
        use_kl_in_reward=False,
        reference="auto",
        mask_truncated=True,
        reward_weights=[1.0, 0.5, 0.2],
        max_grad_norm=0.2,
        adam_beta2=0.99,
        report_to=["wandb"],
    )
    text = result.as_yaml()
    for lost in ("top_p (0.95)", "use_vllm (true)", 'optim ("adamw_8bit")', "lora_dropout (0.05)"):
        assert lost in text.partition("# Has no counterpart")[2].partition("# Not needed")[0], lost
    assert "the policy that is trained must be the one that" in text
    assert "the script changes the rows (map)" in text


def test_trls_ppo_script_from_its_command_line(tmp_path):
    result = translate(str(EXAMPLES / "ppo_tldr.py"), PPO_FLAGS)
    some(
        accepted(result, tmp_path),
        model_name_or_path="cleanrl/sft",
        reward_model_name_or_path=["cleanrl/rm"],
        init_value_with_reward=True,
        dataset_name="trl-lib/tldr",
        dataset_test_split="validation",
        # 16 * 4 prompts on one process; TRL steps once for 4 micro-batches of 16.
        rollout_batch_size=64,
        step_batch_size=64,
        step_per_device_batch_size=16,
        rollout_per_device_batch_size=16,
        ppo_epochs=4,
        total_episodes=1000000,
        response_len=53,
        temperature=0.7,
        kl_coef=0.05,
        lam=0.95,
        penalty_reward_value=-1.0,
        # TRL's PPOTrainer counts rollouts.
        eval_steps=100,
        save_steps=500,
        old_policy="rollout",
    )


def test_what_trls_ppo_script_reads_of_a_configuration_has_trls_defaults(tmp_path):
    flags = ["--dataset_name", "org/data", "--model_name_or_path", "org/tokenizer", "--eval_strategy", "steps"]
    result = translate(str(EXAMPLES / "ppo_tldr.py"), flags)
    some(
        accepted(result, tmp_path),
        # The script's policy comes from sft_model_path, and its critic and reward from reward_model_path.
        model_name_or_path="EleutherAI/pythia-160m",
        reward_model_name_or_path=["EleutherAI/pythia-160m"],
        reward_funcs=None,
        value_model_name_or_path=None,
        init_value_with_reward=True,
        dataset_name="org/data",
        # The default of TRL's ScriptArguments.
        dataset_test_split="test",
    )
    assert "reads model_name_or_path (org/tokenizer) too" in result.as_yaml()


def test_a_quantized_grpo_script_whose_names_are_assigned_again(tmp_path):
    result = translate(str(EXAMPLES / "grpo_quantized.py"))
    some(
        accepted(result, tmp_path),
        model_name_or_path="org/model",
        # `main()` runs when the file is imported.
        reward_funcs=["rewards.py:shortness", "trl.rewards:accuracy_reward"],
        dataset_name="org/problems",
        dataset_train_split="train[:5%]",
        eval_dataset_name="FILL_IN",
        max_steps=500,
        total_epochs=None,
        use_peft=True,
        load_in_4bit=True,
        dtype="bfloat16",
        attn_implementation="sdpa",
        model_init_kwargs=None,
        chat_template_kwargs={"enable_thinking": False},
        lr_scheduler_type="cosine",
    )
    to_do = "\n".join(result.to_do + result.to_do_in_yaml)
    assert (
        "model_init_kwargs: torch.device('cuda', torch.cuda.device_count() - 1), which the script alone knows" in to_do
    )
    assert "eval_dataset_name: list(held_out) is made by the script" in to_do
    assert "move shortness into rewards.py" in to_do and "accuracy_reward need TRL installed" in to_do
    assert "the script changes the rows (map, remove_columns)" in to_do
    assert "num_train_epochs" not in to_do


def test_a_4_bit_policy_has_a_critic_that_copies_nothing(tmp_path):
    given = {"load_in_4bit": True, "use_peft": True, "reward_model_path": "r", "deepspeed": {"zero": 2}}
    result = translate_trl("PPOConfig", {"model_name_or_path": "m", "dataset_name": "d", **given}, "test")
    some(accepted(result, tmp_path), load_in_4bit=True, critic_layout="adapter", init_value_with_reward=False)
    assert result.to_do == ["deepspeed: write the configuration into a JSON file, and name it here"]


def test_verls_gsm8k_ppo_command_line(tmp_path):
    result = translate(str(EXAMPLES / "verl_gsm8k_ppo.sh"))
    some(
        accepted(result, tmp_path),
        dataset_name="/data/gsm8k/train.parquet",
        eval_dataset_name="/data/gsm8k/test.parquet",
        rollout_batch_size=256,
        step_batch_size=64,
        step_per_device_batch_size=4,
        rollout_per_device_batch_size=8,
        adv_estimator="gae",
        lam=1.0,
        vf_coef=1.0,
        cliprange_value=0.5,
        clip_ratio_c=3.0,
        use_kl_in_reward=True,
        kl_coef=0.002,
        kl_estimator="k1",
        critic_learning_rate=1e-5,
        critic_epochs=None,
        value_model_name_or_path=None,
        weight_decay=0.01,
        overlong_prompts="error",
        total_epochs=15,
        save_steps=10,
        eval_steps=10,
        report_to=["none"],
        reference="auto",
    )


def test_verls_gsm8k_grpo_command_line(tmp_path):
    result = translate(str(EXAMPLES / "verl_gsm8k_grpo.sh"), ["actor_rollout_ref.actor.ppo_epochs=2"])
    some(
        accepted(result, tmp_path),
        model_name_or_path="Qwen/Qwen3-8B",
        dataset_name="/data/gsm8k/train.parquet",
        use_peft=True,
        lora_r=32,
        rollout_batch_size=1024,
        num_return_sequences=5,
        # 256 prompts with 5 responses each.
        step_batch_size=1280,
        ppo_epochs=2,
        max_tokens_per_micro_batch=24000,
        overlong_prompts="drop",
        adv_estimator="grpo",
        use_kl_loss=True,
        kl_loss_coef=0.002,
        kl_loss_type="k3",
        use_kl_in_reward=False,
        # 5 rollouts of 1024 / 256 = 4 optimizer steps, twice.
        warmup_steps=40,
        lr_scheduler_type="constant_with_warmup",
        output_dir="checkpoints/verl_grpo/qwen3_8b",
        report_to=["wandb"],
    )
    assert "actor_rollout_ref.rollout.top_p (0.9)" in result.as_yaml()


def test_a_yaml_file_of_verl_with_references_and_overrides(tmp_path):
    config = {
        "hydra": {"searchpath": ["x"]},
        "defaults": ["ppo_trainer"],
        "data": {"max_prompt_length": 1024, "max_response_length": 2048, "train_files": ["a.parquet", "b.parquet"]},
        "actor_rollout_ref": {
            "model": {"path": "m", "external_lib": "json"},
            "actor": {
                "_target_": "verl.Actor",
                "ppo_mini_batch_size": "${data.train_batch_size}",
                "ppo_micro_batch_size": 16,
                "clip_ratio_high": 0.28,
                "loss_agg_mode": "seq-mean-token-mean",
                "policy_loss": {"loss_mode": "geo_mean"},
                "optim": {"betas": [0.9, 0.95], "lr_warmup_steps_ratio": 0.1},
            },
            "rollout": {
                "n": 4,
                "name": "???",
                "val_kwargs": {"do_sample": True, "top_p": 0.7, "n": 8, "temperature": 0.6},
            },
        },
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": False,
            "gamma": 0.99,
            "filter_groups": {"enable": True, "max_num_gen_batches": 10},
        },
        "reward_model": {"enable": False, "overlong_buffer": {"enable": True, "len": 512, "penalty_factor": 0.5}},
        "custom_reward_function": {"path": "my.py", "name": "score"},
        "trainer": {"total_training_steps": 20, "n_gpus_per_node": 4, "resume_mode": "resume_path"},
        "invented": {"key": 3},
    }
    config["trainer"]["resume_from_path"] = "ckpt/step"
    path = tmp_path / "verl.yaml"
    path.write_text(yaml.safe_dump(config))
    result = translate(str(path), ["data.train_batch_size=64", "~data.val_files", "trainer.save_freq=-1"])
    text = result.as_yaml()
    assert "invented.key (3): no option of verl has this name" in text
    assert "put a.parquet, b.parquet into one" in text and "algorithm.gamma" in text
    parsed = yaml.safe_load(text)
    assert set(parsed) <= set(accepted(result, tmp_path))
    some(
        parsed,
        query_len=1024,
        response_len=2048,
        cliprange_high=0.28,
        dynamic_sampling=True,
        overlong_penalty_factor=0.5,
        eval_do_sample=True,
        dataset_name="a.parquet",
        rollout_batch_size=64,
        # 64 prompts with 4 responses each; a micro-batch of 16 over 4 GPUs.
        step_batch_size=256,
        step_per_device_batch_size=4,
        policy_loss="gmpo",
        adv_estimator="grpo_no_std",
        max_sampling_rounds=9,
        overlong_buffer_len=512,
        reward_funcs=["my.py:score"],
        max_steps=20,
        warmup_steps=0.1,
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=0.95,
        eval_top_p=0.7,
        eval_num_samples=8,
        eval_temperature=0.6,
        reference="none",
        resume_from_checkpoint="ckpt/step",
        import_modules=["json"],
        save_steps=0,
    )
    assert "gamma" not in parsed and "eval_top_k" not in parsed and "clip_ratio_c" not in parsed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # 8 * 1 * 4 = 32 completions in a step; a generation of 64 is two steps.
        (
            {"gradient_accumulation_steps": 4, "generation_batch_size": 64},
            {"rollout_batch_size": 8, "step_batch_size": 32},
        ),
        # A generation of 8 for a step of 32: ours samples a step's 32 at once.
        (
            {"gradient_accumulation_steps": 4, "steps_per_generation": 1},
            {"rollout_batch_size": 4, "step_batch_size": 32},
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"policy_loss": "cispo", "cliprange_high": 4.0, "cliprange": 0.99},
        ),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.1}, {"policy_loss": "sapo", "sapo_tau_neg": 1.1}),
        (
            {"importance_sampling_level": "sequence"},
            {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
        ),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"adv_estimator": "gdpo"}),
        ({"scale_rewards": "batch"}, {"adv_estimator": "reinforce_plus_plus_baseline"}),
        ({"num_train_epochs": 1.5, "save_strategy": "no"}, {"total_epochs": 2, "save_steps": 0}),
        ({"save_strategy": "epoch", "warmup_steps": 10}, {"save_steps": 10, "warmup_steps": 10}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"lr_scheduler_type": "constant", "warmup_steps": 0}),
        # TRL's max_steps win over its epochs; a rollout of 8 * 8 completions has 8 optimizer steps, taken twice.
        (
            {"max_steps": 21, "num_train_epochs": 2, "steps_per_generation": 8, "num_iterations": 2},
            {"max_steps": 2, "total_epochs": None, "total_episodes": None},
        ),
        ({"max_steps": 21, "warmup_steps": 0.25, "warmup_ratio": 0.5}, {"max_steps": 21, "warmup_steps": 0.25}),
        ({"warmup_steps": 3, "warmup_ratio": 0.5}, {"warmup_steps": 3}),
        (
            {
                "model_init_kwargs": {
                    "attn_implementation": "sdpa",
                    "trust_remote_code": True,
                    "torch_dtype": "bfloat16",
                    "use_cache": False,
                    "revision": "main",
                    "max_position_embeddings": 4096,
                    "device_map": None,
                }
            },
            {
                "attn_implementation": "sdpa",
                "trust_remote_code": True,
                "dtype": "float32",
                "model_init_kwargs": {"max_position_embeddings": 4096},
            },
        ),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "eval_strategy": "steps"},
            {"load_best_model_at_end": False, "metric_for_best_model": None, "eval_steps": 10},
        ),
        ({"fp16": True, "delta": 4.0}, {"bf16": False, "clip_ratio_c": 4.0}),
        ({"push_to_hub": True, "report_to": "wandb"}, {"push_to_hub": False, "report_to": ["wandb"]}),
        (
            {"use_peft": True, "model_init_kwargs": {"dtype": "bfloat16"}, "lora_target_modules": "q"},
            {"dtype": "bfloat16", "lora_target_modules": ["q"]},
        ),
    ],
)
def test_values_of_grpo_that_follow_from_others(given, expected, tmp_path):
    result = translate_trl("GRPOConfig", {"model_name_or_path": "m", "dataset_name": "d", **given}, "test")
    some(accepted(result, tmp_path), **expected)


def test_values_of_trls_ppo_that_follow_from_others(tmp_path):
    given = {"num_mini_batches": 4, "stop_token_id": 13, "warmup_steps": 2, "num_train_epochs": 2}
    given |= {"total_episodes": 24, "max_steps": 5, "num_total_batches": 7}
    result = translate_trl("PPOConfig", {"model_name_or_path": "m", "dataset_name": "d", **given}, "test")
    # A batch of 8 in 4 mini-batches of 2, each an optimizer step; TRL's scheduler steps once for 4 * 4 of these.
    some(
        accepted(result, tmp_path),
        rollout_batch_size=8,
        step_batch_size=2,
        step_per_device_batch_size=2,
        truncate_tokens=[13],
        # TRL computes num_total_batches itself, and its PPOTrainer does not read max_steps.
        total_episodes=24,
        total_epochs=None,
        max_steps=None,
        warmup_steps=32,
    )
    assert result.to_do == []
    unneeded = " ".join(name for names in result.unneeded.values() for name in names)
    assert unneeded == "max_steps num_total_batches num_train_epochs"
    share = translate_trl("PPOConfig", {"model_name_or_path": "m", "dataset_name": "d", "warmup_ratio": 0.05}, "test")
    some(accepted(share, tmp_path), warmup_steps=0.05, total_epochs=3)


def test_nothing_that_was_given_is_passed_over_in_silence():
    given = {"data_seed": 3, "invented": 1, "min_p": 0.1, "luck": None, "load_best_model_at_end": True}
    given |= {"delta": 3.0, "loss_type": "cispo", "warmup_ratio": 0.1, "log_completions": True}
    text = translate_trl("GRPOConfig", given, "test").as_yaml()
    for said in (
        "data_seed (3)",
        "invented (1)",
        "min_p (0.1)",
        "luck",
    ):
        assert said in text
    for said in (
        "delta (3.0): policy_loss cispo",
        "epsilon_high (None) with loss_type cispo",
        "metric_for_best_model with load_best_model_at_end: true: choose",
    ):
        assert said in text
    assert "warmup_steps: 0.1  # a share of the run's optimizer steps" in text
    assert "log_completions (true): num_logged_rollouts" in text


def mentions(result: Translation, name: str) -> list[str]:
    """The notes in which `name` begins a sentence or a list of names, or is part of the latter."""
    notes = result.as_yaml().partition("\n\n")[0].split("\n# - ")[1:]
    return [note for note in notes if name in note.partition(": ")[0].replace(",", " ").split()]


def test_every_name_is_explained_once():
    given = {"optim": "adamw_8bit", "max_steps": 10, "num_train_epochs": 1, "warmup_ratio": 0.1}
    result = translate_trl("GRPOConfig", {"model_name_or_path": "m", "dataset_name": "d", **given}, "test")
    assert mentions(result, "num_train_epochs") == [
        "num_train_epochs: max_steps decides how long the run is, in TRL too"
    ]
    assert len(mentions(result, "optim")) == 1 and "adamw_8bit" in mentions(result, "optim")[0]
    assert result.to_do == []
    overrides = ["trainer.resume_mode=auto", "actor_rollout_ref.model.path=m", "data.train_files=d.parquet"]
    notes = translate_verl({}, "test", overrides=overrides).to_do
    assert [note for note in notes if "resume" in note] == [
        "resume_from_checkpoint: verl resumes by itself (resume_mode: auto); here set it to true to continue an "
        "interrupted run"
    ]
    assert not any("resume" in note for note in translate_verl({}, "test", overrides=overrides[1:]).to_do)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # verl's own default has wandb, which nobody asked for.
        ({}, {"report_to": ["none"], "overlong_prompts": "error", "warmup_steps": 0}),
        ({"trainer.logger": ["console", "wandb"]}, {"report_to": ["wandb"]}),
        ({"data.truncation": "left"}, {"overlong_prompts": "truncate"}),
        ({"data.truncation": "left", "data.filter_overlong_prompts": True}, {"overlong_prompts": "drop"}),
        ({"data.truncation": "right"}, {"overlong_prompts": "error"}),
        (
            {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1, "critic.optim.lr_warmup_steps_ratio": 0.05},
            {
                "warmup_steps": 0.1,
                "lr_scheduler_type": "constant_with_warmup",
                "critic_lr_warmup_steps": 0.05,
            },
        ),
        (
            {"trainer.total_training_steps": 7, "trainer.total_epochs": 2},
            {"max_steps": 7, "total_epochs": None, "total_episodes": None},
        ),
        (
            {"data.apply_chat_template_kwargs.enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {
                "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
                "actor_rollout_ref.model.override_config.max_position_embeddings": 4096,
                "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router": True,
            },
            {"attn_implementation": "sdpa", "model_init_kwargs": {"max_position_embeddings": 4096}},
        ),
    ],
)
def test_values_of_verl_that_follow_from_others(given, expected, tmp_path):
    given = {"actor_rollout_ref.model.path": "m", "data.train_files": "d.parquet", **given}
    result = translate_verl(given, "test")
    some(accepted(result, tmp_path), **expected)
    text = result.as_yaml()
    assert ("data.truncation (right)" in text) == (given.get("data.truncation") == "right")
    assert ("override_config (moe_config.freeze_moe_router)" in text) == any("moe" in key for key in given)
    assert "report_to:" not in text.partition("\n\n")[0]


def test_the_translation_as_python_is_a_configuration():
    result = translate(str(EXAMPLES / "grpo_vllm_lora.py"))
    names: dict = {"PPOConfig": PPOConfig}
    exec(result.as_python(), names)
    assert names["config"].num_return_sequences == 16 and names["config"].kl_loss_coef == 0.04
    assert "model_name_or_path" not in result.as_python().partition("config = ")[2]


def test_the_command_prints_what_is_asked_for(capsys, tmp_path):
    assert command.main(["--num_processes", "4", str(EXAMPLES / "grpo_quickstart.py")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["rollout_batch_size"] == 4
    assert command.main(["--python", str(EXAMPLES / "ppo_tldr.py"), *PPO_FLAGS]) == 0
    assert "training_args = PPOConfig(" in capsys.readouterr().out
    assert command.main(["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["step_batch_size"] == 8


def test_trlparsers_yaml_and_the_commands_of_a_shell_script(tmp_path):
    config = tmp_path / "grpo.yaml"
    config.write_text("num_generations: 4\nlearning_rate: 1e-5\nmodel_name_or_path: m\nreward_weights: [1.0, 2.0]\n")
    assert translate(str(config)).options["num_return_sequences"] == 4
    (tmp_path / "ppo.yaml").write_text("num_ppo_epochs: 2\n")
    assert translate(str(tmp_path / "ppo.yaml")).options["ppo_epochs"] == 2
    script = tmp_path / "train.py"
    script.write_text((EXAMPLES / "ppo_tldr.py").read_text())
    shell = tmp_path / "run.sh"
    shell.write_text('echo "unfinished\nlr=4e-6\naccelerate launch train.py --learning_rate $lr --num_ppo_epochs 3\n')
    assert translate(str(shell)).options["learning_rate"] == 4e-6
    shell.write_text(f"trl grpo --config {config} --num_generations 2\n")
    options = translate(str(shell)).options
    assert (options["num_return_sequences"], options["learning_rate"]) == (2, 1e-5)
    assert options["reward_weights"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.py", "def f(:", "is not valid Python"),
        ("x.py", "print(1)", "makes neither a GRPOConfig nor a PPOConfig"),
        ("x.yaml", "- a", "holds a list; it must map option names to values"),
        ("x.yaml", "a: [", "cannot be read as YAML"),
        ("x.sh", "echo 1", "has no command that starts"),
        ("x.yaml", "per_device_train_batch_size: 0", "per_device_train_batch_size is 0; give it as a whole number"),
        ("x.yaml", "num_generations: 3", "which num_generations \\(3\\) does not divide"),
        ("x.yaml", "num_ppo_epochs: 1\nnum_mini_batches: 3", "num_mini_batches is 3, which does not divide"),
        ("x.yaml", "data: {train_batch_size: -1}", "data.train_batch_size is -1; give it as a whole number"),
    ],
)
def test_what_cannot_be_translated_is_refused(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        translate(str(path))


def test_missing_files_and_arguments_that_are_no_overrides_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none.py: give a script or a YAML file; there is no such file"):
        translate("none.py")
    (tmp_path / "x.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not a text file in UTF-8"):
        translate(str(tmp_path / "x.py"))
    with pytest.raises(ValueError, match="--config is none.yaml, but there is no such file"):
        translate(str(EXAMPLES / "ppo_tldr.py"), ["--config", "none.yaml"])
    with pytest.raises(ValueError, match="'--flag' is no override of hydra"):
        translate_verl({}, "test", overrides=["--flag"])


def test_flags_of_the_command_stand_anywhere_and_what_a_script_does_not_read_is_refused(capsys, tmp_path):
    quickstart = str(EXAMPLES / "grpo_quickstart.py")
    assert command.main([quickstart, "--python", "--num_processes", "4"]) == 0
    # TRL's 8 completions on each of 4 processes, 8 for each prompt; the script calls it training_args.
    printed = capsys.readouterr().out
    assert "\ntraining_args = PPOConfig(\n" in printed and "    rollout_batch_size=4,  # prompts" in printed
    assert command.main([str(EXAMPLES / "ppo_tldr.py"), *PPO_FLAGS, "--python"]) == 0
    assert "    learning_rate=3e-06," in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([quickstart, "--help"])
    assert "--num_processes" in capsys.readouterr().out
    for arguments in (["--learning_rate", "5e-6"], ["--bogus", "3"]):
        with pytest.raises(ValueError, match=f"grpo_quickstart.py does not read {' '.join(arguments)}: it parses no"):
            command.main([quickstart, *arguments])
    config = tmp_path / "grpo.yaml"
    config.write_text("num_generations: 4\n")
    with pytest.raises(ValueError, match="seed=3 after .*grpo.yaml, which is TRL's, is no flag"):
        command.main([str(config), "seed=3"])


GUARDED = """
from trl import GRPOConfig, GRPOTrainer

def brief(completions, **kwargs):
    return [0.0 for _ in completions]

def main():
    args = GRPOConfig(output_dir="out")
    data = load_dataset("org/data", split="train").map(conversation)
    GRPOTrainer(model=make(), reward_funcs=[brief], args=args, train_dataset=data, callbacks=[log]).train()

if __name__ == "__main__":
    main()
"""


def test_reward_functions_are_named_from_the_current_folder_and_python_keeps_what_the_script_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "my/train_grpo.py"
    script.parent.mkdir()
    script.write_text(GUARDED)
    for given in ("my/train_grpo.py", str(script)):
        result = translate(given)
        assert result.options["reward_funcs"] == ["my/train_grpo.py:brief"]
    text = " ".join(result.as_yaml().replace("#  ", "").split())
    assert "importing train_grpo.py imports all that it imports, TRL too; to do without, move brief into" in text
    assert "(--python)" in text and "callbacks: pass them" in text
    python = result.as_python()
    assert "\nargs = PPOConfig(\n" in python
    for said in ("--python", "reward_funcs", "dataset_name", "callbacks", "make()"):
        assert said not in python, said
    # From elsewhere, a file outside the current folder keeps its path.
    monkeypatch.chdir(EXAMPLES)
    assert translate(str(script)).options["reward_funcs"] == [f"{script}:brief"]
