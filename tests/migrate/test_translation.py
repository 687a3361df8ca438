"""TRL's scripts and verl's configurations, translated: the values are worked out by hand beside each example."""

import re
from pathlib import Path

import pytest
import yaml

from alpaca_ppo.cli.configurations import migrate
from alpaca_ppo.config import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.migrate import Translation, translate

EXAMPLES = Path(__file__).parent / "examples"
ACTOR, VALIDATION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.val_kwargs"
PPO_FLAGS = (
    "--dataset_name trl-lib/tldr --dataset_test_split validation --output_dir models/ppo --learning_rate 3e-6 "
    "--per_device_train_batch_size 16 --gradient_accumulation_steps 4 --total_episodes 1000000 "
    "--model_name_or_path EleutherAI/pythia-1b-deduped --sft_model_path cleanrl/sft --reward_model_path cleanrl/rm "
    "--local_rollout_forward_batch_size=16 --missing_eos_penalty 1.0 --stop_token eos --eval_strategy steps "
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


def listed(result: Translation) -> dict[str, str]:
    """What was not taken: each name, and the reason."""
    return {re.sub(r" \(.*\)", "", name): reason for reason, names in result.not_taken.items() for name in names}


def of_yaml(folder: Path, given: dict, *arguments: str) -> Translation:
    (folder / "given.yaml").write_text(yaml.safe_dump(given))
    return translate(str(folder / "given.yaml"), arguments)


def test_the_grpo_quickstart_with_trls_defaults(tmp_path):
    result = translate(str(EXAMPLES / "grpo_quickstart.py"))
    some(
        accepted(result, tmp_path),
        model_name_or_path="Qwen/Qwen2-0.5B-Instruct",
        dataset_name="trl-lib/tldr",
        use_peft=False,
        dataset_train_split="train",
        output_dir=str(Path.cwd() / "Qwen2-0.5B-GRPO"),
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
        kl_coef=0.0,
        kl_loss_coef=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="linear",
        total_epochs=3,
        save_steps=500,
        eval_steps=0,
        bf16=True,
        gradient_checkpointing=True,
        report_to=["none"],
    )
    assert listed(result) == {} and "# copy functions of the script into rewards.py" in result.as_yaml()


def test_the_literals_of_a_script_are_taken_and_the_rest_is_listed_by_name(tmp_path):
    flags = ["--learning-rate", "2e-6", "--model_name_or_path", "Qwen/Qwen2.5-3B-Instruct"]
    flags += ["--gradient_accumulation_steps=8", "--max_completion_length=768", "--lr_scheduler_type=cosine"]
    result = translate(str(EXAMPLES / "grpo_vllm_lora.py"), flags, processes=2)
    some(
        accepted(result, tmp_path),
        model_name_or_path="Qwen/Qwen2.5-3B-Instruct",
        reward_model_name_or_path=["my/reward-model"],
        reward_funcs=["rewards.py:correctness", "rewards.py:think_format_reward"],
        dataset_name="openai/gsm8k",
        dataset_config="main",
        dataset_train_split="train",
        use_peft=True,
        lora_r=64,
        lora_alpha=64,
        lora_target_modules=None,
        seed=7,
        learning_rate=2e-6,
        # steps_per_generation 16: 4 * 2 processes * 16 = 128 completions, 128 / 16 = 8 prompts.
        rollout_batch_size=8,
        response_len=768,
        # A name that is assigned once.
        num_return_sequences=16,
        # 4 * 2 processes * 8 = 64 completions in an optimizer step, so 2 on a rollout, twice (num_iterations).
        step_batch_size=64,
        ppo_epochs=2,
        # A process generates 128 / 2 completions at once.
        rollout_per_device_batch_size=64,
        # 250 optimizer steps / 4 = 62.5, rounded up to 63 rollouts.
        max_steps=63,
        total_epochs=None,
        save_steps=12,
        eval_steps=25,
        logging_steps=1,
        # A tenth of the run, as there.
        warmup_steps=0.1,
        query_len=256,
        adv_estimator="grpo_no_std",
        loss_agg_mode="seq-mean-token-sum-norm",
        cliprange_high=0.28,
        kl_loss_coef=0.04,
        kl_coef=0.0,
        mask_truncated=True,
        reward_weights=[1.0, 0.5, 0.2],
        chat_template_kwargs={"enable_thinking": False},
    )
    notes = listed(result)
    for name, words in (
        ("output_dir", "is no literal; give its value as a flag"),
        ("model_init_kwargs", "no literal"),
        ("tools", "module:function"),
        ("top_p", "the policy that is trained must be the one that"),
        ("use_vllm", "generation_backend"),
    ):
        assert words in notes[name]
    # Given after the file, and taken from it.
    assert not {"gradient_accumulation_steps", "model", "train_dataset", "args", "peft_config"} & set(notes)


@pytest.mark.parametrize(
    ("made", "flag", "expected"),
    [
        (
            "GRPOConfig(per_device_train_batch_size=a.bs * 2)",
            "--per_device_train_batch_size=16",
            {"step_batch_size": 16},
        ),
        ("GRPOConfig(max_completion_length=2048 * 2)", "--max_completion_length=4096", {"response_len": 4096}),
        ("GRPOConfig(loss_type=a.loss)", "--loss_type=grpo", {"loss_agg_mode": "seq-mean-token-mean"}),
        # 64 completions are 8 prompts.
        ("GRPOConfig(generation_batch_size=a.n)", "--generation_batch_size=64", {"rollout_batch_size": 8}),
        ("PPOConfig(response_length=f(), num_ppo_epochs=2)", "--response_length=96", {"response_len": 96}),
        ("PPOConfig(total_episodes=len(d), num_ppo_epochs=2)", "--total_episodes=96", {"total_episodes": 96}),
        ("GRPOConfig(mask_truncated_completions=x)", "--mask_truncated_completions", {"mask_truncated": True}),
        # Variables that are assigned twice, or may be.
        ("n = 8\nn *= 2\nGRPOConfig(num_generations=n)", "--num_generations=8", {"num_return_sequences": 8}),
        ("n = 8\ndef f(n): pass\nGRPOConfig(num_generations=n)", "--num_generations=4", {"num_return_sequences": 4}),
        ("n = 8\nfrom x import n\nGRPOConfig(num_generations=n)", "--num_generations=4", {"num_return_sequences": 4}),
        (
            "for n in r:\n  pass\nn = 8\nGRPOConfig(num_generations=n)",
            "--num_generations=4",
            {"num_return_sequences": 4},
        ),
        ("w = [1.0]\nw[0] = 2.0\nGRPOConfig(reward_weights=w)", "--reward_weights=3", {"reward_weights": [3]}),
    ],
)
def test_an_amount_that_a_script_computes_is_refused_without_a_flag(made, flag, expected, tmp_path):
    *before, call = made.split("\n")
    script = ["from trl import *", f"from trl import {call.split('(')[0]}", *before, f"PPOTrainer({call})"]
    (tmp_path / "run.py").write_text("\n".join(script).replace("PPOTrainer(G", "GRPOTrainer(args=G"))
    name = flag.removeprefix("--").split("=")[0]
    with pytest.raises(ValueError, match=f"{name} is `.*`, which is no literal; give its value as a flag"):
        translate(str(tmp_path / "run.py"))
    some(translate(str(tmp_path / "run.py"), [flag]).options, **expected)


MADE = "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(beta=0.1)\n"


def of_script(folder: Path, script: str) -> Translation:
    (folder / "run.py").write_text(
        script if re.search(r"Trainer\(|\bT\(", script) else f"{script}\nGRPOTrainer(args=args)\n"
    )
    return translate(str(folder / "run.py"))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("from trl import GRPOConfig as C, GRPOTrainer as T\nT(args=C(beta=0.2), reward_funcs=f)", 0.2),
        ("import trl\nargs = trl.GRPOConfig(beta=0.2)\ntrl.GRPOTrainer('m', f, args)", 0.2),
        ("import os, trl as t\nt.GRPOTrainer('m', f, t.GRPOConfig(beta=0.2))", 0.2),
        ("from trl import GRPOTrainer\nfrom trl.trainer import c\nGRPOTrainer(args=c.GRPOConfig(beta=0.2))", 0.2),
        ("from trl import GRPOConfig\nb: float = 0.2\nargs: GRPOConfig = GRPOConfig('o', beta=b)", 0.2),
        # Reading it, and settings of something else.
        (f"{MADE}print(args)\nlog.info(f'{{args}} {{args.seed}}')\nif args.do_eval: set_seed(args.seed)\n", 0.1),
        (f"{MADE}tokenizer.pad_token = x\ntorch.set_default_device('cuda')\nx.replace('a', 'b')\nmodel.eval()", 0.1),
    ],
)
def test_the_settings_of_the_one_configuration_are_read(script, expected, tmp_path):
    some(of_script(tmp_path, script).options, kl_loss_coef=expected)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        # More than one configuration or trainer, or another class of that name.
        (f"{MADE}other = GRPOConfig(beta=0.2)", "(args|other) ="),
        (f"{MADE}GRPOTrainer(args=args)\nGRPOTrainer(args=args, reward_funcs=f)", "GRPOTrainer.args=args, reward"),
        ("from trl import GRPOConfig\nclass GRPOConfig(GRPOConfig): pass\nargs = GRPOConfig()", "class GRPOConfig"),
        ("import trl\nimport mine as trl\nargs = trl.GRPOConfig()", "import mine"),
        ("from trl import GRPOConfig\nfrom mine import GRPOTrainer\nargs = GRPOConfig()", "from mine"),
        (f"{MADE}class GRPOTrainer(GRPOTrainer): pass\nGRPOTrainer(args=args)", "class GRPOTrainer"),
        ("try: from trl import GRPOConfig as C\nexcept E: from b import C\nargs = C(beta=0.1)", "except E: from b"),
        # Arguments that are not known.
        ("from trl import GRPOConfig\nargs = GRPOConfig(**vars(a))", "args ="),
        ("from trl import GRPOConfig\ncfg = {'beta': 0.1}\nargs = GRPOConfig(**cfg)", "args ="),
        ("from trl import GRPOConfig\nargs = GRPOConfig(*x)", "args ="),
        # What may change it later.
        (f"{MADE}args.beta = 0.2", "args.beta = 0.2"),
        (f"{MADE}if x:\n  args.beta = 0.2", "args.beta = 0.2"),
        (f"{MADE}args.beta, args.seed = 0.2, 3", "args.beta, args.seed"),
        (f"{MADE}setattr(args, 'beta', 0.2)", "setattr"),
        (f"{MADE}args.__dict__['beta'] = 0.2", "args.__dict__"),
        (f"{MADE}args.set_optimizer(learning_rate=1e-4)", "args.set_optimizer"),
        (f"{MADE}args.reward_weights.append(2)", "args.reward_weights"),
        (f"{MADE}config = args\nconfig.beta = 0.2", "config"),
        (f"{MADE}tune(args)", "tune"),
        (f"{MADE}for a in [args]: a.beta = 0.2", "for a"),
        (f"{MADE}def f(a=args): a.beta = 0.2", "def f"),
        (f"{MADE}def f(args): GRPOTrainer(args=args)\nf(other)", "def f"),
        (f"{MADE}del args.beta", "del args.beta"),
        (f"from consts import *\n{MADE}", "from consts"),
        (f"{MADE}args: int", "args"),
        (f"{MADE}t = GRPOTrainer(args=args)\nt.args.beta = 0.2", "t.args.beta"),
        (f"{MADE}t = GRPOTrainer(args=args)\nt.args = other", "t.args"),
        (f"{MADE}t = GRPOTrainer(args=args)\nsetattr(t, 'beta', 0.2)", "setattr"),
        (f"{MADE}t = GRPOTrainer(args=args)\nu = t\nu.beta = 0.2", "u.beta"),
        (
            f"{MADE}class T(GRPOTrainer):\n  def f(self):\n    self.args.beta = 0.2\nGRPOTrainer(args=args)",
            "self.args.beta",
        ),
        (f"{MADE}peft = LoraConfig(r=8)\npeft.r = 4", "peft.r"),
    ],
)
def test_whatever_may_change_a_setting_of_a_script_is_refused_by_its_line(script, line, tmp_path):
    with pytest.raises(ValueError, match=f"line \\d+, `{line}.*`, is more than migrate reads"):
        of_script(tmp_path, script)


