"""What an estimate reads of a run, and what it refuses because the run would."""

import json
from typing import Any

import pytest
from peft import LoraConfig
from transformers import MambaConfig, ViTConfig

from alpaca_ppo.estimate_memory.estimator import table
from alpaca_ppo.estimate_memory.fake_models import Models
from alpaca_ppo.estimate_memory.passes import measure
from tests.estimate_memory.test_estimator import FLAGS, estimated, folder, llama, saved, settings

__all__ = ["folder"]
TWO = ("--num_processes=2",)
FOUR_BIT = ("--use_peft", "--critic_layout=adapter", "--dtype=bfloat16", "--load_in_4bit")
ON_A_DEVICE = tuple(flag for flag in FLAGS if flag != "--use_cpu")


def zero_file(tmp_path, **zero: Any) -> str:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    return str(path)


def test_a_deepspeed_file_says_stage_and_offloading(folder, tmp_path):
    flags = ("--model_name_or_path", folder, *ON_A_DEVICE, *TWO)
    file = zero_file(tmp_path, stage=2, reduce_bucket_size="auto", offload_optimizer={"device": "cpu"})
    plain, offloaded = estimated(*flags, "--zero_stage=2"), estimated(*flags, "--deepspeed", file)
    assert offloaded["zero_stage"] == 2
    elements = plain["phases"][-1]["gradients"]
    assert elements > 0 and [phase["optimizer"] for phase in offloaded["phases"]] == [0.0] * 6
    # Per element of this process's half: master weight, two moments and the gradient, 4 bytes each.
    assert offloaded["on_host"] == pytest.approx(16 * plain["phases"][0]["optimizer"] / 12)
    assert "host memory: another" in table(offloaded) and "host memory" not in table(plain)


def test_the_buckets_of_a_deepspeed_file_are_counted(folder, tmp_path):
    flags = ("--model_name_or_path", folder, *FLAGS, *TWO, "--deepspeed")
    sizes = {}
    for size in (10**6, 3 * 10**6):
        found = estimated(*flags, zero_file(tmp_path, stage=1, reduce_bucket_size=size))
        sizes[size] = {phase["phase"]: phase["gradients"] for phase in found["phases"]}
        # The other stages have their own defaults.
        other = found["peak_by_zero_stage"]["2"]
    # Two buckets of float32.
    assert sizes[3 * 10**6]["backward"] - sizes[10**6]["backward"] == 2 * 2 * 10**6 * 4
    assert other == estimated(*flags[:-1], "--zero_stage=2")["peak"]


def test_weights_in_host_memory_visit_the_device(folder, tmp_path):
    flags = ("--model_name_or_path", folder, *ON_A_DEVICE, *TWO)
    file = zero_file(tmp_path, stage=3, reduce_bucket_size="auto", offload_param={"device": "cpu"})
    phases = {phase["phase"]: phase["weights"] for phase in estimated(*flags, "--deepspeed", file)["phases"]}
    whole = estimated(*flags, "--zero_stage=3")["phases"][0]["weights"]
    assert phases["optimizer step"] == 0 and 0 < phases["prefill"] < whole


@pytest.mark.parametrize(
    ("zero", "flags", "says"),
    [
        ({"stage": 0}, (), "has ZeRO stage 0; set zero_optimization.stage to 1, 2 or 3"),
        ({"stage": 3}, ("--zero_stage=2",), "zero_stage is 2, but deepspeed .* has stage 3; leave zero_stage out"),
    ],
)
def test_a_deepspeed_file_that_cannot_be_estimated_is_refused(folder, tmp_path, zero, flags, says):
    with pytest.raises(ValueError, match=says):
        estimated("--model_name_or_path", folder, *FLAGS, *TWO, *flags, "--deepspeed", zero_file(tmp_path, **zero))


def test_a_deepspeed_file_that_is_none_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="deepspeed is .*not a readable JSON file"):
        estimated("--model_name_or_path", folder, *FLAGS, *TWO, "--deepspeed", str(tmp_path / "none.json"))


def test_a_deepspeed_file_without_settings_is_refused(folder, tmp_path):
    (tmp_path / "list.json").write_text("[3]")
    with pytest.raises(ValueError, match=r"deepspeed .*list.json', which holds \[3\]; make it an object"):
        estimated("--model_name_or_path", folder, *FLAGS, *TWO, "--deepspeed", str(tmp_path / "list.json"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((*ON_A_DEVICE, *TWO, *FOUR_BIT, "--zero_stage=3"), "load_in_4bit is True, which ZeRO 3 excludes"),
        ((*ON_A_DEVICE, *TWO, *FOUR_BIT, "--fsdp=true"), "load_in_4bit is True, which fsdp excludes"),
        ((*FLAGS, *FOUR_BIT), "load_in_4bit and use_cpu are both True"),
        ((*FLAGS, "--query_len=900"), "is more than the model's max_position_embeddings"),
    ],
)
def test_what_a_run_refuses_is_not_estimated(folder, flags, says):
    with pytest.raises(ValueError, match=says):
        estimated("--model_name_or_path", folder, *flags)


def test_stages_that_a_run_refuses_are_not_listed(folder):
    result = estimated("--model_name_or_path", folder, *ON_A_DEVICE, *TWO, *FOUR_BIT)
    assert list(result["peak_by_zero_stage"]) == ["0", "1", "2"]


def test_adapters_that_select_layers_by_number_are_estimated():
    by_number = LoraConfig(r=8, target_modules=["model.layers.1.self_attn.q_proj"], task_type="CAUSAL_LM")
    named = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = settings(critic_layout="shared")
    found = [measure(Models(saved(llama()), adapter), args) for adapter in (by_number, named)]
    # The shared critic's head of 128; rank 8 of 128 + 128 in one layer, or in both.
    assert [f.elements for f in found] == [128 + layers * 8 * 256 for layers in (1, 2)]
    assert found[0].kv_cache == found[1].kv_cache


def test_a_reference_that_is_an_adapter_counts_as_its_base(folder, tmp_path):
    config = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM", base_model_name_or_path=folder)
    config.save_pretrained(str(tmp_path / "adapter"))
    flags = ("--model_name_or_path", folder, *FLAGS, "--reference")
    adapter, copy = (estimated(*flags, choice)["phases"][0] for choice in (str(tmp_path / "adapter"), "copy"))
    assert adapter == copy


def test_a_reference_adapter_without_a_base_is_refused_as_one(folder, tmp_path):
    LoraConfig(r=8, target_modules=["q_proj"]).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r".*adapter is an adapter without its base"):
        estimated("--model_name_or_path", folder, *FLAGS, "--reference", str(tmp_path / "adapter"))


def test_a_model_that_is_no_language_model_is_refused_by_type():
    with pytest.raises(
        ValueError, match="no model can be loaded from .*ViTConfig.* for this kind of AutoModel: AutoModelForCausalLM"
    ):
        measure(Models(saved(ViTConfig())), settings())


def test_a_model_that_cannot_run_on_fake_tensors_is_refused_by_name():
    with pytest.raises(ValueError, match="model_name_or_path .* cannot run without weights"):
        measure(Models(saved(MambaConfig(num_hidden_layers=2))), settings())
