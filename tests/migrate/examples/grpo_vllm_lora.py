# GRPO with vLLM, LoRA, two functions and a reward model, options of argparse, and values that are computed.
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

SYSTEM = "Think first."
GROUP = 16


def correctness(completions, answer, **kwargs):
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-3B-Instruct")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--use_vllm", action="store_true")
    args = parser.parse_args()

    dataset = load_dataset("openai/gsm8k", "main")
    train = dataset["train"].map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    common = dict(bf16=True, max_grad_norm=0.2, report_to=["wandb"])
    config = GRPOConfig(
        output_dir=f"outputs/{args.model}-grpo",
        run_name="gsm8k",
        learning_rate=args.learning_rate,
        adam_beta2=0.99,
        weight_decay=0.1,
        warmup_ratio=0.1,
        lr_scheduler_type="cosine",
        optim="adamw_8bit",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2 * 4,
        steps_per_generation=16,
        num_generations=GROUP,
        max_prompt_length=256,
        max_completion_length=2 * 256 + 256,
        temperature=0.9,
        top_p=0.95,
        beta=0.04,
        epsilon_high=0.28,
        num_iterations=2,
        loss_type="dr_grpo",
        scale_rewards=False,
        mask_truncated_completions=True,
        reward_weights=[1.0, 0.5, 0.2],
        max_steps=250,
        save_steps=50,
        eval_strategy="steps",
        eval_steps=100,
        logging_steps=1,
        log_completions=True,
        model_init_kwargs={"dtype": torch.bfloat16, "attn_implementation": "flash_attention_2"},
        use_vllm=args.use_vllm,
        vllm_mode="colocate",
        remove_unused_columns=False,
        **common,
    )
    config.vllm_gpu_memory_utilization = 0.4
    config.seed = 7
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=[correctness, think_format_reward, "my/reward-model"],
        args=config,
        train_dataset=train,
        eval_dataset=dataset["test"],
        peft_config=LoraConfig(
            r=64, lora_alpha=64, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
