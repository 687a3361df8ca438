"""The cells of `memory_table`: a model with random weights, its batch and a layout; estimated and, if possible, run."""

import gc
import tempfile
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.distributed.held_memory import Sharding
from alpaca_ppo.estimate_memory.estimator import GIB, RESERVE_GIB, predict
from alpaca_ppo.estimate_memory.fake_models import LiveBytes, Models
from alpaca_ppo.ppo import metrics

LARGE = 10**9
"""Number of weights from which a model is not run on a CPU."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
FAMILIES = {
    "llama-112m": ("llama", (768, 2048, 12, 12, 4, 24000)),
    "llama-7b": ("llama", (4096, 11008, 32, 32, 32, 32000)),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 152064)),
}
_SMALL = {"rows": 4, "micro_rows": 2, "query_len": 64, "response_len": 64}
_LARGE = {"rows": 16, "micro_rows": 2, "query_len": 256, "response_len": 256}
_HALF = {"dtype": "bfloat16", "gradient_checkpointing": True}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-112m": {"family": "llama-112m", **_SMALL, "dtype": "float32", "gradient_checkpointing": False},
    "llama-112m-bf16": {"family": "llama-112m", **_SMALL, **_HALF},
    "llama-7b": {"family": "llama-7b", **_LARGE, **_HALF},
    "qwen2.5-7b": {"family": "qwen2.5-7b", **_LARGE, **_HALF},
}
"""The columns. In bfloat16, runs that train all weights keep them in float32 and make their passes in bfloat16."""
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": (
        "all weights train; separate critic, copied reference",
        {"critic_layout": "separate", "reference": "copy"},
    ),
    "full_cached": (
        "all weights train; cached critic, copied reference",
        {"critic_layout": "cached", "reference": "copy"},
    ),
    "separate": (
        "LoRA; separate critic, reference: adapter off",
        {"critic_layout": "separate", "reference": "adapter_off"},
    ),
    "cached": ("LoRA; cached critic, adapter off", {"critic_layout": "cached", "reference": "adapter_off"}),
    "shared": ("LoRA; shared critic, adapter off", {"critic_layout": "shared", "reference": "adapter_off"}),
    "adapter": ("LoRA; critic adapter, adapter off", {"critic_layout": "adapter", "reference": "adapter_off"}),
    "reward": (
        "LoRA; critic adapter, adapter off, reward adapter: four roles on one base",
        {"critic_layout": "adapter", "reference": "adapter_off"},
    ),
}
Cell = dict[str, float | None]


def model_config(column: dict[str, Any]) -> Any:
    """The configuration of the policy, the critic, the reference and the reward model."""
    sizes = {name: column[name] for name in SIZES}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
    return AutoConfig.for_model(FAMILIES[column["family"]][0], **sizes, **special, tie_word_embeddings=False)


def count_weights(column: dict[str, Any]) -> int:
    """Number of weights of the policy."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(model_config(column)).num_parameters())