@pytest.mark.parametrize(
    "script",
    [
        "print(1)",
        "from mine import GRPOConfig\nargs = GRPOConfig(beta=0.1)",
        "from trlx import GRPOConfig\nargs = GRPOConfig(beta=0.1)",
        "from .trl import GRPOConfig\nargs = GRPOConfig(beta=0.1)",
        "import mine as trl\nargs = trl.GRPOConfig(beta=0.1)",
        "import mine.trl as trl\nargs = trl.GRPOConfig(beta=0.1)",
        "from mine import trl\nargs = trl.GRPOConfig(beta=0.1)",
        f"import mine\n{MADE.replace('= GRPO', '= mine.GRPO')}",
        "from trl import GRPOConfig\nclass C(GRPOConfig):\n  beta: float = 0.2\nargs = C()",
        "from trl import GRPOConfig\ndef a(): return GRPOConfig(beta=0.1)\nGRPOTrainer(args=a())",
        "from trl import GRPOConfig\nC = GRPOConfig\nargs = C(beta=0.1)",
        "from trl import GRPOConfig\na = args = GRPOConfig(beta=0.1)",
        "from trl import GRPOConfig\nargs = GRPOConfig(beta=0.1) if x else other",
        f"{MADE}args = dataclasses.replace(args, beta=0.2)",
        f"{MADE}GRPOTrainer(args=other)",
        f"{MADE}GRPOTrainer('m', f)",
        f"{MADE}class T(GRPOTrainer): pass\nT(args=args)",
        "from trl import *\ns, args = HfArgumentParser((S, GRPOConfig)).parse_args_into_dataclasses()",
    ],
)
def test_a_script_in_which_no_trainer_gets_its_configuration_is_refused(script, tmp_path):
    with pytest.raises(ValueError, match="no trainer of TRL gets a GRPOConfig or PPOConfig that is made here"):
        of_script(tmp_path, script)


