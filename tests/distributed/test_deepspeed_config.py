"""The DeepSpeed configuration before there is an engine: which entries a run fills in, and which it refuses by name."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

from alpaca_ppo.distributed import deepspeed_config
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.distributed.deepspeed_config import check_four_bit, deepspeed_plugin, resolve_auto
from alpaca_ppo.distributed.deepspeed_engine import DeepSpeedEngine
from tests.tiny_runs import tiny_config, tiny_trainer

# 12 rows in an optimizer step: 3 micro-batches of 2 on each of 2 processes.
SIZES = {"rollout_batch_size": 12, "step_batch_size": 12, "step_per_device_batch_size": 2, "max_grad_norm": 0.5}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def resolved(config, **settings):
    return resolve_auto(config, tiny_config("unused", **SIZES, **settings), processes=2, hidden_size=32)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes configuration files, in a process that looks as if a launcher had started it."""
    monkeypatch.setenv("LOCAL_RANK", "0")

    def write(text: str) -> str:
        (tmp_path / "zero.json").write_bytes(text.encode("latin-1"))
        return str(tmp_path / "zero.json")

    return write


def plugin_of(path, **settings):
    return deepspeed_plugin(tiny_config("unused", deepspeed=path, **settings))


def test_what_is_auto_or_absent_is_filled_from_the_run():
    config = resolved(AUTO)
    assert config["gradient_accumulation_steps"] == 3
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["train_batch_size"] == 12
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": False, "check_grad_overflow": False}
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_bucket_size"] == 1024
    assert zero["stage3_prefetch_bucket_size"] == 921 and zero["stage3_param_persistence_threshold"] == 320
    absent = resolved({"zero_optimization": {"stage": 3}})
    assert absent["gradient_clipping"] == 0.5 and absent["zero_optimization"] == {"stage": 3}
    # Resolving twice changes nothing.
    assert resolved(config) == config
    named = resolved({"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}})
    assert named["zero_optimization"]["reduce_bucket_size"] == 7


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "has 'optimizer'; remove it"),
        ({"scheduler": {"type": "WarmupLR"}}, "has 'scheduler'; remove it"),
        ({"activation_checkpointing": {"partition_activations": True}}, "has 'activation_checkpointing'; remove it"),
        ({"curriculum_learning": {"enabled": True}}, "has 'curriculum_learning'; remove it"),
        ({"gradient_allreduce_op": "sum"}, "has 'gradient_allreduce_op'; remove it"),
        ({"gradient_cliping": 1.0}, "has 'gradient_cliping'; remove it"),
        ({"data_types": {"grad_dtype": "fp32"}}, "has 'data_types.grad_dtype'; remove it"),
        ({"aio": {"block_size": 1, "queue_deep": 1}}, "has 'aio.queue_deep'; remove it"),
        ({"zero_force_ds_cpu_optimizer": True}, "has zero_force_ds_cpu_optimizer True, .* False"),
        ({"zero_allow_untested_optimizer": False}, "has zero_allow_untested_optimizer False, .* True"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param, which needs stage 3"),
        ({"gradient_clipping": 1.0}, "has gradient_clipping 1.0, .* 0.5"),
        ({"gradient_accumulation_steps": 1}, "has gradient_accumulation_steps 1, .* 3"),
        ({"train_micro_batch_size_per_gpu": 8}, "has train_micro_batch_size_per_gpu 8, .* 2"),
        ({"train_batch_size": 24}, "has train_batch_size 24, .* 12"),
        ({"bf16": {"enabled": True}}, "has bf16.enabled True, .* False"),
        ({"fp16": {"enabled": True}}, "has fp16.enabled True, .* False"),
        ({"bfloat16": {"enabled": True}}, "has bfloat16.enabled True, .* False"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "has torch_autocast.enabled True, .* False"),
    ],
)
def test_an_entry_that_contradicts_the_run_is_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        resolved({**AUTO, **entries})


@pytest.mark.parametrize("stage", [0, 4])
def test_another_stage_is_refused(stage, file):
    path = file(json.dumps({"zero_optimization": {"stage": stage}}))
    with pytest.raises(ValueError, match=f"has ZeRO stage {stage}; "):
        plugin_of(path)


def test_a_plugin_of_the_named_file_loads_models_whole(file, monkeypatch):
    plugin = plugin_of(file(json.dumps({"zero_optimization": {"stage": 2}})))
    assert isinstance(plugin, DeepSpeedPlugin) and plugin.zero_stage == 2 and not plugin.zero3_init_flag
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    assert plugin_of(None) is None


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, "stage3_gather_16bit_weights_on_model_save"),
        ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": False, "stage3_max_live_parameters": 5}, ""),
        ({"stage": 2, "stage3_param_persistence_threshold": 0}, "stage3_param_persistence_threshold"),
        ({"stage": 1, "sub_group_size": 5, "stage3_prefetch_bucket_size": "auto"}, "sub_group_size"),
        ({"stage": 2, "elastic_checkpoint": True, "allgather_bucket_size": 5}, "elastic_checkpoint"),
        ({"stage": 3, "sub_group_size": 5, "allgather_bucket_size": 5}, "allgather_bucket_size"),
        ({"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5}, ""),
    ],
)
def test_entries_of_a_file_that_its_stage_does_not_read_are_listed(entries, expected, file, capfd):
    plugin_of(file(json.dumps({"zero_optimization": entries})))
    line = "settings of the DeepSpeed configuration without effect on this run: "
    listed = f"{line}zero_optimization.{expected}\n" if expected else ""
    assert capfd.readouterr().err == listed
    plugin_of(file(json.dumps({"zero_optimization": {"stage": 2}, "steps_per_print": 5})))
    assert capfd.readouterr().err == f"{line}steps_per_print\n"


