"""One table: for every option of a run, the test in which something else is observed when it is set.

The options that decide what is learned are compared with the independent PPO (`tests/independent/test_cases.py` asks
for a case of each). `make cut-options` cuts the wiring of one option after the other, and its tests must fail.
"""

from pathlib import Path

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.config.fields import options_of
from tests.independent.cases import CASES
from tests.independent.test_cases import GROUPS, NOT_COMPARED

TESTS = Path(__file__).parents[1]
SHOWN = """
adapters/test_adapter_runs.py
  test_what_cannot_be_is_refused_with_the_remedy: load_in_4bit
  test_without_a_reference_there_is_no_kl: reference
  test_half_precision_bases_train_adapters_and_heads_in_float32: dtype
  test_recomputing_saves_activations_of_every_backbone: gradient_checkpointing
adapters/test_adapters_of_earlier.py
  test_a_second_trainer_of_the_same_model_makes_its_own_adapters_anew: reward_adapter
adapters/test_all_linear.py
  test_every_linear_layer_but_the_head_gets_an_adapter: use_peft
checkpoint/test_best_at_end.py
  test_the_best_checkpoint_is_what_trainer_and_final_hold: load_best_model_at_end metric_for_best_model save_steps
checkpoint/test_compatibility.py
  test_a_refused_start_leaves_what_a_live_run_is_writing: total_episodes
checkpoint/test_hub.py
  test_the_policy_is_uploaded_on_request_and_at_the_end: hub_model_id
checkpoint/test_identity.py
  test_other_rewards_go_on_where_that_is_asked_for: ignore_changes
checkpoint/test_manager.py
  test_the_newest_and_the_best_stay: greater_is_better save_total_limit
cli/test_evaluate.py
  test_a_finished_run_is_evaluated_with_its_own_configuration: eval_dataset_name reward_funcs
  test_the_answers_of_one_evaluation_are_the_opponent_of_another_and_each_set_is_measured: eval_datasets metric_funcs
cli/test_models.py
  test_a_model_of_the_users_choice_is_the_reference: dataset_name model_name_or_path
config/test_option_effects.py
  test_overlong_prompts_are_dropped_cut_or_an_error: overlong_prompts query_len
  test_a_run_is_recorded_in_its_folder_under_its_name_and_replaces_another_only_if_told:
    output_dir overwrite_output_dir run_name
  test_an_option_changes_what_a_run_does:
    eval_top_k eval_top_p generation_backend logprob_chunk_size num_logged_rollouts padding_free
    max_steps prompt_template report response_len rollout_per_device_batch_size step_per_device_batch_size total_epochs
  test_prompts_come_from_the_column_that_is_named: prompt_column
  test_columns_become_the_messages_of_system_and_user: system_prompt user_template
  test_the_chat_template_gets_the_arguments_of_the_run: chat_template_kwargs
  test_bf16_computes_in_half_precision_and_keeps_the_weights: bf16
  test_the_command_takes_critic_and_prompts_from_where_it_is_told: dataset_train_split value_model_name_or_path
  test_the_command_makes_adapters_as_it_is_told: lora_alpha lora_r lora_target_modules
  test_a_micro_batch_has_at_most_as_many_tokens_as_it_may: max_tokens_per_micro_batch
  test_a_reward_function_that_has_raised_is_called_again: reward_retries
  test_a_call_that_hangs_ends_the_run_after_the_time_that_it_may_take: tool_timeout
config/test_parser.py
  test_imported_modules_register_names_for_the_file_and_the_flags: import_modules
distributed/test_deepspeed_config.py
  test_use_cpu_is_refused_where_deepspeed_would_take_a_gpu: use_cpu
  test_a_file_beside_an_accelerator_of_one_s_own_is_refused: deepspeed
distributed/test_fsdp.py
  test_the_option_shards_the_models_of_several_processes: fsdp
environments/test_command.py
  test_a_run_without_a_dataset_is_repeated_and_its_policy_evaluated: environments
  test_what_names_do_not_fit_is_said: tool_call_parser tools
environments/test_control_tokens.py
  test_the_option_says_whose_text_may_write_control_tokens: control_tokens_from
environments/test_games.py
  test_an_episode_of_too_many_turns_is_truncated: max_turns
  test_an_episode_alternates_turns_and_holes_and_its_rewards_stand_on_the_turns_last_tokens: max_turn_tokens
environments/test_two_turn_game.py
  test_returns_discount_between_the_turns: turn_gamma turn_lam
examples/test_train_ppo.py
  test_trust_in_remote_code_reaches_every_model_and_tokenizer: trust_remote_code
  test_the_script_trains_evaluates_saves_and_resumes: resume_from_checkpoint reward_model_name_or_path
  test_each_dataset_is_read_with_its_own_configuration: dataset_config dataset_test_split
generation/test_stop_strings.py
  test_a_run_ends_its_responses_at_stop_strings: stop_strings
generation/test_vllm.py
  test_a_row_s_tokens_depend_on_its_key_alone_on_one_server_or_three: vllm_urls
  test_weights_are_written_in_the_server_s_dtype: vllm_dtype
generation/test_vllm_process.py
  test_a_server_is_started_on_the_weights_and_listens_on_a_socket_alone:
    vllm_args vllm_gpu_memory_utilization vllm_python
models/test_loading_arguments.py
  test_every_model_that_the_run_loads_gets_them: model_init_kwargs
ppo/test_update_plan.py
  test_an_update_takes_the_critics_steps_and_then_the_policys: critic_step_batch_size
tracking/test_console.py
  test_a_run_says_what_happens_and_nothing_else: logging_steps
tracking/test_run_log.py
  test_another_tracker_gets_the_runs_name_configuration_and_metrics: report_to
trainer/test_algorithms.py
  test_a_run_ends_with_a_checkpoint_where_the_kl_passes_its_bound: max_kl_to_ref
  test_a_run_ends_where_a_score_is_reached_and_says_why: stop_at
trainer/test_distillation.py
  test_its_log_probs_are_those_of_its_model_at_the_run_s_temperature: teacher_model_name_or_path teacher_offloaded
  test_what_a_teacher_cannot_be_is_said_before_the_run: teacher_coef teacher_dtype
trainer/test_dynamic_sampling.py
  test_prompts_whose_raw_scores_are_equal_give_their_places_to_the_next_ones: dynamic_sampling
trainer/test_evaluation.py
  test_the_best_checkpoint_may_be_chosen_by_a_metric_of_a_named_set: eval_steps
  test_named_sets_with_several_samples_have_metrics_and_tables_of_their_own:
    eval_num_samples eval_success_above eval_temperature
  test_the_reward_adapter_is_a_score_too: eval_success_by
  test_a_function_compares_with_a_column_and_a_metric_with_a_file: eval_judge eval_opponent
trainer/test_failed_rewards.py
  test_the_rollouts_keep_every_response_and_say_which_are_learned_from: failed_rewards
trainer/test_inspected_prompts.py
  test_training_prompts_are_followed_greedily_and_without_a_score: num_inspected_prompts
trainer/test_mismatch.py
  test_another_sampler_ends_the_run_unless_its_weights_are_corrected_or_the_user_says_otherwise: mismatch_action
trainer/test_ppo_trainer.py
  test_the_same_seed_gives_the_same_run_and_another_seed_another: seed
  test_a_critic_started_from_the_reward_model_predicts_its_score: init_value_with_reward
trainer/test_remote_rewards.py
  test_options_name_one_source_after_the_others_and_run_yaml_has_no_credential: reward_url reward_url_timeout
trainer/test_run_doctor.py
  test_a_constant_reward_ends_the_run_with_a_checkpoint: stop_on
trainer/test_setup.py
  test_a_turn_end_that_the_user_or_the_model_names_is_left_to_them: truncate_after truncate_tokens
  test_processes_wait_for_one_another_as_long_as_ddp_timeout_says: ddp_timeout
trainer/test_skipped_updates.py
  test_a_skipped_update_leaves_no_trace_but_its_record: max_skipped_updates
"""
"""Files, their tests, and the options that each shows."""


