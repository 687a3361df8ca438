"""Names of other trainers and misspelt ones are explained at once, in Python, in YAML files and on command lines."""

import dataclasses
import inspect
import pickle

import pytest
import yaml

from alpaca_ppo import PPOTrainer
from alpaca_ppo.config import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, explain_names, foreign_names
from alpaca_ppo.registry import ADV_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from tests.option_types import choices

OPTIONS = {
    name: option for cls in (PPOConfig, ScriptArguments, LoraArguments) for name, option in options_of(cls).items()
}
ENTRIES = [entry for section in CONFIG_SECTIONS for entry in foreign_names(section).values()]
TRAINER_ARGUMENTS = {"reward_funcs", "processing_class", "args", "train_dataset"}

GRPO_KWARGS = {
    "output_dir": "out",
    "num_generations": 8,
    "max_completion_length": 256,
    "beta": 0.04,
    "loss_type": "dr_grpo",
    "scale_rewards": False,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "top_p": 0.9,
    "remove_unused_columns": False,
    "save_steps": 500,
    "learning_rat": 1e-6,
    "num_generation": 8,
    "zzz": object(),
}


def refusal(callable_, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        callable_(*args, **kwargs)
    return str(caught.value)


def line(text, name):
    (found,) = [line for line in text.splitlines() if line.startswith((f"  {name} ", f"  {name}:"))]
    return found.strip()


def test_a_part_of_a_name_suggests_the_first_name_that_has_it():
    for part, name in {"peft": "peft_config", "eval": "eval_dataset", "ref": "ref_model"}.items():
        assert line(refusal(PPOTrainer, model="x", **{part: 1}), part) == f"{part}: did you mean {name}?"
    assert line(refusal(PPOConfig, rollout=8), "rollout") == "rollout: did you mean rollout_batch_size?"


def test_one_error_explains_every_unknown_name():
    text = refusal(PPOConfig, **GRPO_KWARGS)
    assert text.splitlines()[0] == (
        "PPOConfig does not take num_generations, max_completion_length, beta, loss_type, scale_rewards, "
        "per_device_train_batch_size, gradient_accumulation_steps, top_p, remove_unused_columns, learning_rat, "
        "num_generation, zzz (help(PPOConfig) has its names):"
    )
    assert line(text, "num_generations") == "num_generations (TRL): num_return_sequences: 8"
    assert line(text, "loss_type") == "loss_type (TRL): loss_agg_mode: seq-mean-token-sum-norm"
    assert line(text, "scale_rewards") == "scale_rewards (TRL): adv_estimator: grpo_no_std"
    assert "kl_loss_coef: 0.04 with kl_coef: 0" in line(text, "beta")
    assert "step_batch_size: 8 * processes * gradient_accumulation_steps" in line(text, "per_device_train_batch_size")
    assert "the policy that is trained must be the one that sampled" in line(text, "top_p")
    assert line(text, "remove_unused_columns").startswith("remove_unused_columns (transformers): not needed: ")
    assert line(text, "learning_rat") == "learning_rat: did you mean learning_rate?"
    assert line(text, "zzz") == "zzz: there is no such name"
    # save_steps is an option in both, in different units. The output folder means the same.
    assert "counts PPO steps" in line(text, "save_steps")
    assert "  output_dir" not in text
    assert text.endswith("translates a TRL script, or a YAML file or command line of verl, as a whole")


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_what_cuts_off_the_sampled_distribution_is_refused_with_the_reason(name):
    assert "the policy that is trained must be the one that sampled" in refusal(PPOConfig, **{name: 0.5})


def test_values_that_are_in_other_units_are_given_in_ours():
    text = explain_names({"missing_eos_penalty": 1.0, "epsilon_high": 0.28, "stop_token_id": 7}, (), CONFIG_SECTIONS)
    assert "penalty_reward_value: -1.0;" in text and "cliprange_high: 0.28;" in text and "truncate_tokens: [7]" in text


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("use_vllm", False, "leave it out: false is what happens here"),
        ("top_p", 1, "leave it out: 1 is what happens here"),
        ("use_vllm", 0, "no counterpart: responses are sampled"),
        ("loss_type", "vespo", "no counterpart: VESPO is not built in"),
        ("loss_type", "new", "loss_agg_mode and policy_loss, for grpo, dapo, bnpo, dr_grpo, cispo, sapo"),
        ("importance_sampling_level", "token", "not needed: it is what happens here"),
        ("kl_penalty", "low_var_kl", "kl_estimator: k3"),
        ("beta", 0.0, "reference: none with kl_coef: 0.0"),
        ("lora.rank", 8, "use_peft: true with lora_r: 8"),
        ("trainer.save_freq", -1, "save_steps: 0"),
        ("trainer.save_freq", 20, "save_steps: 20"),
        ("rollout_is", None, "not needed: it is what happens here"),
    ],
)
def test_each_value_of_a_choice_has_its_own_advice(name, value, advice):
    assert advice in line(explain_names({name: value}, (), CONFIG_SECTIONS), name)


def test_options_of_the_command_line_are_said_to_be_arguments_of_the_trainer_in_a_script():
    text = refusal(PPOConfig, sft_model_path="sft", lora_r=8)
    assert line(text, "sft_model_path").endswith("model_name_or_path: sft (in a script: PPOTrainer(model=...))")
    assert line(text, "lora_r").endswith("(in a script: PPOTrainer(peft_config=...))")
    assert "dropout is off everywhere" in refusal(LoraArguments, use_peft=True, lora_dropout=0.1)


def test_a_typo_without_a_foreign_name_is_not_sent_to_the_translation():
    assert refusal(PPOConfig, sead=1).endswith(" names):\n  sead: did you mean seed?")


