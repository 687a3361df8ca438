# GRPO with vLLM, LoRA, two functions and a reward model, options of argparse, and values that are computed.
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

GROUP = 16
SCHEDULE = "linear"
SCHEDULE = SCHEDULE.replace("linear", "cosine")


def correctness(completions, answer, **kwargs):
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2.5-3B-Instruct")
args = parser.parse_args()

dataset = load_dataset("openai/gsm8k", "main", split="train")
train = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
config = GRPOConfig(
    f"outputs/{args.model}-grpo",
    warmup_ratio=0.1,
    lr_scheduler_type=SCHEDULE,
    optim="adamw_8bit",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2 * 4,
    steps_per_generation=16,
    num_generations=GROUP,
    max_prompt_length=256,
    max_completion_length=2 * 256 + 256,
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
    chat_template_kwargs={"enable_thinking": False},
    model_init_kwargs={"dtype": torch.bfloat16, "attn_implementation": "flash_attention_2"},
    use_vllm=True,
    seed=7,
    bf16=True,
    max_grad_norm=0.2,
    report_to=["wandb"],
)
rewards = [correctness, think_format_reward, "my/reward-model"]
peft_config = LoraConfig(r=64, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = GRPOTrainer(args.model, rewards, config, train_dataset=train, peft_config=peft_config, tools=[len])
trainer.train()