def shown_in() -> dict[str, str]:
    """The test (`file::function`) that shows each option."""
    found, file, test = {}, "", ""
    for word in SHOWN.split():
        if word.endswith(".py"):
            file = word
        elif word.endswith(":"):
            test = word[:-1]
        else:
            found[word] = f"tests/{file}::{test}"
    return found


def noticed_by() -> dict[str, list[str]]:
    """The tests of every option of a run, by its name: the cases of the independent PPO, or the one that the table
    names.
    """
    compared, table = (
        "tests/independent/test_ppo_step.py::test_the_trainer_learns_what_an_independent_ppo_learns",
        shown_in(),
    )
    default, found = PPOConfig(), {}
    settings = {n: case.settings() for n, case in CASES.items()}
    for name in options_of(PPOConfig) | options_of(ScriptArguments) | options_of(LoraArguments):
        usual = getattr(default, name, None)
        cases = [n for n, given in settings.items() if given.get(name, usual) != usual]
        found[name] = [table[name]] if name in table else [f"{compared}[{case}]" for case in cases]
    return found


def test_every_option_has_a_test_which_exists():
    names = {
        name
        for cls in (PPOConfig, ScriptArguments, LoraArguments)
        for name, option in options_of(cls).items()
        if option.group not in GROUPS or name in NOT_COMPARED
    }
    table = shown_in()
    assert names <= table.keys() and table.keys() <= noticed_by().keys()
    for named in set(table.values()):
        file, test = named.split("::")
        assert f"\ndef {test}(" in (TESTS.parent / file).read_text(encoding="utf-8"), named