@pytest.mark.parametrize("call", ["LoraConfig(r=8, lora_alpha=4)", "get_peft_model(model, r=8, lora_alpha=4)"])
def test_the_adapters_of_a_script_are_read(call, tmp_path):
    some(of_script(tmp_path, f"{MADE}x = {call}\n").options, use_peft=True, lora_r=8, lora_alpha=4)


def test_the_command_line_of_trls_ppo_script(tmp_path):
    some(
        # The script takes everything from its flags.
        accepted(of_yaml(tmp_path, {"num_ppo_epochs": 4}, *PPO_FLAGS), tmp_path),
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
        total_epochs=None,
        response_len=53,
        temperature=0.7,
        kl_coef=0.05,
        kl_controller="fixed",
        lam=0.95,
        penalty_reward_value=-1.0,
        # TRL's PPOTrainer counts rollouts.
        eval_steps=100,
        save_steps=500,
        old_policy="rollout",
    )


def test_verls_gsm8k_ppo_command_line(tmp_path):
    some(
        accepted(translate(str(EXAMPLES / "verl_gsm8k_ppo.sh")), tmp_path),
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
        kl_coef=0.002,
        kl_controller="fixed",
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
        # The default of a variable, and a variable of the script.
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
        kl_loss_coef=0.002,
        kl_loss_type="k3",
        kl_coef=0.0,
        # 5 rollouts of 1024 / 256 = 4 optimizer steps, twice.
        warmup_steps=40,
        lr_scheduler_type="constant_with_warmup",
        output_dir=str(Path.cwd() / "checkpoints/verl_grpo/qwen3_8b"),
        report_to=["wandb"],
    )
    # Without a KL in the reward there is nothing to control.
    assert "kl_controller" not in yaml.safe_load(result.as_yaml())
    assert "distribution" in listed(result)["actor_rollout_ref.rollout.top_p"]


