"""One table: for every option of a run, the test in which something else is observed when it is set.

The options that decide what is learned are compared with the independent PPO (`tests/independent/test_cases.py` asks
for a case of each). Of the others, the table names the file; what no file showed is shown here.
"""

from pathlib import Path

import pytest
from datasets import Dataset

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.trainer.setup import make_prompts
from tests.independent.test_cases import GROUPS, NOT_COMPARED
from tests.tiny_models import tiny_tokenizer

TESTS = Path(__file__).parents[1]
SHOWN = """
checkpoint/test_best_at_end.py: greater_is_better load_best_model_at_end metric_for_best_model save_steps
checkpoint/test_directory.py: output_dir overwrite_output_dir resume_from_checkpoint
checkpoint/test_hub.py: hub_model_id push_to_hub
checkpoint/test_identity.py: ignore_changes
checkpoint/test_manager.py: save_total_limit
cli/test_commands.py: import_modules
cli/test_evaluate.py: eval_dataset_name eval_datasets metric_funcs
cli/test_models.py: dataset_name lora_r model_name_or_path
adapters/test_adapter_set.py: load_in_4bit lora_alpha lora_target_modules
adapters/test_all_linear.py: use_peft
adapters/test_adapters_of_earlier.py: reward_adapter
config/test_every_option.py: overlong_prompts query_len
data/test_prompts.py: prompt_column prompt_template
data/test_prompt_options.py: chat_template_kwargs
data/test_schedule.py: total_epochs
distributed/test_deepspeed_config.py: bf16 deepspeed use_cpu
environments/test_command.py: environments tool_call_parser tools
environments/test_episodes.py: tool_timeout
environments/test_games.py: max_turn_tokens max_turns
environments/test_two_turn_game.py: turn_gamma turn_lam
examples/test_train_ppo.py: dataset_config dataset_test_split reward_model_name_or_path trust_remote_code
examples/test_long_horizon.py: value_model_name_or_path
generation/test_generate.py: generation_backend truncate_after
generation/test_stop_strings.py: stop_strings truncate_tokens
models/test_loading_arguments.py: model_init_kwargs
models/test_trial.py: padding_free
ppo/test_updates.py: max_tokens_per_micro_batch
tracking/test_console.py: logging_steps
tracking/test_run_log.py: run_name report_to
trainer/test_algorithms.py: max_kl_to_ref
trainer/test_dynamic_sampling.py: dynamic_sampling
trainer/test_entropies.py: entropy_logging_steps
trainer/test_evaluation.py: eval_answer_func eval_best_of_by eval_judge eval_num_samples eval_opponent eval_steps
trainer/test_evaluation.py: eval_success_above eval_success_by eval_temperature eval_top_k eval_top_p
trainer/test_failed_rewards.py: failed_rewards reward_retries
trainer/test_inspected_prompts.py: num_inspected_prompts num_logged_rollouts
trainer/test_mismatch.py: mismatch_action
trainer/test_ppo_trainer.py: init_value_with_reward seed
trainer/test_remote_rewards.py: reward_url reward_url_timeout
trainer/test_run_doctor.py: stop_on
trainer/test_setup.py: ddp_timeout
trainer/test_skipped_updates.py: max_skipped_updates
adapters/test_adapter_runs.py: dtype gradient_checkpointing reference
environments/test_games.py: max_steps
cli/test_evaluate.py: reward_funcs
checkpoint/test_model_card.py: report
checkpoint/test_compatibility.py: total_episodes
"""
NOT_SHOWN = {"dataset_train_split", "logprob_chunk_size", "report_token_mb"}
"""Options that no test would miss: to be shown, or to go."""
FILES = {
    name: file for line in SHOWN.split("\n") if line for file, names in [line.split(": ")] for name in names.split()
}


def options() -> dict[str, str]:
    """The group of every option of a run, by name."""
    return {
        name: option.group
        for cls in (PPOConfig, ScriptArguments, LoraArguments)
        for name, option in options_of(cls).items()
    }


def test_the_table_is_complete_and_every_option_stands_in_the_file_that_it_names():
    missing = {
        name
        for name, group in options().items()
        if (group not in GROUPS or name in NOT_COMPARED) and name not in FILES and name not in NOT_SHOWN
    }
    assert missing == set()
    gone = {name for name, file in FILES.items() if name in options() and not (TESTS / file).is_file()}
    assert gone == set()
    assert [n for n, f in FILES.items() if n in options() and n not in (TESTS / f).read_text(encoding="utf-8")] == []


def test_there_are_at_most_125_options():
    # Six more go with their features: entropy_logging_steps, report_token_mb, eval_success_by, eval_answer_func,
    # eval_best_of_by and rollout_correction_normalize.
    assert len(options_of(PPOConfig)) <= 131


ROWS = [{"prompt": "w10 w11 w12"}, {"prompt": "w10"}]


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({"query_len": 3}, [3, 1]),
        ({"query_len": 2}, [1]),
        ({"query_len": 2, "overlong_prompts": "truncate"}, [2, 1]),
    ],
)
def test_overlong_prompts_are_dropped_cut_or_an_error(settings, lengths):
    prompts = make_prompts(Dataset.from_list(ROWS), tiny_tokenizer(), PPOConfig(**settings))
    assert [len(prompts[i]["input_ids"]) for i in range(len(prompts))] == lengths


def test_an_overlong_prompt_may_be_an_error():
    with pytest.raises(ValueError, match="query_len"):
        make_prompts(Dataset.from_list(ROWS), tiny_tokenizer(), PPOConfig(query_len=2, overlong_prompts="error"))