@pytest.mark.parametrize("bf16", [False, True])
def test_float16_in_the_file_is_refused_before_anything_is_loaded(bf16, file, tmp_path):
    path = file(json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}))
    with pytest.raises(ValueError, match="the DeepSpeed configuration has fp16.enabled True, "):
        make_accelerator(tiny_config(tmp_path, deepspeed=path, bf16=bf16))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[3]", r"holds \[3\]; make it an object"),
        ('{"data_types": "fp32"}', "has data_types 'fp32'; make it an object"),
        ('{"aio": true}', "has aio True; make it an object"),
        ('{"zero_optimization": {"offload_param": "cpu"}}', "has offload_param 'cpu'; make it an object"),
        ('{"bf16": []}', r"has bf16 \[\]; "),
        ('{"zero_optimization": 3}', "has zero_optimization 3; "),
        ("[" * 9000, "not a readable JSON file"),
        ("{", "not a readable JSON file"),
        ("\xff", "not a readable JSON file"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text, message, file):
    with pytest.raises(ValueError, match=f"deepspeed .*zero.json'.* {message}"):
        plugin_of(file(text))


def test_a_missing_file_is_refused(file, tmp_path):
    with pytest.raises(ValueError, match="none.json', which is not a readable JSON file"):
        plugin_of(str(tmp_path / "none.json"))


def test_a_process_that_no_launcher_started_is_refused(file, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="no launcher started this process; use accelerate launch"):
        plugin_of(file("{}"))
    # As `accelerate launch` asks for it.
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="no launcher started this process"):
        plugin_of(None)


def test_a_missing_deepspeed_is_named_with_the_remedy(file, monkeypatch):
    monkeypatch.setattr(deepspeed_config, "is_deepspeed_available", lambda: False)
    with pytest.raises(ValueError, match=r"not installed; pip install 'alpaca_ppo\[deepspeed\]'"):
        plugin_of(file("{}"))


def test_use_cpu_is_refused_where_deepspeed_would_take_a_gpu(file, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = file(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(ValueError, match="use_cpu is True, .* CUDA_VISIBLE_DEVICES= "):
        make_accelerator(tiny_config(tmp_path / "run", deepspeed=path))


def test_4_bit_weights_are_refused_under_stage_3(tmp_path):
    args = tiny_config(tmp_path, load_in_4bit=True, critic_layout="adapter")
    check_four_bit(2, args)
    with pytest.raises(ValueError, match="load_in_4bit is True, .* ZeRO 3"):
        check_four_bit(3, args)


def test_the_optimizer_of_zero_1_for_float32_gradients_of_a_bf16_run_is_refused():
    stages = {
        stage: {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": stage}} for stage in (1, 2)
    }
    for offload in ({}, {"offload_optimizer": None}, {"offload_optimizer": {"device": "none"}}):
        stages[1]["zero_optimization"] |= offload
        with pytest.raises(ValueError, match="grad_accum_dtype 'fp32' .* ZeRO 1 in bf16"):
            resolved(stages[1], bf16=True)
    assert resolved(stages[1])["data_types"] == resolved(stages[2], bf16=True)["data_types"]


def test_a_file_beside_an_accelerator_of_one_s_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="deepspeed is 'zero.json', but you passed your own accelerator"):
        make_accelerator(tiny_config(tmp_path, deepspeed="zero.json"), Accelerator(cpu=True))


@pytest.mark.parametrize(
    ("stage", "found"), [(0, "your own accelerator has ZeRO stage 0"), (3, "load_in_4bit is True")]
)
def test_the_stage_of_an_accelerator_of_one_s_own_is_checked_before_models_load(stage, found, tmp_path):
    plugin = SimpleNamespace(zero_stage=stage)
    given: Any = SimpleNamespace(mixed_precision="no", log_with=[], deepspeed_plugin=plugin)
    with pytest.raises(ValueError, match=found):
        make_accelerator(tiny_config(tmp_path, load_in_4bit=True, critic_layout="adapter"), given)


def test_a_group_of_both_cannot_be_clipped_in_part(tmp_path):
    trainer = tiny_trainer(tmp_path)
    both = torch.optim.AdamW(trainer.actor_critic.parameters())
    with pytest.raises(ValueError, match="group 0 of the optimizer has parameters of policy and critic"):
        DeepSpeedEngine(trainer.accelerator, trainer.actor_critic, both, trainer.args)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_reduced_in_the_last_pass_and_under_stage_3_in_each_of_the_last_batch(stage):
    told = []
    engine = SimpleNamespace(stage=stage, model=SimpleNamespace(set_gradient_accumulation_boundary=told.append))
    for last_batch in (False, True):
        for last_pass in (False, True):
            DeepSpeedEngine.gradient_sync(engine, last_batch=last_batch, last_pass=last_pass)
    assert told == [False, False, stage == 3, True]