def test_a_yaml_file_of_verl_with_overrides(tmp_path):
    config = {
        "hydra": {"searchpath": ["x"]},
        "data": {"max_prompt_length": 1024, "max_response_length": 2048, "train_files": ["a.parquet", "b.parquet"]},
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "actor": {
                "_target_": "verl.Actor",
                "ppo_mini_batch_size": 64,
                "clip_ratio_high": 0.28,
                "loss_agg_mode": "seq-mean-token-mean",
                "policy_loss": {"loss_mode": "geo_mean"},
                "optim": {"lr_warmup_steps_ratio": 0.1},
            },
            "rollout": {"n": 4, "name": "???", "val_kwargs": {"temperature": 0.6, "do_sample": True, "n": 8}},
        },
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "filter_groups": {"enable": True}},
        "reward_model": {"overlong_buffer": {"enable": True, "len": 512, "penalty_factor": 0.5}},
        "custom_reward_function": {"path": "my.py", "name": "score"},
        "trainer": {"total_training_steps": 20},
        "invented": {"key": 3},
    }
    overrides = ["data.train_batch_size=64", "~data.val_files", "trainer.save_freq=-1", "trainer.project_name=${x.y}"]
    result = of_yaml(tmp_path, config, *overrides)
    parsed = yaml.safe_load(result.as_yaml())
    some(
        accepted(result, tmp_path),
        query_len=1024,
        response_len=2048,
        cliprange_high=0.28,
        dynamic_sampling=9,
        overlong_buffer_len=512,
        eval_temperature=0.6,
        eval_num_samples=8,
        rollout_batch_size=64,
        # 64 prompts with 4 responses each.
        step_batch_size=256,
        policy_loss="gmpo",
        adv_estimator="grpo_no_std",
        max_steps=20,
        total_epochs=None,
        warmup_steps=0.1,
        lr_scheduler_type="constant_with_warmup",
        reference="none",
        save_steps=0,
    )
    notes = listed(result)
    assert notes["invented.key"] == "there is no option of this name"
    assert "one file or folder" in notes["data.train_files"]
    assert "reward_funcs" in notes["custom_reward_function.path"]
    # Without effect in this run, and refused by the checks.
    assert not {"critic_learning_rate", "vf_coef", "lam", "clip_ratio_c", "lora_alpha"} & set(parsed)


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
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.05}, {"policy_loss": "sapo"}),
        ({"importance_sampling_level": "sequence"}, {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"adv_estimator": "gdpo"}),
        ({"scale_rewards": "batch"}, {"adv_estimator": "reinforce_plus_plus_baseline"}),
        ({"num_train_epochs": 1.5, "save_strategy": "no"}, {"total_epochs": 2, "save_steps": 0}),
        ({"save_strategy": "epoch", "warmup_steps": 10}, {"save_steps": 10, "warmup_steps": 10}),
        # YAML's false is the word no, of flags too.
        ({"eval_strategy": False, "logging_strategy": "no"}, {"eval_steps": 0, "logging_steps": 1}),
        # A number that YAML reads as text, and text that begins like one.
        ({"learning_rate": "2E-6", "dataset_config": "1-1e5"}, {"learning_rate": 2e-6, "dataset_config": "1-1e5"}),
        ({"dataset_name": "BAAI/Infinity-Instruct"}, {"dataset_name": "BAAI/Infinity-Instruct"}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"lr_scheduler_type": "constant", "warmup_steps": 0}),
        # It needs arguments, which no option has; the nearest without stands for it.
        ({"lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 10}, {"lr_scheduler_type": "cosine"}),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"lr_scheduler_type": "constant_with_warmup"}),
        # TRL's max_steps win over its epochs; a rollout of 8 * 8 completions has 8 optimizer steps, taken twice.
        (
            {"max_steps": 21, "num_train_epochs": 2, "steps_per_generation": 8, "num_iterations": 2},
            {"max_steps": 2, "total_epochs": None, "total_episodes": None},
        ),
        ({"warmup_steps": 3, "warmup_ratio": 0.5}, {"warmup_steps": 3}),
        ({"warmup_ratio": 0.5, "warmup_steps": 0}, {"warmup_steps": 0.5}),
        ({"beta": 0}, {"reference": "none", "kl_coef": 0.0}),
        ({"reward_model_path": None}, {"reward_funcs": ["rewards.py:reward"], "init_value_with_reward": False}),
        ({"use_peft": True, "lora_target_modules": "all-linear"}, {"lora_target_modules": None}),
        ({"bf16": False, "delta": 4.0}, {"bf16": False, "clip_ratio_c": 4.0}),
        ({"report_to": "wandb", "torch_dtype": "bfloat16"}, {"report_to": ["wandb"], "dtype": "float32"}),
        ({"use_peft": True, "lora_target_modules": "q"}, {"lora_target_modules": ["q"]}),
        # A batch of 8 in 4 mini-batches of 2, each an optimizer step; TRL's scheduler steps once for 4 * 4 of these.
        (
            {
                "num_mini_batches": 4,
                "stop_token_id": 13,
                "warmup_steps": 2,
                "total_episodes": 24,
                "num_train_epochs": 2,
            },
            {
                "rollout_batch_size": 8,
                "step_batch_size": 2,
                "step_per_device_batch_size": 2,
                "truncate_tokens": [13],
                "total_episodes": 24,
                "total_epochs": None,
                "warmup_steps": 32,
            },
        ),
        ({"num_ppo_epochs": 2, "warmup_ratio": 0.05}, {"warmup_steps": 0.05, "total_epochs": 3, "ppo_epochs": 2}),
    ],
)
def test_values_of_trl_that_follow_from_others(given, expected, tmp_path):
    is_ppo = {"num_mini_batches", "num_ppo_epochs", "reward_model_path"} & set(given)
    given = given if is_ppo else {"scale_rewards": True, **given}
    result = of_yaml(tmp_path, {"model_name_or_path": "m", "dataset_name": "d", **given})
    some(accepted(result, tmp_path), **expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"report_to": ["none"], "overlong_prompts": "error", "warmup_steps": 0}),
        ({"data.truncation": "left"}, {"overlong_prompts": "truncate"}),
        ({"data.truncation": "left", "data.filter_overlong_prompts": True}, {"overlong_prompts": "drop"}),
        (
            {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1, "critic.optim.lr_warmup_steps_ratio": 0.05},
            {"warmup_steps": 0.1, "lr_scheduler_type": "constant_with_warmup", "critic_lr_warmup_steps": 0.05},
        ),
        ({"trainer.total_training_steps": 7, "trainer.total_epochs": 2}, {"max_steps": 7, "total_epochs": None}),
        ({"algorithm.rollout_correction.bypass_mode": True}, {"old_policy": "rollout"}),
        ({"actor_rollout_ref.model.lora_rank": 0, "actor_rollout_ref.model.lora_alpha": 8}, {"use_peft": False}),
        (
            {
                "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
                "actor_rollout_ref.actor.optim.warmup_style": None,
            },
            {"lr_scheduler_type": "cosine"},
        ),
        ({"trainer.save_freq": 20}, {"save_steps": 20, "eval_steps": 0}),
        (
            {"reward": {"reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 64, "log": False}}}},
            {"overlong_buffer_len": 64},
        ),
        ({"reward_model": {"overlong_buffer": {"enable": True, "len": 0}}}, {"overlong_buffer_len": None}),
        ({"trainer.logger": ["console", "wandb"]}, {"report_to": ["wandb"]}),
        ({"trainer.logger": None}, {"report_to": ["none"]}),
        # Megatron's configuration has null. verl's upper range is 0.2, whatever the lower one is.
        ({f"{ACTOR}.optim.lr_warmup_steps": None}, {"warmup_steps": 0, "lr_scheduler_type": "constant"}),
        ({f"{ACTOR}.clip_ratio_low": 0.1}, {"cliprange": 0.1, "cliprange_high": 0.2}),
        # Megatron's names: the scale of its adapters is 32 by default, and the optimizer clips.
        ({"actor_rollout_ref.model.lora.rank": 8}, {"use_peft": True, "lora_r": 8, "lora_alpha": 32}),
        ({"actor_rollout_ref.model.lora": {"rank": 8, "alpha": 4}}, {"lora_r": 8, "lora_alpha": 4}),
        ({"actor_rollout_ref.model.lora_rank": 8}, {"lora_r": 8, "lora_alpha": 16}),
        (
            {f"{ACTOR}.optim.clip_grad": 0.2, f"{ACTOR}.grad_clip": 0.4, "critic.optim.clip_grad": 0.3},
            {"max_grad_norm": 0.2, "critic_max_grad_norm": 0.3},
        ),
        # The first of verl's four batches is no further round.
        (
            {
                "algorithm.filter_groups": {"enable": True, "max_num_gen_batches": 4},
                "actor_rollout_ref.rollout.n": 2,
                "algorithm.adv_estimator": "grpo",
            },
            {"dynamic_sampling": 3},
        ),
        # verl evaluates at this temperature, which is 0 by default, whether do_sample is given or not.
        ({f"{VALIDATION}.do_sample": True}, {"eval_temperature": 0.0}),
        (
            {f"{VALIDATION}.temperature": 0.6, f"{VALIDATION}.top_p": 0.9, f"{VALIDATION}.top_k": -1},
            {"eval_temperature": 0.6, "eval_top_p": 0.9, "eval_top_k": None},
        ),
    ],
)
def test_values_of_verl_that_follow_from_others(given, expected, tmp_path):
    given = {"actor_rollout_ref.model.path": "m", "data.train_files": "d.parquet", **given}
    result = of_yaml(tmp_path, given)
    some(accepted(result, tmp_path), **expected)
    # What verl always does, and why.
    assert result.options["bf16"] and result.comments["bf16"]


