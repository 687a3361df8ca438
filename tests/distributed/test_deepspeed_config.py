"""The DeepSpeed configuration before there is an engine: which entries a run fills in, and which it refuses by name."""

import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from peft import LoraConfig

from alpaca_ppo.adapters import add_policy_adapter
from alpaca_ppo.distributed import deepspeed_config
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.distributed.deepspeed_config import check_four_bit, deepspeed_plugin, resolve_auto, wants_deepspeed
from alpaca_ppo.distributed.deepspeed_engine import DeepSpeedEngine
from alpaca_ppo.models import build_actor_critic
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_config, tiny_trainer

RUN = {
    "hidden_size": 32,
    "bf16": False,
    "max_grad_norm": 0.5,
    "micro_batches": 3,
    "step_per_device_batch_size": 2,
    "world": 4,
}
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


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes configuration files, in a process that looks as if a launcher had started it."""
    monkeypatch.setenv("LOCAL_RANK", "0")

    def write(text: str) -> str:
        (tmp_path / "zero.json").write_text(text)
        return str(tmp_path / "zero.json")

    return write


def plugin_of(path, **settings):
    return deepspeed_plugin(tiny_config("unused", deepspeed=path, **settings))


def test_what_is_auto_or_absent_is_filled_from_the_run():
    config = resolve_auto(AUTO, **RUN)
    assert config["gradient_accumulation_steps"] == 3
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["train_batch_size"] == 24, "2 rows * 3 micro-batches * 4 processes"
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": False, "check_grad_overflow": False}
    zero = config["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_bucket_size"] == 1024
    assert zero["stage3_prefetch_bucket_size"] == 921 and zero["stage3_param_persistence_threshold"] == 320
    absent = resolve_auto({"zero_optimization": {"stage": 3}}, **RUN)
    assert absent["gradient_clipping"] == 0.5 and absent["zero_optimization"] == {"stage": 3}
    # Resolving twice changes nothing.
    assert resolve_auto(config, **RUN) == config


def test_sizes_that_the_file_names_are_kept():
    config = resolve_auto({"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}}, **RUN)
    assert config["zero_optimization"]["reduce_bucket_size"] == 7


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"optimizer": {"type": "AdamW"}},
            "has 'optimizer'; remove it: learning_rate, lr_scheduler_type and the",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "has 'scheduler'; remove it: learning_rate"),
        ({"gradient_clipping": 1.0}, "has gradient_clipping 1.0, but the run's configuration makes it 0.5"),
        ({"gradient_accumulation_steps": 1}, "has gradient_accumulation_steps 1, .* makes it 3"),
        ({"train_micro_batch_size_per_gpu": 8}, "has train_micro_batch_size_per_gpu 8, .* makes it 2"),
        ({"train_batch_size": 12}, "has train_batch_size 12, .* makes it 24"),
        ({"zero_optimization": 3}, "has zero_optimization 3; it must be an object, such as {} or {stage: 2}"),
        ({"fp16": False}, "has fp16 False; it must be an object, such as {} or {enabled: false}"),
        ({"bf16": {"enabled": True}}, r"has bf16.enabled True, .* makes it False; write \"auto\""),
    ],
)
def test_an_entry_that_contradicts_the_run_is_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        resolve_auto({**AUTO, **entries}, **RUN)


@pytest.mark.parametrize("stage", [0, 4])
def test_another_stage_is_refused(stage, file):
    path = file(json.dumps({"zero_optimization": {"stage": stage}}))
    with pytest.raises(ValueError, match=f"has ZeRO stage {stage}; set zero_optimization.stage to 1, 2 or 3"):
        plugin_of(path)


def test_a_plugin_of_the_named_file_loads_models_whole(file):
    plugin = plugin_of(file(json.dumps({"zero_optimization": {"stage": 2}})))
    assert isinstance(plugin, DeepSpeedPlugin) and plugin.zero_stage == 2 and not plugin.zero3_init_flag


def test_a_file_of_another_shape_is_refused(file):
    for text, message in (
        ("[3]", r"zero.json', which contains \[3\], which is not a JSON object; write settings"),
        ('{"bf16": []}', r"the DeepSpeed configuration has bf16 \[\]; it must be an object"),
        ("[" * 9000, "zero.json', which is not a readable JSON file"),
    ):
        with pytest.raises(ValueError, match=message):
            plugin_of(file(text))


@pytest.mark.parametrize("text", [None, "{", "\udcff"])
def test_a_file_that_is_missing_or_no_json_is_refused(text, file, tmp_path):
    if text == "\udcff":
        (tmp_path / "zero.json").write_bytes(b"\xff")
    elif text is not None:
        file(text)
    with pytest.raises(ValueError, match="zero.json', which is not a readable JSON file"):
        plugin_of(str(tmp_path / "zero.json"))


def test_a_process_that_no_launcher_started_is_refused(file, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="no launcher started this process; use accelerate launch"):
        plugin_of(file("{}"))


def test_a_missing_deepspeed_is_named_with_the_remedy(file, monkeypatch):
    monkeypatch.setattr(deepspeed_config, "is_deepspeed_available", lambda: False)
    with pytest.raises(ValueError, match=r"not installed; pip install 'alpaca_ppo\[deepspeed\]'"):
        plugin_of(file("{}"))


def test_deepspeed_is_wanted_by_the_run_or_by_the_launcher(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    assert not wants_deepspeed(None) and wants_deepspeed("zero.json")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert wants_deepspeed(None)


def test_use_cpu_is_refused_where_deepspeed_would_take_a_gpu(file, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = file(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(ValueError, match="use_cpu is True, but DeepSpeed uses any GPU .* CUDA_VISIBLE_DEVICES= "):
        make_accelerator(tiny_config(tmp_path / "run", deepspeed=path))


def test_4_bit_weights_are_refused_under_stage_3(tmp_path):
    args = tiny_config(tmp_path, load_in_4bit=True, critic_layout="adapter")
    check_four_bit(2, args)
    with pytest.raises(ValueError, match="load_in_4bit is True, but ZeRO 3 would shard the 4-bit weights without"):
        check_four_bit(3, args)


def test_half_precision_that_the_run_has_no_name_for_is_refused():
    with pytest.raises(ValueError, match=r"fp16.enabled True, but the run's configuration makes it False"):
        resolve_auto({**AUTO, "fp16": {"enabled": True}}, **RUN)


def test_the_optimizer_of_zero_1_for_float32_gradients_of_a_bf16_run_is_refused():
    stages = {
        stage: {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": stage}} for stage in (1, 2)
    }
    run = {**RUN, "bf16": True}
    with pytest.raises(ValueError, match="grad_accum_dtype 'fp32', for which ZeRO 1 in bf16 takes an optimizer whose"):
        resolve_auto(stages[1], **run)
    assert resolve_auto(stages[1], **RUN)["data_types"] == resolve_auto(stages[2], **run)["data_types"]


def test_a_file_beside_an_accelerator_of_one_s_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="deepspeed is 'zero.json', but you passed your own accelerator; give"):
        make_accelerator(tiny_config(tmp_path, deepspeed="zero.json"), Accelerator(cpu=True))


def test_a_group_of_both_cannot_be_clipped_in_part(tmp_path):
    trainer = tiny_trainer(tmp_path)
    both = torch.optim.AdamW(trainer.actor_critic.parameters())
    with pytest.raises(ValueError, match="group 0 of the optimizer has parameters of policy and critic, which DeepSp"):
        DeepSpeedEngine(trainer.accelerator, trainer.actor_critic, both, trainer.args)


def test_an_optimizer_of_all_parameters_keeps_those_that_train(tmp_path):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapters = add_policy_adapter(tiny_causal_lm("llama"), lora)
    model = build_actor_critic(adapters, critic_layout="adapter")
    frozen, *others = sorted(model.parameters(), key=lambda parameter: parameter.requires_grad)
    optimizer = torch.optim.AdamW([{"params": [frozen]}, {"params": others}])
    trainer = tiny_trainer(
        tmp_path, model=model, trainer_arguments={"optimizers": (optimizer, None)}, critic_layout="adapter"
    )
    (group,) = trainer.updater.optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters() if p.requires_grad}
