"""Every field of TRL's configurations and every key of verl's ppo_trainer.yaml is in the table of names.

The names are listed here, as TRL 1.12, transformers 5 and verl 0.9 and before have them.
"""

import re

import pytest

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, find_foreign_name

GRPO = """
model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
num_generations_eval max_completion_length shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta
epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
"""
PPO = """
dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size num_sample_generations response_length
stop_token stop_token_id temperature missing_eos_penalty sft_model_path world_size num_total_batches micro_batch_size
local_batch_size batch_size local_mini_batch_size mini_batch_size reward_model_path model_adapter_name ref_adapter_name
num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam
"""
TRAINING_ARGUMENTS = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy
logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token
hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names train_sampling_strategy length_column_name ddp_find_unused_parameters
ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
"""
SCRIPT_CLASSES = """
model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout lora_target_modules
lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit
bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name dataset_config dataset_train_split
dataset_test_split dataset_streaming ignore_bias_buffers datasets streaming test_split_size reward_model_name_or_path
reward_funcs
"""
CONSTRUCTORS = "reward_model data_collator quantization_config tools rollout_func environment_factory"
VERL = """
data.{tokenizer,use_shm,train_files,val_files,train_max_samples,val_max_samples,prompt_key,reward_fn_key}
data.{max_prompt_length,max_response_length,train_batch_size,gen_batch_size,val_batch_size,tool_config_path}
data.{function_tool_path,return_raw_input_ids,return_raw_chat,return_full_prompt,shuffle,seed,dataloader_num_workers}
data.{image_patch_size,validation_shuffle,filter_overlong_prompts,filter_overlong_prompts_workers,truncation,image_key}
data.{video_key,audio_key,trust_remote_code,custom_cls.path,custom_cls.name,return_multi_modal_inputs}
data.{apply_chat_template_kwargs,mm_processor_kwargs}
actor_rollout_ref.{hybrid_engine,nccl_timeout}
actor_rollout_ref.model.{path,hf_config_path,tokenizer_path,use_shm,trust_remote_code,custom_chat_template,external_lib}
actor_rollout_ref.model.{override_config,override_config.attn_implementation,override_config.model_config}
actor_rollout_ref.model.{override_config.moe_config.freeze_moe_router,enable_gradient_checkpointing}
actor_rollout_ref.model.{enable_activation_offload,use_remove_padding,lora_rank,lora_alpha,target_modules}
actor_rollout_ref.model.{exclude_modules,lora_adapter_path,use_liger,use_fused_kernels,tiled_mlp.enabled}
actor_rollout_ref.model.{fused_kernel_options.impl_backend,tiled_mlp.num_shards,mtp.enable,mtp.method,lora.type}
actor_rollout_ref.model.{lora.merge,lora.rank,lora.alpha,lora.dropout,lora.target_modules,lora.dtype}
actor_rollout_ref.actor.{strategy,ppo_mini_batch_size,ppo_micro_batch_size,ppo_micro_batch_size_per_gpu,rollout_n}
actor_rollout_ref.actor.{use_dynamic_bsz,ppo_max_token_len_per_gpu,clip_ratio,clip_ratio_low,clip_ratio_high,tau_pos}
actor_rollout_ref.actor.{tau_neg,freeze_vision_tower,clip_ratio_c,loss_agg_mode,loss_scale_factor,entropy_coeff}
actor_rollout_ref.actor.{calculate_entropy,calculate_sum_pi_squared,use_kl_loss,use_prefix_grouper,use_torch_compile}
actor_rollout_ref.actor.{kl_loss_coef,kl_loss_type,ppo_epochs,shuffle,data_loader_seed,use_fused_kernels,grad_clip}
actor_rollout_ref.actor.{ulysses_sequence_parallel_size,entropy_from_logits_with_chunking,entropy_checkpointing}
actor_rollout_ref.actor.{entropy_from_logits_chunk_size,pad_to_length,use_remove_padding,checkpoint.contents}
actor_rollout_ref.actor.{checkpoint.save_contents,checkpoint.load_contents,checkpoint.async_save,checkpoint.strict}
actor_rollout_ref.actor.{router_replay.mode,router_replay.record_file,qat.enable,qat.mode,profiler.enable}
actor_rollout_ref.actor.policy_loss.{loss_mode,clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef,dro_beta}
actor_rollout_ref.actor.rollout_correction.{rollout_is,rollout_is_threshold,rollout_rs,rollout_rs_threshold}
actor_rollout_ref.actor.optim.{lr,lr_warmup_steps,lr_warmup_steps_ratio,min_lr_ratio,num_cycles,lr_scheduler_type}
actor_rollout_ref.actor.optim.{warmup_style,total_training_steps,weight_decay,betas,clip_grad,optimizer,optimizer_impl}
actor_rollout_ref.actor.optim.{zero_indexed_step,override_optimizer_config,lr_decay_steps,lr_decay_style,min_lr}
actor_rollout_ref.actor.optim.{lr_warmup_init,weight_decay_incr_style,lr_wsd_decay_style,lr_wsd_decay_steps}
actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler
actor_rollout_ref.actor.fsdp_config.{wrap_policy.min_num_params,param_offload,optimizer_offload,offload_policy,fsdp_size}
actor_rollout_ref.actor.fsdp_config.{reshard_after_forward,forward_prefetch,model_dtype,use_orig_params,seed,dtype}
actor_rollout_ref.actor.fsdp_config.{grad_offload,full_determinism,strategy,qat.enable,turbo_config.distributed.x}
actor_rollout_ref.ref.{strategy,rollout_n,use_torch_compile,log_prob_micro_batch_size,log_prob_use_dynamic_bsz}
actor_rollout_ref.ref.{log_prob_micro_batch_size_per_gpu,log_prob_max_token_len_per_gpu,ulysses_sequence_parallel_size}
actor_rollout_ref.ref.{fsdp_config.param_offload,profiler.enable,router_replay.mode,entropy_checkpointing,pad_to_length}
actor_rollout_ref.ref.{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size}
actor_rollout_ref.rollout.{name,mode,nnodes,n_gpus_per_node,temperature,top_k,top_p,full_determinism,seed,prompt_length}
actor_rollout_ref.rollout.{response_length,dtype,gpu_memory_utilization,ignore_eos,enforce_eager,free_cache_engine}
actor_rollout_ref.rollout.{cudagraph_capture_sizes,tensor_model_parallel_size,data_parallel_size,expert_parallel_size}
actor_rollout_ref.rollout.{pipeline_model_parallel_size,max_num_batched_tokens,max_model_len,max_num_seqs}
actor_rollout_ref.rollout.{enable_chunked_prefill,enable_prefix_caching,logprobs_mode,scheduling_policy,load_format}
actor_rollout_ref.rollout.{layered_summon,log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,do_sample,n}
actor_rollout_ref.rollout.{log_prob_use_dynamic_bsz,log_prob_max_token_len_per_gpu,disable_log_stats,over_sample_rate}
actor_rollout_ref.rollout.{multi_stage_wake_up,engine_kwargs.vllm,engine_kwargs.sglang,calculate_log_probs,micro_batch_size}
actor_rollout_ref.rollout.val_kwargs.{top_k,top_p,temperature,n,do_sample}
actor_rollout_ref.rollout.multi_turn.{enable,max_assistant_turns,tool_config_path,function_tool_path,max_user_turns,format}
actor_rollout_ref.rollout.{agent.num_workers,agent.default_agent_loop,agent.agent_loop_config_path,quantization}
actor_rollout_ref.rollout.{agent.custom_async_server.path,checkpoint_engine.backend,trace.backend,skip_tokenizer_init}
actor_rollout_ref.rollout.{enable_rollout_routing_replay,moe_load_balance_metrics_interval,profiler.enable,mtp,qat}
actor_rollout_ref.rollout.{prometheus.enable,quantization_config_file,disaggregation.enabled}
critic.{strategy,enable,rollout_n,ppo_mini_batch_size,ppo_micro_batch_size,ppo_micro_batch_size_per_gpu,use_dynamic_bsz}
critic.{ppo_max_token_len_per_gpu,forward_max_token_len_per_gpu,ppo_epochs,shuffle,data_loader_seed,cliprange_value}
critic.{loss_agg_mode,loss_scale_factor,forward_micro_batch_size,forward_micro_batch_size_per_gpu,grad_clip}
critic.{ulysses_sequence_parallel_size,checkpoint.save_contents,profiler.enable,fsdp.param_offload,model.path}
critic.{model.enable_gradient_checkpointing,model.fsdp_config.param_offload,model.use_remove_padding,model.lora_rank}
critic.optim.{lr,lr_warmup_steps,lr_warmup_steps_ratio,lr_scheduler_type,warmup_style,weight_decay,betas,clip_grad}
critic.optim.{min_lr_ratio,num_cycles,optimizer,optimizer_impl,override_optimizer_config,total_training_steps}
critic.optim.zero_indexed_step
custom_reward_function.{path,name} reward.custom_reward_function.{path,name}
reward_model.{enable,micro_batch_size,micro_batch_size_per_gpu,max_length,reward_manager,num_workers,nnodes}
reward_model.{enable_resource_pool,n_gpus_per_node,reward_loop_source,reward_loop_module_path,reward_loop_class_name}
reward_model.{model.path,model.input_tokenizer,model.external_lib,model.trust_remote_code,model.fsdp_config.param_offload}
reward_model.{rollout.name,overlong_buffer.enable,overlong_buffer.len,overlong_buffer.penalty_factor,overlong_buffer.log}
reward.{num_workers,reward_manager.name,reward_manager.source,reward_model.enable,reward_model.model_path}
reward.{reward_model.rollout.name,sandbox_fusion.url,reward_model.n_gpus_per_node} sandbox_fusion.{url,memory_limit_mb}
algorithm.{gamma,lam,adv_estimator,norm_adv_by_std_in_grpo,use_kl_in_reward,kl_penalty,use_pf_ppo,pf_ppo.weight_pow}
algorithm.{pf_ppo.reweight_method,kl_ctrl.type,kl_ctrl.kl_coef,kl_ctrl.horizon,kl_ctrl.target_kl}
algorithm.filter_groups.{enable,metric,max_num_gen_batches,max_inflight_gen_batches}
algorithm.rollout_correction.{rollout_is,rollout_is_threshold,rollout_rs,rollout_rs_threshold,bypass_mode,loss_type}
algorithm.rollout_correction.rollout_is_batch_normalize
distillation.{enabled,n_gpus_per_node,distillation_loss.loss_mode} transfer_queue.{enable,metrics.port}
trainer.{balance_batch,total_epochs,total_training_steps,project_name,experiment_name,logger,log_val_generations}
trainer.{rollout_data_dir,validation_data_dir,nnodes,n_gpus_per_node,save_freq,esi_redundant_time,resume_mode}
trainer.{resume_from_path,val_before_train,val_only,test_freq,critic_warmup,default_hdfs_dir,default_local_dir}
trainer.{del_local_ckpt_after_load,remove_previous_ckpt_in_save,max_actor_ckpt_to_keep,max_critic_ckpt_to_keep}
trainer.{ray_wait_register_center_timeout,device,use_v1,v1.trainer_mode,v1.sampler.max_off_policy_threshold}
global_profiler.{tool,steps,save_path} skip.rollout.enable ray_kwargs.{ray_init.num_cpus,timeline_json_file}
"""


def expanded(text: str) -> list[str]:
    """The words of `text`, with `a.{b,c}` written out."""
    names = []
    for word in text.split():
        head, brace, tail = word.partition("{")
        names += [head + part for part in tail.removesuffix("}").split(",")] if brace else [word]
    return names


@pytest.mark.parametrize(
    ("names", "sections"),
    [
        (GRPO, ["GRPOConfig"]),
        (PPO, ["PPOConfig", "GRPOConfig"]),
        (TRAINING_ARGUMENTS, ["TrainingArguments"]),
        (SCRIPT_CLASSES, ["ModelConfig"]),
        (CONSTRUCTORS, TRAINER_SECTIONS),
    ],
)
def test_every_name_of_trl_is_in_the_table(names, sections):
    assert [name for name in expanded(names) if find_foreign_name(name, sections) is None] == []


def test_every_key_of_verl_is_in_the_table_with_its_whole_path():
    found = {key: find_foreign_name(key, ["ppo_trainer.yaml"]) for key in expanded(VERL)}
    assert len(found) > 300
    assert [key for key, entry in found.items() if entry is None] == []
    # Found by its own path or a part of it, not by the last word of another key.
    foreign = [key for key, entry in found.items() if entry and key.split(".")[0] != entry.name.split(".")[0]]
    assert foreign == []


def test_a_name_that_nobody_has_is_not_found():
    assert find_foreign_name("num_generation", CONFIG_SECTIONS) is None
    assert find_foreign_name("data.nothing", CONFIG_SECTIONS) is None
    assert re.fullmatch(r"actor_rollout_ref.*", find_foreign_name("ppo_epochs", ["ppo_trainer.yaml"]).name)