def test_nothing_that_was_given_is_passed_over_in_silence(tmp_path):
    given = {
        "num_generations": 8,
        "data_seed": 3,
        "invented": 1,
        "min_p": 0.1,
        "luck": None,
        "load_best_model_at_end": True,
    }
    given |= {"loss_type": "cispo", "push_to_hub": True, "log_completions": True, "optim": "adamw_8bit"}
    result = of_yaml(tmp_path, given)
    names = set(listed(result))
    assert set(given) - {"num_generations", "loss_type"} <= names and "epsilon_high" in names
    accepted(result, tmp_path)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        # The sampler's log-probabilities stay uncorrected, as bypass_mode's default says.
        ({f"{ACTOR}.tis_imp_ratio_cap": 2}, f"{ACTOR}.tis_imp_ratio_cap"),
        ({"algorithm.rollout_is": True}, "algorithm.rollout_is"),
        ({"algorithm.rollout_correction.loss_type": "x"}, "algorithm.rollout_correction.loss_type"),
        ({"data.gen_batch_size": 96}, "data.gen_batch_size"),
        ({"actor_rollout_ref.model.lora_adapter_path": "a"}, "actor_rollout_ref.model.lora_adapter_path"),
        ({f"{ACTOR}.clip_ratio": 0.3, f"{ACTOR}.clip_ratio_low": 0.1}, f"{ACTOR}.clip_ratio"),
        ({"num_generations": 8, "seed": 1, "data_seed": 3}, "data_seed"),
    ],
)
def test_a_name_whose_option_another_name_sets_is_listed(given, name, tmp_path):
    of_verl = {} if "num_generations" in given else {"actor_rollout_ref.model.path": "m"}
    assert [*listed(of_yaml(tmp_path, of_verl | given))] == [name]


@pytest.mark.parametrize(
    "name",
    [
        "data.max_response_length",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ACTOR}.optim.lr_warmup_steps",
        "algorithm.filter_groups.max_num_gen_batches",
    ],
)
def test_a_text_or_a_list_where_verl_counts_is_refused_by_name(name, tmp_path):
    for value in ("many", [1]):
        with pytest.raises(ValueError, match=f"{name} is .* in verl's .*; it must be a number"):
            of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m", name: value})
    with pytest.raises(ValueError, match="data.max_prompt_length is None; batch sizes"):
        of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m", "data.max_prompt_length": None})


