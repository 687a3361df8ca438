"""Estimates the memory of `alpaca-ppo sft` and `reward`: one micro-batch forward and backward, over fake tensors."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainingArguments

from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.script_arguments import DeviceArguments, SupervisedLoraArguments
from alpaca_ppo.config.supervised_arguments import SFTArguments, SupervisedArguments
from alpaca_ppo.distributed.held_memory import PhaseMemory
from alpaca_ppo.estimate_memory.estimator import on_device
from alpaca_ppo.estimate_memory.fake_models import LiveBytes, fake_runs, make_fake, size_of, without_weights
from alpaca_ppo.estimate_memory.passes import bytes_saved_by_four_bit
from alpaca_ppo.supervised.run import with_adapter

# Torch's AdamW, which keeps two moments of each trained weight, in the weight's own type.
_ADAMW = ("adamw_torch", "adamw_torch_fused")


def estimate_training(
    device: DeviceArguments, arguments: SupervisedArguments, lora: SupervisedLoraArguments, training: TrainingArguments
) -> dict[str, Any]:
    """The estimate as `--json` prints it, in bytes, of one device that shards nothing: `model`, `phases`, `peak` and
    `peak_phase`, and what `on_device` returns. The peak is that of the backward pass, every row as long as
    `max_length`.

    Raises:
        ValueError: for an optimizer other than torch's AdamW; when the model cannot run on fake tensors.
    """
    if training.optim not in _ADAMW:
        remedy = f"set it to {' or '.join(_ADAMW)}"
        raise ValueError(f"optim is {training.optim.value!r}, whose memory is not known; {remedy}")
    writes_text = isinstance(arguments, SFTArguments)
    name = model_folder("model_name_or_path", arguments.model_name_or_path, writes_text=writes_text)
    rows = training.per_device_train_batch_size * (1 if writes_text else 2)
    auto_class = AutoModelForCausalLM if writes_text else AutoModelForSequenceClassification
    with fake_runs(name):
        with torch.device("meta"):
            model: Any = without_weights(auto_class, name, trust_remote_code=False, dtype=getattr(torch, lora.dtype))
            model = with_adapter(model, lora, "CAUSAL_LM" if writes_text else "SEQ_CLS").train()
        if training.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        live = LiveBytes()
        make_fake([model], mode := FakeTensorMode(allow_non_fake_inputs=True))
        with mode, live:
            live.track([*model.parameters(), *model.buffers()])
            weights, held = size_of([*model.parameters(), *model.buffers()]), live.live
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            ids = torch.zeros(rows, arguments.max_length, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=training.bf16):
                labels = ids if writes_text else None
                output = model(input_ids=ids, attention_mask=ids + 1, use_cache=False, labels=labels)
                loss: Tensor = output.loss if writes_text else output.logits.float().sum()
            loss.backward()
        activations = live.peak - held - size_of(trained)
        if lora.load_in_4bit:
            weights -= bytes_saved_by_four_bit(model, model.get_output_embeddings())
    phase = PhaseMemory("backward", weights, size_of(trained), 2 * size_of(trained), activations)
    result = {"model": arguments.model_name_or_path, "peak": phase.total, "peak_phase": phase.phase}
    result["phases"] = [{**asdict(phase), "total": phase.total}]
    return result | on_device(phase.total, device.device_gib, use_cpu=False)
