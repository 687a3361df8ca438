"""FSDP2 before it shards: who asks for it, and what is refused by name. Its runs are in tests/integration."""

import os
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from alpaca_ppo.distributed import fsdp_engine
from alpaca_ppo.distributed.accelerator import hardware, make_accelerator, make_engine
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.fsdp_config import check_fsdp, check_launch
from alpaca_ppo.distributed.fsdp_engine import FSDPEngine
from alpaca_ppo.distributed.optimizer import make_optimizer
from alpaca_ppo.models import build_actor_critic
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_config


@pytest.fixture
def launched(monkeypatch):
    """Sets what `accelerate launch` sets for `distributed_type: FSDP` with fsdp_version 2, and more."""

    def launch(**more):
        for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **more}.items():
            monkeypatch.setenv(name, value)

    return launch


def made(model, *, layout="separate", optimizer=make_optimizer):
    args = tiny_config("unused")
    accelerator = make_accelerator(args)
    actor_critic = build_actor_critic(model, critic_layout=layout)
    return FSDPEngine(accelerator, actor_critic, optimizer(actor_critic, args, accelerator.device), args)


@pytest.mark.parametrize(
    ("environment", "field", "value"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version", "'1'"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params", "'true'"),
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "fsdp_sharding_strategy", "'HYBRID_SHARD'"),
        ({"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "fsdp_sharding_strategy", "'NO_SHARD'"),
        ({"FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, "fsdp_reshard_after_forward", "'SHARD_GRAD_OP'"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing", "'true'"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed", "True"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend", "'INDUCTOR'"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "megatron_lm", "'true'"),
        ({"ACCELERATE_TORCH_DEVICE": "cpu"}, "torch_device", "'cpu'"),
        ({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "dp_replicate_size", "'2'"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size", "'2'"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "4"}, "cp_size", "'4'"),
        ({"PARALLELISM_CONFIG_SP_SIZE": "2"}, "sp_size", "'2'"),
        ({"PARALLELISM_CONFIG_OF_TOMORROW_SIZE": "2"}, "of_tomorrow_size", "'2'"),
    ],
)
def test_what_a_launch_configuration_asks_for_beside_it_is_refused(environment, field, value, launched):
    launched()
    check_fsdp(tiny_config("unused"))
    launched(**environment)
    with pytest.raises(ValueError, match=f"{field} is {value}, which .*; "):
        make_accelerator(tiny_config("unused"))


@pytest.mark.parametrize(
    "listed",
    [
        ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "NoSuchLayer"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
        ("FSDP_SYNC_MODULE_STATES", "false"),
        ("FSDP_USE_ORIG_PARAMS", "False"),
        ("FSDP_MIN_NUM_PARAMS", "2000"),
        ("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"),
        ("FSDP_FORWARD_PREFETCH", "true"),
        ("FSDP_IGNORED_MODULES", "head"),
        ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true"),
        ("FSDP_OF_TOMORROW", "true"),
        ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
        ("ACCELERATE_FP8_BACKEND", "te"),
        ("ACCELERATE_USE_TP", "true"),
        ("ACCELERATE_USE_IPEX", "true"),
        ("ACCELERATE_CPU_OF_TOMORROW", "true"),
        ("ACCELERATE_DOWNCAST_BF16", "1"),
        ("MEGATRON_LM_TP_DEGREE", "2"),
    ],
)
def test_what_a_launch_configuration_asks_for_in_vain_is_listed(listed, launched, capfd):
    name, value = listed
    # What the launcher sets when nobody asks, and what a run does.
    launched(
        FSDP_SHARDING_STRATEGY="FULL_SHARD",
        FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_MIN_NUM_PARAMS="100000000",
        FSDP_USE_ORIG_PARAMS="true",
        FSDP_SYNC_MODULE_STATES="true",
        FSDP_FORWARD_PREFETCH="false",
        FSDP_OFFLOAD_PARAMS="false",
        FSDP_ACTIVATION_CHECKPOINTING="false",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_CPU_RAM_EFFICIENT_LOADING="false",
        ACCELERATE_DYNAMO_BACKEND="NO",
        ACCELERATE_MIXED_PRECISION="no",
        ACCELERATE_USE_CPU="False",
        PARALLELISM_CONFIG_DP_SHARD_SIZE="2",
        PARALLELISM_CONFIG_TP_SIZE="1",
        WORLD_SIZE="2",
    )
    check_launch(tiny_config("unused"))
    assert capfd.readouterr().err == ""
    launched(**{name: value})
    check_launch(tiny_config("unused"))
    line = "settings of the launch configuration without effect on this run: "
    assert capfd.readouterr().err == f"{line}{name}={value}\n"


def test_the_cpu_of_a_launch_configuration_is_refused_where_the_run_would_take_a_gpu(launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for value in ("False", "0"):
        launched(ACCELERATE_USE_CPU=value)
        check_launch(tiny_config("unused", use_cpu=False))
    for value in ("True", "1", "yes"):
        launched(ACCELERATE_USE_CPU=value)
        check_launch(tiny_config("unused", use_cpu=True))
        with pytest.raises(ValueError, match=f"accelerate_use_cpu is '{value}', which .*; set use_cpu: true"):
            check_launch(tiny_config("unused", use_cpu=False))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_launch(tiny_config("unused", use_cpu=False))


def test_a_deepspeed_file_by_flag_leaves_that_of_the_launch_configuration_without_effect(monkeypatch, capfd):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero2.json")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    check_launch(tiny_config("unused"))
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true")
    check_launch(tiny_config("unused"))
    assert capfd.readouterr().err.endswith("run: ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=true\n")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false")
    check_launch(tiny_config("unused", deepspeed="zero3.json"))
    assert capfd.readouterr().err.endswith("run: ACCELERATE_DEEPSPEED_CONFIG_FILE=zero2.json\n")


@pytest.mark.parametrize(
    "settings",
    [{"deepspeed": "zero3.json"}, {"load_in_4bit": True, "critic_layout": "adapter"}, {"reference": "copy_offloaded"}],
)
def test_options_that_it_excludes_are_refused(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name} is {value!r}, which fsdp excludes; "):
        make_accelerator(tiny_config("unused", fsdp=True, **settings))
    check_fsdp(tiny_config("unused", **settings))


def test_an_accelerator_that_shards_by_itself_is_refused():
    own = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match="distributed_type is .*FSDP.*, which fsdp excludes; pass one without"):
        make_accelerator(tiny_config("unused", fsdp=True), own)


def test_the_option_shards_the_models_of_several_processes(as_torchrun_starts_one_process, monkeypatch, launched):
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="shared")
    chosen: list[str] = []
    monkeypatch.setattr(Engine, "__init__", lambda self, *parts: chosen.append(type(self).__name__))
    # What a launch configuration says that leaves it out; transformers would leave the weights to one process.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")

    def choose(accelerator, **settings):
        args = tiny_config("unused", **settings)
        make_engine(accelerator, model, make_optimizer(model, args, torch.device("cpu")), args)

    one = make_accelerator(tiny_config("unused"))
    two = SimpleNamespace(num_processes=2, distributed_type=one.distributed_type)
    described = SimpleNamespace(num_processes=2, mixed_precision="no", device=torch.device("cpu"), state=one.state)
    described.distributed_type = one.distributed_type
    sharded = tiny_config("unused", fsdp=True)
    kinds = [hardware(of, args)["distributed"] for of, args in ((one, sharded), (described, sharded))]
    assert kinds == [one.distributed_type.value, "FSDP"]
    choose(two)
    choose(two, fsdp=True)
    # One process has nothing to shard.
    choose(one, fsdp=True)
    launched()
    choose(two)
    assert chosen == ["Engine", "FSDPEngine", "Engine", "FSDPEngine"]
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    kinds = [hardware(of, tiny_config("unused"))["distributed"] for of in (one, described)]
    assert kinds == [one.distributed_type.value, "FSDP"]


def test_parameters_of_two_dtypes_and_models_without_named_layers_are_refused(as_torchrun_starts_one_process):
    with pytest.raises(ValueError, match="trained parameters are bfloat16 and float32, which FSDP2 cannot"):
        made(tiny_causal_lm("llama", dtype=torch.bfloat16))
    model = tiny_causal_lm("llama")
    model._no_split_modules = []
    with pytest.raises(ValueError, match="LlamaForCausalLM names no layers .* use ZeRO 3"):
        made(model)


def test_a_cached_critic_is_whole_on_every_process(as_torchrun_starts_one_process):
    engine = made(tiny_causal_lm("llama"), layout="cached")
    kinds = {name: isinstance(parameter, DTensor) for name, parameter in engine.model.named_parameters()}
    assert all(sharded == name.startswith("policy.") for name, sharded in kinds.items()) and {*kinds.values()} == {0, 1}
    one_group = made(tiny_causal_lm("llama"), layout="cached", optimizer=lambda model, *_: AdamW(model.parameters()))
    assert all(isinstance(parameter, DTensor) for parameter in one_group.model.parameters())
    for trained in (engine, one_group):
        before = {name: tensor.clone() for name, tensor in trained.weights().items()}
        assert step(trained).critic > 0
        changed = {name for name, tensor in trained.weights().items() if not torch.equal(tensor, before[name])}
        assert {name.split(".")[0] for name in changed} == {"policy", "critic"}


def test_weights_that_do_not_fit_while_sampling_are_named_with_the_remedy(as_torchrun_starts_one_process, monkeypatch):
    engine = made(tiny_causal_lm("llama"))
    with engine.sampling() as model:
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def out_of_memory(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fsdp_engine, "all_gather", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="process 0 cannot hold all .* GiB.* generation_backend: vllm"):
        with engine.sampling():
            pass


def loss(engine):
    rows = [torch.ones(2, 3, dtype=torch.long) * 5, torch.ones(2, 3, dtype=torch.long)]
    rows += [torch.full((2, 4), 7), torch.ones(2, 4, dtype=torch.bool)]
    outputs = engine.model(*rows, temperature=1.0, chunk_size=8)
    return outputs.logprobs.sum() + (outputs.values - 1.0).square().sum()


def step(engine):
    engine.begin("both")
    engine.backward(loss(engine))
    return engine.step()


def test_a_step_after_an_exception_is_that_of_a_run_without_one(as_torchrun_starts_one_process):
    first, second = (made(tiny_causal_lm("llama")) for _ in range(2))

    class Fails(Exception):
        pass

    def fail(gradient):
        raise Fails

    first.begin("both")
    wrong = loss(first)
    wrong.register_hook(fail)
    with pytest.raises(Fails):
        first.backward(wrong)
    norms = [step(engine) for engine in (first, second)]
    assert norms[0] == norms[1] and norms[0].policy > 0
    ours, theirs = first.weights(), second.weights()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_torch_that_cannot_recover_from_an_exception_takes_a_step(as_torchrun_starts_one_process, monkeypatch):
    """As torch 2.11 and 2.12."""
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    assert step(made(tiny_causal_lm("llama"))).policy > 0
