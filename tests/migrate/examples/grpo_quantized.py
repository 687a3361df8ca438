# GRPO on a 4-bit base: the dataset comes as a pair and is assigned again, one entry of a mapping is an object.
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward


def shortness(completions, **columns):
    return [-len(text) for text in completions]


def main():
    train, held_out = load_dataset("org/problems", split=["train[:5%]", "test[:5%]"])
    train = train.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
    train = train.remove_columns(["problem"])
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    config = GRPOConfig(
        output_dir="short",
        num_train_epochs=1,
        max_steps=500,
        gradient_accumulation_steps=2,
        num_generations=4,
        use_vllm=True,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        chat_template_kwargs={"enable_thinking": False},
        eval_strategy="steps",
        model_init_kwargs=dict(
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            quantization_config=quantization,
            device_map=torch.device("cuda", torch.cuda.device_count() - 1),
        ),
    )
    trainer = GRPOTrainer(
        model="org/model",
        reward_funcs=[shortness, accuracy_reward],
        args=config,
        train_dataset=train,
        eval_dataset=list(held_out),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )
    trainer.train()


main()