def test_what_other_settings_make_void_is_listed(tmp_path):
    given = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": 0.02}
    given |= {"algorithm.kl_ctrl.kl_coef": 0.004, "critic.optim.lr": 1e-5, "algorithm.adv_estimator": "grpo"}
    result = of_yaml(tmp_path, {"actor_rollout_ref.rollout.n": 4, **given})
    # Without use_kl_in_reward, and without a critic.
    void = {name for name, reason in listed(result).items() if "without effect" in reason}
    assert void == {"algorithm.kl_ctrl.kl_coef", "critic.optim.lr"}
    some(result.options, kl_coef=0.0, kl_loss_coef=0.02)
    trl = listed(of_yaml(tmp_path, {"num_generations": 8, "hub_model_id": "me/x", "learning_rate": 1e-6}))
    assert trl == {"hub_model_id": "without effect, because of other settings"}


def test_a_value_that_only_a_run_decides_is_refused_if_a_default_would_replace_it_and_listed_otherwise(tmp_path):
    script = "python3 -m verl.trainer.main_ppo data.max_prompt_length=$MAX actor_rollout_ref.model.path=$MODEL"
    (tmp_path / "run.sh").write_text(f"{script} trainer.experiment_name=x_$USER")
    with pytest.raises(ValueError, match="data.max_prompt_length is '\\$MAX': only a run decides it"):
        translate(str(tmp_path / "run.sh"))
    result = translate(str(tmp_path / "run.sh"), ["data.max_prompt_length=300"])
    some(result.options, query_len=300, model_name_or_path="FILL_IN", output_dir="checkpoints/verl_examples/gsm8k")
    assert set(listed(result)) == {"actor_rollout_ref.model.path", "trainer.experiment_name"}
    # Also without a default of verl, and for a command between backquotes.
    with pytest.raises(ValueError, match="actor_rollout_ref.model.lora_rank is '`rank`': only a run decides it"):
        of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m"}, "actor_rollout_ref.model.lora_rank=`rank`")


@pytest.mark.parametrize("text", ["x_$USER", "${now:%Y}", "$(date)", "`date`"])
def test_what_only_a_run_decides_stays_out_of_the_output_folder_and_is_listed(text, tmp_path):
    names = {"actor_rollout_ref.model.path": "m", "trainer.experiment_name": "e"}
    result = of_yaml(tmp_path, {**names, "trainer.project_name": text})
    some(result.options, output_dir="checkpoints/e")
    assert "trainer.project_name" in listed(result)
    # Neither is known: the experiment's default stands in its place.
    result = of_yaml(tmp_path, {**names, "trainer.project_name": text, "trainer.experiment_name": text})
    some(result.options, output_dir="checkpoints/gsm8k")
    assert {"trainer.project_name", "trainer.experiment_name"} <= set(listed(result))


def test_variables_in_paths_of_trl_are_listed_except_home(tmp_path):
    given = {"num_generations": 8, "output_dir": "$HOME/o", "dataset_name": "${oc.env:HOME}/d", "run_name": "$NAME"}
    result = of_yaml(tmp_path, given | {"model_name_or_path": "${BASE}/m", "system_prompt": "Pay in $US only"})
    home = str(Path.home())
    some(result.options, output_dir=f"{home}/o", dataset_name=f"{home}/d", system_prompt="Pay in $US only")
    some(result.options, model_name_or_path="FILL_IN")
    assert set(listed(result)) == {"run_name", "model_name_or_path"}
    script = "from trl import GRPOConfig\nGRPOTrainer(args=GRPOConfig(output_dir='${HOME}/o'))"
    some(of_script(tmp_path, script).options, output_dir=f"{home}/o")
    # Names with a default of TRL, without one, and of this package.
    for name in ("learning_rate", "adam_beta1", "query_len", "response_len"):
        with pytest.raises(ValueError, match=f"{name} is '\\$X': only a run decides it"):
            of_yaml(tmp_path, {"num_generations": 8, name: "$X"})
    result = of_yaml(tmp_path, {"num_generations": 8, "num_logged_rollouts": "$X"})
    assert "only a run decides it" in listed(result)["num_logged_rollouts"]
    assert "num_logged_rollouts" not in result.options


def test_the_home_folder_is_written_out_in_a_list_of_files(tmp_path):
    given = {"data.train_files": ["$HOME/a.parquet"], "data.val_files": ["~/data/x.parquet"]}
    result = of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m", **given})
    home = str(Path.home())
    some(result.options, dataset_name=f"{home}/a.parquet", eval_dataset_name=f"{home}/data/x.parquet")


def test_a_value_of_verl_may_refer_to_another_name(tmp_path):
    given = {"data.max_prompt_length": 300, "data.max_response_length": "${data.max_prompt_length}"}
    given |= {"actor_rollout_ref.actor.ppo_mini_batch_size": "${data.train_batch_size}"}
    given |= {"critic.ppo_epochs": "${oc.select:actor_rollout_ref.actor.ppo_epochs,1}"}
    given |= {"critic.rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}"}
    # Relative to the name's own section, and within a text.
    given |= {"actor_rollout_ref.actor.clip_ratio": 0.1, "actor_rollout_ref.actor.clip_ratio_high": "${.clip_ratio}"}
    given |= {"critic.optim.lr": "${...actor_rollout_ref.actor.optim.lr}"}
    given |= {"trainer.default_local_dir": "out/${trainer.experiment_name}_${data.max_response_length}"}
    given |= {"trainer.experiment_name": "${..actor_rollout_ref.rollout.n}x", "trainer.project_name": "${.nothing}"}
    result = of_yaml(tmp_path, {"actor_rollout_ref.rollout.n": 2, **given})
    # verl's train_batch_size is 1024, with 2 responses each; its learning rate is 1e-6.
    some(result.options, response_len=300, step_batch_size=2048, cliprange_high=0.1, critic_learning_rate=1e-6)
    some(result.options, output_dir="out/2x_300", critic_epochs=1)
    assert "trainer.project_name" in listed(result)
    # Nothing to give: no option is needed.
    assert "not needed" in listed(result)["critic.rollout_n"]