def tokenizer() -> PreTrainedTokenizerFast:
    """A hundred ids with a word for each; the text does not matter here."""
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{n}" for n in range(96))])}
    model = Tokenizer(WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def adapter(column: dict[str, Any], task_type: str | None) -> LoraConfig:
    """LoRA on every linear layer of the decoder."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(r=column["lora_rank"], target_modules=names, task_type=task_type)


def save_reward_adapter(column: dict[str, Any], folder: str) -> None:
    """Writes a reward adapter with random weights, as train_reward_model.py --use_peft does."""
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(model_config(column))
        peft = get_peft_model(classifier, adapter(column, "SEQ_CLS"))
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(peft).items()}
    peft.peft_config["default"].save_pretrained(folder)
    tensors = {name: torch.randn(shape) / 50 for name, shape in shapes.items()}
    save_file(tensors, f"{folder}/adapter_model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(folder)


def settings(column: dict[str, Any], layout: str, folder: str, *, use_cpu: bool) -> PPOConfig:
    """The configuration of a cell: two steps of one optimizer step each."""
    rows = column["rows"]
    return PPOConfig(
        query_len=column["query_len"],
        response_len=column["response_len"],
        rollout_batch_size=rows,
        rollout_per_device_batch_size=rows,
        step_batch_size=rows,
        step_per_device_batch_size=column["micro_rows"],
        gradient_checkpointing=column["gradient_checkpointing"],
        dtype="float32" if layout.startswith("full") else column["dtype"],
        bf16=layout.startswith("full") and column["dtype"] == "bfloat16",
        reward_adapter=f"{folder}/reward" if layout == "reward" else None,
        output_dir=f"{folder}/run",
        save_steps=0,
        report_to=["none"],
        num_logged_rollouts=0,
        ppo_epochs=1,
        critic_epochs=None,
        total_episodes=2 * rows,
        use_cpu=use_cpu,
        **LAYOUTS[layout][1],
    )


def estimated(column: dict[str, Any], layout: str, args: PPOConfig) -> float:
    """Peak bytes of a cell, as `alpaca_ppo.estimate_memory` estimates them."""
    folder = f"{args.output_dir}-model"
    model_config(column).save_pretrained(folder)
    models = Models(
        folder,
        lora=None if layout.startswith("full") else adapter(column, "CAUSAL_LM"),
        rewards=() if layout == "reward" else (folder,),
    )
    [(phases, _)] = predict(models, args, [Sharding()])
    return max(phase.total for phase in phases)


def measured(column: dict[str, Any], layout: str, args: PPOConfig) -> float:
    """Peak bytes of the second step."""
    torch.manual_seed(0)
    config, dtype = model_config(column), getattr(torch, args.dtype)
    with torch.device("cpu" if args.use_cpu else "cuda"):
        policy = AutoModelForCausalLM.from_config(config, dtype=dtype)
        sources = [] if layout == "reward" else [AutoModelForSequenceClassification.from_config(config, dtype=dtype)]
    prompt = " ".join(f"w{i % 96}" for i in range(args.query_len))
    trainer = PPOTrainer(
        model=policy,
        reward_funcs=sources,
        reward_processing_classes=[tokenizer() for _ in sources],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * (2 * args.rollout_batch_size)),
        processing_class=tokenizer(),
        peft_config=None if layout.startswith("full") else adapter(column, "CAUSAL_LM"),
    )
    del policy, sources
    # The first step creates the optimizer's state, which the second one has from its start.
    trainer.step(trainer.prompt_batches(0))
    return float(_step_peak(trainer))


def _step_peak(trainer: PPOTrainer) -> int:
    gc.collect()
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer.step(trainer.prompt_batches(1))
        return torch.cuda.max_memory_allocated()
    live = LiveBytes()
    # Not isinstance, which would import modules that libraries load lazily.
    live.track([thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)])
    live.reset_peak()
    with live:
        trainer.step(trainer.prompt_batches(1))
    return live.peak


def run_cell(column: dict[str, Any], layout: str) -> Cell:
    """`estimated` and `measured` bytes; the latter is None if there is not enough memory."""
    on_gpu = torch.cuda.is_available()
    # The second step is measured, and a run has its peak in those that compute entropies.
    with tempfile.TemporaryDirectory() as folder, patch.object(metrics, "ENTROPY_STEPS", 1):
        runs_on_cpu = not on_gpu and count_weights(column) < LARGE
        args = settings(column, layout, folder, use_cpu=runs_on_cpu)
        if args.reward_adapter is not None:
            save_reward_adapter(column, args.reward_adapter)
        estimate = estimated(column, layout, args)
        room = torch.cuda.get_device_properties(0).total_memory - RESERVE_GIB * GIB if on_gpu else 0.0
        runs = runs_on_cpu or estimate < room
        return {"estimated": estimate, "measured": measured(column, layout, args) if runs else None}