def test_required_arguments_that_are_missing_are_named_in_the_same_error():
    class Fitted(PPOConfig):
        def __init__(self, first, second, third=3):
            pass

    text = refusal(Fitted, 1, num_generations=4)
    assert text.splitlines()[-1] == "The arguments second are missing."
    assert refusal(Fitted, 1, 2, num_generations=4).splitlines()[-1].startswith("`alpaca-ppo migrate")


def test_a_subclass_may_have_fields_and_keywords_of_its_own():
    @dataclasses.dataclass(frozen=True)
    class Longer(PPOConfig):
        bonus: float = 1.0

    class Open(PPOConfig):
        def __init__(self, **kwargs):
            object.__setattr__(self, "kept", kwargs)

    assert Longer(bonus=2.0, seed=1).bonus == 2.0
    assert "  bonuss: did you mean bonus?" in refusal(Longer, bonuss=2.0)
    assert Open(num_generations=8).kept == {"num_generations": 8}
    assert list(inspect.signature(Longer).parameters)[-1] == "bonus"
    assert list(inspect.signature(PPOConfig).parameters)[:2] == ["output_dir", "run_name"]
    config = Longer(bonus=3.0)
    assert dataclasses.replace(config, seed=5) == Longer(bonus=3.0, seed=5)
    assert pickle.loads(pickle.dumps(PPOConfig(seed=7))) == PPOConfig(seed=7)


def test_the_keys_of_a_file_are_explained_with_their_whole_path(tmp_path):
    path = tmp_path / "verl.yaml"
    given = {
        "data": {"train_batch_size": 4},
        "critic": {"optim": {"lr": 1e-5}},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2, "fsdp_config": {"param_offload": True}}},
        "gama": 1.0,
    }
    path.write_text(yaml.safe_dump(given))
    text = refusal(parse_args, [PPOConfig], ["--config", str(path)])
    assert text.startswith(f"unknown keys in the --config file {path}: actor_rollout_ref, data, gama; --help-all lists")
    assert line(text, "data.train_batch_size") == "data.train_batch_size (verl): rollout_batch_size: 4"
    advice = "critic_learning_rate: 1e-05 with critic_layout: separate, as verl's critic is"
    assert line(text, "critic.optim.lr").startswith(f"critic.optim.lr (verl): {advice}; a cached one")
    assert "step_batch_size: 2 * num_return_sequences" in line(text, "actor_rollout_ref.actor.ppo_mini_batch_size")
    assert ": not needed: " in line(text, "actor_rollout_ref.actor.fsdp_config.param_offload")
    assert line(text, "gama") == "gama: did you mean gamma?"


def test_unknown_flags_and_hydra_overrides_are_explained():
    argv = ["--seed", "3", "--num_generations", "8", "--max-completion-length=64", "--reward-weights-of", "1", "2"]
    text = refusal(parse_args, [PPOConfig], [*argv, "+data.max_prompt_length=512", "--sed", "4", "stray"])
    assert line(text, "num_generations").endswith("num_return_sequences: 8")
    assert line(text, "max_completion_length").endswith("response_len: 64")
    assert line(text, "data.max_prompt_length").endswith("query_len: 512")
    assert line(text, "reward_weights_of") == "reward_weights_of: did you mean reward_weights?"
    assert line(text, "sed") == "sed: did you mean seed?"
    assert "  stray: there is no such name" in refusal(parse_args, [PPOConfig], ["stray"])


def test_every_entry_of_the_table_says_one_thing_about_options_that_exist():
    for entry in ENTRIES:
        said = [bool(entry.ours), bool(entry.none), bool(entry.unneeded)]
        assert sum(said) == 1, entry
        assert entry.same or entry.how or not entry.ours, entry
        assert set(entry.ours) <= set(OPTIONS), entry
        for here in entry.values.values():
            assert isinstance(here, str) or set(here) <= set(entry.ours), entry
    for section in TRAINER_SECTIONS:
        for entry in foreign_names(section).values():
            assert set(entry.ours) <= TRAINER_ARGUMENTS | set(OPTIONS), entry


def test_a_name_that_is_an_option_here_is_never_said_to_be_missing():
    for section in CONFIG_SECTIONS:
        assert [e.name for e in foreign_names(section).values() if e.name in OPTIONS and (e.none or e.unneeded)] == []


def test_every_value_that_the_table_gives_is_valid():
    registries = {"adv_estimator": ADV_ESTIMATORS, "policy_loss": POLICY_LOSSES}
    registries |= {"kl_estimator": KL_ESTIMATORS, "kl_loss_type": KL_ESTIMATORS}
    valid_names = {"reference": ["none"]} | {name: registry.names for name, registry in registries.items()}
    for entry in ENTRIES:
        for here in entry.values.values():
            for name, value in here.items() if isinstance(here, dict) else ():
                valid = valid_names.get(name) or choices(OPTIONS[name])
                assert value in valid or isinstance(value, int | float), (entry.name, name, value)


def test_options_of_grpo_come_with_its_estimator_and_a_share_with_its_value():
    said = "  adv_estimator: grpo is TRL's GRPOTrainer; without it this is PPO with a critic (gae)"
    text = refusal(PPOConfig, num_generations=8, warmup_ratio=0.1)
    assert said in text.splitlines()
    assert "  warmup_ratio (transformers): warmup_steps: 0.1, which is, below 1, a share of all optimizer steps" in text
    for given in (
        {"num_generations": 8, "adv_estimator": "grpo"},
        {"num_generations": 8, "scale_rewards": "none"},
        {"num_ppo_epochs": 4},
        {"sead": 1},
    ):
        assert said not in refusal(PPOConfig, **given).splitlines(), given
    # A class without that option is told nothing of it.
    assert said not in refusal(LoraArguments, num_generations=8)