@pytest.mark.parametrize(
    ("files", "given", "expected"),
    [
        ("~/gsm8k/train.parquet", {}, "examples.rewards.gsm8k:correctness"),
        ("~/math/train.parquet", {}, "rewards.py:reward"),
        ("~/gsm8k/train.parquet", {"custom_reward_function.path": "my.py"}, "rewards.py:reward"),
        ("~/gsm8k/train.parquet", {"reward_model.enable": True}, "rewards.py:reward"),
        ("~/gsm8k/train.parquet", {"reward_model.reward_manager": "length_reward"}, "rewards.py:reward"),
        ("~/gsm8k/train.parquet", {"reward.reward_manager.name": "dapo"}, "examples.rewards.gsm8k:correctness"),
        ("~/gsm8k/train.parquet", {"reward.reward_model.enable": False}, "examples.rewards.gsm8k:correctness"),
    ],
)
def test_verls_own_reward_of_gsm8k_has_its_counterpart(files, given, expected, tmp_path):
    result = of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m", "data.train_files": files, **given})
    some(accepted(result, tmp_path), reward_funcs=[expected], dataset_name=str(Path.home()) + files[1:])


def test_a_yaml_file_of_trl_may_have_nested_values(tmp_path):
    given = {"num_generations": 8, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    given |= {"chat_template_kwargs": {"enable_thinking": False}, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    result = of_yaml(tmp_path, given)
    some(result.options, adv_estimator="grpo", chat_template_kwargs={"enable_thinking": False})
    assert set(listed(result)) == {"gradient_checkpointing_kwargs", "lr_scheduler_kwargs"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Names that recipes share with this package.
        ({"overwrite_output_dir": True, "system_prompt": "Think."}, {"system_prompt": "Think."}),
        (
            {"peft_config": {"r": 8, "target_modules": ["q"]}},
            {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q"]},
        ),
        ({"dataset_mixture": {"datasets": [{"id": "a"}]}}, {"dataset_name": "FILL_IN"}),
    ],
)
def test_a_valid_file_of_trl_is_not_refused(given, expected, tmp_path):
    some(of_yaml(tmp_path, {"num_generations": 8, **given}).options, **expected)


def test_the_processes_of_a_trl_file_count_in_its_batch_sizes(tmp_path):
    given = {"num_generations": 8, "per_device_train_batch_size": 4, "num_processes": 4}
    # 4 * 4 = 16 completions, 2 prompts; with a flag for 8 processes 32 and 4.
    some(of_yaml(tmp_path, given).options, step_batch_size=16, rollout_batch_size=2)
    result = translate(str(tmp_path / "given.yaml"), processes=8)
    some(result.options, step_batch_size=32, rollout_batch_size=4)
    assert listed(result) == {}
    with pytest.raises(ValueError, match="num_processes is -8; batch sizes follow from it"):
        translate(str(tmp_path / "given.yaml"), processes=-8)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("accuracy", ["rewards.py:accuracy"]),
        (["format", "mine.rewards.tidy", "a.py:b"], ["rewards.py:format", "mine.rewards:tidy", "a.py:b"]),
    ],
)
def test_reward_functions_of_a_trl_file_are_names_of_functions(given, expected, tmp_path):
    some(accepted(of_yaml(tmp_path, {"reward_funcs": given, "num_generations": 8}), tmp_path), reward_funcs=expected)


@pytest.mark.parametrize(
    "given",
    [
        # SkyRL, NeMo-RL, EasyR1, verl's SFT, its evaluation, TRL's SFT, Accelerate.
        {"trainer": {"policy": {"model": {"path": "m"}}, "epochs": 2}, "generator": {"n_samples_per_prompt": 4}},
        {"policy": {"model_name": "m"}, "grpo": {"num_generations_per_prompt": 4}, "data": {"shuffle": True}},
        {"worker": {"actor": {"model": {"model_path": "m"}}}, "data": {"max_prompt_length": 8}, "algorithm": {}},
        {"model": {"partial_pretrain": "m"}, "optim": {"lr": 1e-5}, "data": {"train_batch_size": 8}},
        {"data": {"path": "x", "prompt_key": "prompt"}, "custom_reward_function": {"path": "r.py"}},
        {"model_name_or_path": "m", "learning_rate": 1e-5, "max_length": 64, "packing": True},
        {"compute_environment": "LOCAL_MACHINE", "num_processes": 8, "deepspeed_config": {"zero_stage": 3}},
        # transformers alone, TRL's DPO, and files whose only sign would be a name that many have.
        {"model_name_or_path": "m", "learning_rate": 1e-5, "per_device_train_batch_size": 8, "num_train_epochs": 1},
        {"beta": 0.1, "max_prompt_length": 64, "max_completion_length": 64, "learning_rate": 1e-6},
        {"temperature": 0.7, "model": {"path": "m"}, "optim": {"lr": 1e-5}},
        {"learning_rate": 1e-5, "temperature": 0.7, "epsilon": 1e-8},
        # Names that TRL and this package have.
        {"kl_coef": 0.05, "learning_rate": 1e-5},
        {"reward_funcs": ["a.py:b"], "model_name_or_path": "m", "dataset_name": "d"},
        {"seeds": 1},
        {},
    ],
)
def test_a_file_of_another_project_is_refused(given, tmp_path):
    message = "has no name of TRL's GRPO or PPO and no actor_rollout_ref"
    with pytest.raises(ValueError, match=f"given.yaml {message}"):
        of_yaml(tmp_path, given)


