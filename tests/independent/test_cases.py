"""The table of configurations covers every name and option: one that the independent PPO does not compute fails."""

import itertools

import pytest

from alpaca_ppo import PPOConfig, registry
from alpaca_ppo.config.fields import options_of
from tests.independent.cases import CASES
from tests.option_types import choices

GROUPS = (
    "Batch sizes and epochs",
    "Generation",
    "Rewards",
    "Advantages",
    "Policy loss",
    "KL to the reference policy",
    "Critic",
    "Optimizer",
)
"""Groups of options that decide what is learned."""
NOT_COMPARED = {
    "generation_backend": "tests/generation compares the samplers",
    **dict.fromkeys(
        ("vllm_python", "vllm_urls", "vllm_args", "vllm_dtype", "vllm_gpu_memory_utilization"),
        "tests/integration/vllm_checks.py compares the samplers",
    ),
    "truncate_after": "tests/generation: the independent PPO takes the sampled tokens",
    "truncate_tokens": "tests/generation",
    "stop_strings": "tests/generation/test_stop_strings.py",
    "reward_adapter": "tests/rewards: the independent PPO scores by functions",
    "init_value_with_reward": "tests/models: the independent PPO takes the critic's weights at the start",
    "max_tokens_per_micro_batch": "changes no update; tests/ppo/test_batch_packing.py and test_properties_trainer.py",
    "max_kl_to_ref": "ends the run; tests/trainer",
    "max_skipped_updates": "allows updates that are not finite; tests/trainer",
    "mismatch_action": "ends the run or warns; tests/trainer/test_mismatch.py",
    "reward_retries": "calls a failing source again; tests/rewards",
    "dynamic_sampling": "which prompts a step learns from; tests/trainer/test_dynamic_sampling.py",
    "turn_gamma": "the independent PPO's responses have no holes; tests/environments/test_two_turn_game.py",
    "turn_lam": "likewise",
    "failed_rewards": "leaves rows out of what is computed; tests/trainer/test_failed_rewards.py",
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """The PPOConfig of each case."""
    folder = tmp_path_factory.mktemp("configs")
    return {
        name: PPOConfig(output_dir=str(folder), report_to=["none"], use_cpu=True, **case.settings())
        for name, case in CASES.items()
    }


def test_there_are_at_least_forty_configurations():
    assert len(CASES) >= 40
    assert {case.family for case in CASES.values()} == {"llama", "gpt2", "gemma3", "mixtral", "qwen2"}


@pytest.mark.parametrize(
    "family", [registry.ADV_ESTIMATORS, registry.KL_ESTIMATORS, registry.POLICY_LOSSES, registry.CRITIC_HEADS],
    ids=lambda family: family.field,
)  # fmt: skip
def test_every_registered_name_has_a_case(configs, family):
    assert {getattr(config, family.field) for config in configs.values()} == set(family.built_in)


def test_every_kl_estimator_that_the_loss_allows_has_a_case(configs):
    allowed = {
        name for name in registry.KL_ESTIMATORS.built_in if not registry.KL_ESTIMATORS.trait(name, "kink_at_zero")
    }
    assert {config.kl_loss_type for config in configs.values() if config.kl_loss_coef} == allowed


def test_every_critic_has_a_case_in_every_layout(configs):
    layouts = {*choices(options_of(PPOConfig)["critic_layout"])} - {"auto"}
    covered = {(config.critic, config.critic_layout) for config in configs.values() if config.uses_critic}
    assert covered == set(itertools.product(registry.CRITIC_HEADS.built_in, layouts))


def test_every_estimator_and_every_way_to_average_has_a_case_with_holes(configs):
    holed = [configs[name] for name, case in CASES.items() if case.holes]
    assert {config.adv_estimator for config in holed} == set(registry.ADV_ESTIMATORS.built_in)
    assert {config.loss_agg_mode for config in holed} == set(choices(options_of(PPOConfig)["loss_agg_mode"]))


def test_every_option_that_decides_what_is_learned_has_cases_with_different_values(configs):
    options = [option for option in options_of(PPOConfig).values() if option.group in GROUPS]
    assert {option.group for option in options} == set(GROUPS)
    assert set(NOT_COMPARED) <= {option.name for option in options}
    for option in options:
        if option.name in NOT_COMPARED:
            continue
        values = {repr(getattr(config, option.name)) for config in configs.values()}
        assert len(values) > 1, f"no case changes {option.name}; add one, and compute it in the independent PPO"
        # The schedules are transformers' own; two show that the rate follows the one that is named.
        every = {*choices(option)} if option.name != "lr_scheduler_type" else set()
        if option.name == "critic_layout":
            # It stands for one of the others, or the case has no critic.
            every, values = every - {"auto"}, values - {"'auto'"}
        assert not every or values == {repr(choice) for choice in every}, option.name
