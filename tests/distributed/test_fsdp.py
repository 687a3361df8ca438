"""FSDP2 before it shards: who asks for it, and what is refused by name. Its runs are in tests/integration."""

import os
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from alpaca_ppo.distributed import fsdp_engine
from alpaca_ppo.distributed.accelerator import hardware, make_accelerator, make_engine
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.fsdp_config import check_fsdp
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


def made(model, **settings):
    args = tiny_config("unused", **settings)
    accelerator = make_accelerator(args)
    actor_critic = build_actor_critic(model, critic_layout="separate")
    return FSDPEngine(accelerator, actor_critic, make_optimizer(actor_critic, args, accelerator.device), args)


@pytest.mark.parametrize(
    ("environment", "field", "value"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version", "'1'"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params", "True"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed", "True"),
        ({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "dp_replicate_size", "2"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size", "2"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "4"}, "cp_size", "4"),
        ({"PARALLELISM_CONFIG_SP_SIZE": "2"}, "sp_size", "2"),
    ],
)
def test_what_a_launch_configuration_asks_for_beside_it_is_refused(environment, field, value, launched):
    launched()
    check_fsdp(tiny_config("unused"))
    launched(**environment)
    with pytest.raises(ValueError, match=f"{field} is {value}, which fsdp excludes; "):
        make_accelerator(tiny_config("unused"))


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
    assert hardware(one)["distributed"] != "FSDP"
    choose(two)
    choose(two, fsdp=True)
    # One process has nothing to shard.
    choose(one, fsdp=True)
    launched()
    choose(two)
    assert chosen == ["Engine", "FSDPEngine", "Engine", "FSDPEngine"]
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    assert hardware(one)["distributed"] == "FSDP"


def test_parameters_of_two_dtypes_and_models_without_named_layers_are_refused(as_torchrun_starts_one_process):
    with pytest.raises(ValueError, match="trained parameters are bfloat16 and float32, which FSDP2 cannot"):
        made(tiny_causal_lm("llama", dtype=torch.bfloat16))
    model = tiny_causal_lm("llama")
    model._no_split_modules = []
    with pytest.raises(ValueError, match="LlamaForCausalLM names no layers .* use ZeRO 3"):
        made(model)


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
    return outputs.logprobs.sum() + outputs.values.square().sum()


def step(engine):
    engine.begin()
    engine.backward(loss(engine))
    return engine.step()


def test_a_step_after_an_exception_is_that_of_a_run_without_one(as_torchrun_starts_one_process):
    first, second = (made(tiny_causal_lm("llama")) for _ in range(2))

    class Fails(Exception):
        pass

    def fail(gradient):
        raise Fails

    first.begin()
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