@pytest.mark.parametrize(
    "overrides",
    [
        "data.train_files=x model.partial_pretrain=y optim.lr=1e-4",
        "trainer.policy.model.path=x generator.n_samples_per_prompt=5",
        "data.custom_cls.path=x.py",
    ],
)
def test_overrides_of_another_project_are_refused(overrides):
    first, *others = overrides.split()
    with pytest.raises(ValueError, match=f"{first} has no name of TRL's GRPO or PPO and no actor_rollout_ref"):
        translate(first, others)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kl_coef": 0.05, "response_len": 64, "rollout_batch_size": 8}, "response_len, rollout_batch_size, which are"),
        ({"num_generations": 8, "model": {"path": "m"}}, "model, which GRPO of TRL does not"),
        ({"num_generations": 8, "optim": {"lr": 1e-5}}, "optim, which GRPO of TRL does not"),
        ({"num_generations": 8, "rloo_k": 2}, "rloo_k, which GRPO of TRL does not"),
        # RLOO has names of both.
        ({"num_generations": 8, "kl_coef": 0.03}, "kl_coef, which GRPO of TRL does not"),
        ({"num_ppo_epochs": 2, "num_generations": 8}, "num_generations, which PPO of TRL does not"),
        ({"reward_model_path": "m", "max_new_tokens": 64}, "max_new_tokens, which PPO of TRL does not"),
    ],
)
def test_a_file_with_names_of_this_package_or_of_others_is_refused(given, said, tmp_path):
    with pytest.raises(ValueError, match=f"given.yaml has {said}"):
        of_yaml(tmp_path, given)


def test_an_estimator_or_loss_that_is_not_built_in_is_refused(tmp_path):
    for name in ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"):
        with pytest.raises(ValueError, match=f"{name} is 'gpg': no counterpart: GPG is not built in"):
            of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m", name: "gpg"})
    with pytest.raises(ValueError, match="distillation.enabled is True: .* set teacher_model_name_or_path"):
        of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m", "distillation": {"enabled": True}})
    with pytest.raises(ValueError, match="loss_type is 'sigmoid': loss_agg_mode and policy_loss, for grpo"):
        of_yaml(tmp_path, {"num_generations": 8, "loss_type": "sigmoid"})


def test_the_values_of_another_configuration_of_verl_are_not_taken_for_given(tmp_path):
    def of_name(name):
        script = f"python3 -m verl.trainer.main_ppo --config-name='{name}' actor_rollout_ref.rollout.n=1"
        (tmp_path / "run.sh").write_text(script)
        return listed(translate(str(tmp_path / "run.sh")))

    assert of_name("ppo_megatron_trainer.yaml") == {}
    assert "not in the script" in of_name("my_grpo")["hydra.config_name"]
    for bases, said in ((["ppo_trainer", "_self_"], {}), (["mine", "_self_"], {"defaults"})):
        assert {*listed(of_yaml(tmp_path, {"actor_rollout_ref.model.path": "m", "defaults": bases}))} == {*said}


def test_the_command_prints_what_is_asked_for(capsys):
    assert migrate(["--num_processes", "4", str(EXAMPLES / "grpo_quickstart.py")]) == 0
    # TRL's 8 completions on each of 4 processes, 8 for each prompt.
    assert yaml.safe_load(capsys.readouterr().out)["rollout_batch_size"] == 4
    # The second value is the path of a file, which YAML cannot read as text.
    overrides = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.model.custom_chat_template=@x"]
    assert migrate(["data.train_batch_size=32", *overrides]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["step_batch_size"] == 8


@pytest.mark.parametrize(
    ("name", "text", "arguments", "message"),
    [
        ("x.py", "def f(:", [], "x.py is no TRL script"),
        ("x.py", "print(1)", [], "no trainer of TRL gets a GRPOConfig or PPOConfig"),
        ("x.yaml", "- a", [], "x.yaml is no TRL script"),
        ("x.yaml", "a: [", [], "x.yaml is no TRL script"),
        ("x.sh", "echo 1", [], "x.sh starts verl.trainer.main_ppo 0 times"),
        ("x.yaml", "per_device_train_batch_size: 0\nnum_generations: 8", [], "per_device_train_batch_size is 0"),
        ("x.yaml", "num_generations: yes", [], "num_generations is True; batch sizes follow from it"),
        ("x.yaml", "num_generations: 3", [], "num_generations \\(3\\)"),
        ("x.yaml", "actor_rollout_ref.rollout.n: -1", [], "actor_rollout_ref.rollout.n is -1"),
        ("x.yaml", "actor_rollout_ref.rollout.n: 1", ["--flag"], "'--flag' is no override of hydra"),
        ("x.yaml", "seed: 1", ["seed=3"], "seed=3 is no flag of TRL"),
        ("x.yaml", "num_generations: 8", ["--run_name", "a: b: c"], "x.yaml is no TRL script, .* after it"),
        ("x.yaml", "actor_rollout_ref.rollout.n: 1", ["trainer.n=a: b: c"], "x.yaml is no TRL script, .* after it"),
        ("x.yaml", "num_generations: 8\nlearning_rate: 2020-01-01", [], "learning_rate is .*; it must be a number"),
        ("y.py", "", [], "give a script or a YAML file; there is no such file"),
    ],
)
def test_what_cannot_be_translated_is_refused(name, text, arguments, message, tmp_path):
    (tmp_path / name.replace("y", "x" if name == "y.py" else "y")).write_text(text)
    with pytest.raises(ValueError, match=message):
        translate(str(tmp_path / name), arguments)


def test_a_script_of_ppo_without_a_name_of_its_own_is_ppos(tmp_path):
    (tmp_path / "ppo.py").write_text(
        "from trl import PPOConfig, PPOTrainer\nPPOTrainer(PPOConfig(learning_rate=2e-6))\n"
    )
    result = translate(str(tmp_path / "ppo.py"))
    assert result.source == "TRL's PPOConfig in ppo.py" and result.options["learning_rate"] == 2e-6
    # TRL's default.
    assert result.options["ppo_epochs"] == 4
