"""Memory estimates against live tensors of real runs and against arithmetic by hand; the changes that save memory."""

import atexit
import json
import shutil
import tempfile
import weakref
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.cli.configurations import estimate_memory as main
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.distributed.fsdp_config import asks_for_fsdp
from alpaca_ppo.distributed.held_memory import CAUSES, PHASES, Measured, Sharding, phases
from alpaca_ppo.estimate_memory.estimator import GIB, EstimateArguments, estimate, predict, table
from alpaca_ppo.estimate_memory.fake_models import LiveBytes, Models
from alpaca_ppo.estimate_memory.passes import largest_micro_batch, measure
from tests.tiny_models import tiny_config, tiny_tokenizer
from tests.tiny_runs import track_all

QUERY, RESPONSE, ROWS, VOCABULARY, LAYERS = 16, 48, 8, 4096, 2
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS}


def llama(**overrides: Any) -> Any:
    """Two million weights. The large vocabulary keeps a random model from ending responses early."""
    return tiny_config("llama", vocab_size=VOCABULARY, **{**WIDE, **overrides})


def saved(config: Any) -> str:
    """A folder with the configuration of a model, and no weights."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    config.save_pretrained(folder)
    return folder


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", **settings)


def settings(**overrides: Any) -> PPOConfig:
    sizes = {
        "query_len": QUERY,
        "response_len": RESPONSE,
        "rollout_batch_size": ROWS,
        "rollout_per_device_batch_size": ROWS,
        "step_batch_size": ROWS,
        "step_per_device_batch_size": ROWS // 2,
        "logprob_chunk_size": 64,
        # What a run writes about itself between its steps is not estimated.
        "report_to": ["none"],
        "num_logged_rollouts": 0,
        "num_inspected_prompts": 0,
        "report": False,
    }
    return PPOConfig(**{"use_cpu": True, "ppo_epochs": 1, "total_episodes": 2 * ROWS, **sizes, **overrides})


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class MeasuredTrainer(PPOTrainer):
    """Records the peak of live bytes in the rollout (sampling, scores, log-probs) and in the update of each step, and
    what is live after each of the two.
    """

    live: LiveBytes
    before: int

    def rollout(self, prompt_batches):
        self.live.reset_peak()
        rollouts = super().rollout(prompt_batches)
        self.peaks = {"rollout": self.live.peak - self.before}
        self.at_rest = [self.live.live - self.before]
        return rollouts

    def step_with_rollouts(self, rollouts):
        self.live.reset_peak()
        stats = super().step_with_rollouts(rollouts)
        self.peaks["update"] = self.live.peak - self.before
        self.at_rest.append(self.live.live - self.before)
        return stats


class ResizedBytes(LiveBytes):
    """Counts everything again after each operation: FSDP2 resizes storages, which is none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def track(self, tensors: Any) -> None:
        for tensor in tree_iter(tensors):
            if is_traceable_wrapper_subclass(tensor):
                self.track([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
            elif isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta":
                self.seen[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())
        self.seen = {key: storage for key, storage in self.seen.items() if storage() is not None}
        self.live = sum(found.nbytes() for storage in self.seen.values() if (found := storage()) is not None)
        self.peak = max(self.peak, self.live)


def measured_peaks(args: PPOConfig, peft_config: LoraConfig | None, config: Any = None) -> dict[str, int]:
    """Bytes of the second PPO step, at whose start the optimizer's state already exists."""
    return trained(args, peft_config, config).peaks


def trained(args: PPOConfig, peft_config: LoraConfig | None, config: Any = None, value: Any = None) -> MeasuredTrainer:
    """A trainer that has made two steps; its critic starts from a language model of the configuration `value`."""
    live = ResizedBytes() if asks_for_fsdp(args) else LiveBytes()
    track_all(live)
    before = live.live
    words = [f"w{10 + i % 50}" for i in range(args.query_len)]
    # Every other prompt is a little shorter, so that there is padding. No two are the same, of which one would be read.
    prompts = [{"prompt": " ".join([*words[i % 2 : -1], f"w{10 + i}"])} for i in range(2 * ROWS)]
    trainer = MeasuredTrainer(
        model=AutoModelForCausalLM.from_config(config or llama(), dtype=getattr(torch, args.dtype)),
        reward_funcs=length,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tiny_tokenizer(),
        value_model=None if value is None else AutoModelForCausalLM.from_config(value),
        peft_config=peft_config,
    )
    trainer.live, trainer.before = live, before
    track_all(live)
    with live:
        trainer.train()
    return trainer


def predicted_peaks(models: Models, args: PPOConfig, sharding: Sharding) -> dict[str, float]:
    """What `measured_peaks` measures."""
    moments = {m.phase: m.total for m in predict(models, args, [sharding])[0][0]}
    return {
        "rollout": max(moments[phase] for phase in ("prefill", "sampling", "score", "log-probs")),
        "update": max(moments[phase] for phase in ("backward", "optimizer step")),
    }


def proved(*parameters: Any) -> Any:
    """Those of a case for `make proof`."""
    return pytest.param(*parameters, marks=pytest.mark.proof)


@pytest.fixture
def fresh_state():
    """Configurations differ in precision, of which Accelerate keeps one per process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize(
    ("with_lora", "overrides"),
    [
        (False, {"reference": "copy", "gradient_checkpointing": True, "max_tokens_per_micro_batch": 96}),
        proved(False, {"reference": "copy"}),
        proved(False, {"reference": "copy", "step_per_device_batch_size": ROWS}),
        proved(False, {"critic_layout": "shared"}),
        proved(False, {"critic_layout": "cached", "critic_width": 64}),
        proved(False, {"adv_estimator": "rloo", "num_return_sequences": 4, "generation_backend": "generate"}),
        proved(True, {"reference": "adapter_off"}),
        proved(True, {"critic_layout": "adapter"}),
        (True, {"critic_layout": "adapter", "gradient_checkpointing": True, "dtype": "bfloat16"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else f"lora={value}",
)
def test_a_step_takes_the_estimated_memory(tmp_path, fresh_state, with_lora, overrides):
    AcceleratorState._reset_state(True)
    # Sampling, token by token, would take most of the time.
    args = settings(output_dir=str(tmp_path), **{**overrides, "response_len": 16})
    torch.manual_seed(0)
    peft_config = lora() if with_lora else None
    predicted = predicted_peaks(Models(saved(llama()), peft_config), args, Sharding())
    measured = measured_peaks(args, peft_config)
    ratios = {name: predicted[name] / measured[name] for name in predicted}
    assert all(0.8 < ratio < 1.2 for ratio in ratios.values()), (ratios, predicted, measured)


def test_a_teacher_that_is_wider_than_the_policy_has_the_larger_pass(tmp_path, fresh_state):
    config = llama(hidden_size=512, intermediate_size=2048)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    sizes = {"output_dir": str(tmp_path / "run"), "response_len": 16, "logprob_chunk_size": 8}
    args = settings(**sizes, teacher_model_name_or_path=str(tmp_path / "teacher"))
    predicted, measured = predicted_peaks(Models(saved(llama())), args, Sharding()), measured_peaks(args, None)
    assert all(0.8 < predicted[name] / measured[name] < 1.2 for name in predicted), (predicted, measured)


# Embedding and head have 4096 * 128 weights each. A layer: q and o 128 * 128, k and v 128 * 64, three of 128 * 256, and
# two norms of 128; there is another norm at the end.
LAYER = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
WEIGHTS = 2 * VOCABULARY * 128 + LAYERS * (LAYER + 2 * 128) + 128
# q and o 128 + 128, k and v 128 + 64, gate, up and down 128 + 256, times rank 8.
ADAPTER = LAYERS * (2 * 256 + 2 * 192 + 3 * 384) * 8


def of_run(sharding: Sharding | None = None, peft_config: Any = None, **overrides: Any) -> Any:
    """What is in memory in each phase, by its name."""
    [(found, _)] = predict(Models(saved(llama()), peft_config), settings(**overrides), [sharding or Sharding()])
    return {phase.phase: phase for phase in found}


def test_weights_gradients_and_optimizer_are_counted_to_the_byte():
    found = measure(Models(saved(llama())), settings())
    # The critic has the decoder and a head of 128. Rotary frequencies are no weights: 16 of them, twice a model.
    critic, buffers = WEIGHTS - VOCABULARY * 128 + 128, 2 * 16 * 4
    assert found.weights == {name: 4 * WEIGHTS + buffers for name in ("policy", "reference")} | {
        "critic": 4 * critic + buffers
    }
    assert found.gradients == 4 * found.elements == 4 * (WEIGHTS + critic)
    moments, offloaded = phases(found, settings(), Sharding())
    backward, step = moments[-2:]
    assert step.optimizer == 8 * found.elements and backward.gradients == step.gradients == found.gradients
    assert offloaded == 0
    shared = of_run(None, lora(), critic_layout="shared")["score"]
    assert shared.optimizer == 8 * (ADAPTER + 128)


@pytest.mark.parametrize("command", ["sft", "reward"])
@pytest.mark.parametrize("flags", [[], ["--use_peft", "--lora_r", "8"], ["--use_peft", "--dtype", "bfloat16"]])
def test_supervised_training_takes_the_memory_that_its_models_need(command, flags, capsys):
    names = ["--model_name_or_path", saved(llama()), "--dataset_name", "none", "--output_dir", "none", *flags]
    sizes = ["--max_length", "64", "--per_device_train_batch_size", "4", "--json", "--device_gib", "2"]
    assert main([command, *names, *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    (phase,) = found["phases"]
    auto_class = AutoModelForCausalLM if command == "sft" else AutoModelForSequenceClassification
    dtype = torch.bfloat16 if "bfloat16" in flags else torch.float32
    model = auto_class.from_config(llama(pad_token_id=0, num_labels=1), dtype=dtype)
    if flags:
        config = LoraConfig(
            r=8 if "8" in flags else 16,
            target_modules="all-linear",
            task_type="CAUSAL_LM" if command == "sft" else "SEQ_CLS",
        )
        model = get_peft_model(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in trained)
    # The head of an estimate has two labels.
    assert phase["gradients"] == pytest.approx(4 * elements, rel=0.005)
    assert phase["optimizer"] == 2 * phase["gradients"]
    live = LiveBytes()
    live.track(model.state_dict())
    assert phase["weights"] == pytest.approx(live.live, rel=0.01)
    live.track([parameter.grad for parameter in trained if parameter.grad is not None])
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(5, 60, (4 if command == "sft" else 8, 64))
    with live:
        labels = ids if command == "sft" else None
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, labels=labels)
        (output.logits.float().sum() if labels is None else output.loss).backward()
    assert found["peak"] - phase["optimizer"] - phase["gradients"] == pytest.approx(live.peak, rel=0.1)
    assert found["fits"] and found["limit"] == GIB


@pytest.mark.parametrize("optimizer", ["adafactor", "sgd", "adamw_8bit"])
def test_the_memory_of_an_optimizer_other_than_adamw_is_not_estimated(optimizer):
    names = ["--model_name_or_path", saved(llama()), "--dataset_name", "none", "--output_dir", "none"]
    with pytest.raises(ValueError, match=f"optim is '{optimizer}', .*; set it to adamw_torch or adamw_torch_fused"):
        main(["sft", *names, "--optim", optimizer])


def test_four_bits_shrink_the_linear_layers_of_the_base():
    layout = {"critic_layout": "shared", "use_cpu": False, "dtype": "bfloat16"}
    whole, packed = (of_run(None, lora(), load_in_4bit=four, **layout)["score"].weights for four in (False, True))
    # Half a byte and a float32 scale for each 64 weights, in place of two bytes.
    assert whole - packed == LAYERS * LAYER * (2 - 0.5 - 4 / 64)


@pytest.mark.parametrize(
    ("stage", "weights", "between", "optimizer"), [(0, 1, 1, 8), (1, 1, 0, 6), (2, 1, 0, 6), (3, 0.5, 0.5, 6)]
)
def test_engines_share_out_weights_gradients_and_optimizer(stage, weights, between, optimizer):
    layout = {"critic_layout": "shared", "reference": "none", "kl_coef": 0.0}
    found = of_run(Sharding(2, stage), **layout)
    elements = WEIGHTS + 128
    step = found["optimizer step"]
    assert step.weights == pytest.approx(weights * 4 * elements, rel=1e-4)
    assert found["score"].gradients == between * 4 * elements
    # DDP replicates both moments; ZeRO shares them out with a master copy: 12 / 2.
    assert step.optimizer == optimizer * elements
    # ZeRO 3 gathers the policy to sample and for each pass.
    for phase in ("prefill", "sampling", "score", "log-probs", "backward"):
        assert (found[phase].weights > step.weights) == (stage == 3)


@pytest.mark.proof
def test_the_cache_holds_keys_and_values_of_every_layer():
    # Two key-value heads of 32, keys and values of 4 bytes.
    column = 2 * 32 * 2 * 4 * LAYERS
    for overrides, rows, columns in (
        ({}, 9, 64),
        ({"generation_backend": "generate"}, 8, 64),
        # On an accelerator a multiple of 256 columns.
        ({"use_cpu": False}, 9, 256),
        # Two slots more: what all prompts begin with, and a prompt whose other samples wait.
        ({"num_return_sequences": 2, "adv_estimator": "rloo"}, 10, 64),
    ):
        args = settings(**overrides)
        assert measure(Models(saved(llama())), args).kv_cache == rows * columns * column, overrides


def test_a_micro_batch_has_the_tokens_of_its_budget():
    # Rows have at most 16 + 48 tokens; 8 rows in an optimizer step, 4 in a micro-batch.
    for overrides, processes, rows, tokens in (
        ({}, 1, 4, 256),
        ({"step_batch_size": 6}, 1, 4, 256),
        ({}, 4, 2, 128),
        ({"max_tokens_per_micro_batch": 160}, 1, 3, 160),
        ({"max_tokens_per_micro_batch": 9999}, 1, 8, 512),
    ):
        assert largest_micro_batch(settings(**overrides), processes) == (rows, tokens), overrides


@pytest.mark.proof
def test_a_vllm_server_has_its_share_of_the_device_while_it_samples():
    models, vllm = Models(saved(llama())), {"generation_backend": "vllm"}
    ((own, _),) = predict(models, settings(), [Sharding()])
    with_server = settings(**vllm, vllm_gpu_memory_utilization=0.25)
    ((beside, _),) = predict(models, with_server, [Sharding()], device_bytes=4000.0)
    ((elsewhere, _),) = predict(
        models, settings(**vllm, vllm_urls=["http://127.0.0.1:1"]), [Sharding()], device_bytes=4e3
    )
    for mine, server, url in zip(own, beside, elsewhere, strict=True):
        if mine.phase in ("prefill", "sampling"):
            # A quarter of 4000 bytes.
            assert (server.kv_cache, server.activations, url.kv_cache) == (1000.0, 0.0, 0.0)
            assert server.weights == mine.weights
        else:
            assert mine == server == url


@pytest.mark.proof
def test_replies_are_read_by_all_rows_at_once():
    args = settings(response_len=128)
    plain, replies = (measure(Models(saved(llama())), args, replies=r).prefill for r in (False, True))
    # At least the states of every row between two layers: 8 rows of 127 tokens instead of 16, of 128 numbers.
    assert replies - plain > 8 * (127 - 16) * 128 * 4


ON_A_DEVICE = {"use_cpu": False}


@pytest.mark.proof
def test_an_offloaded_reference_is_on_the_device_for_the_log_probs_alone():
    copied, offloaded = (of_run(reference=choice, **ON_A_DEVICE) for choice in ("copy", "copy_offloaded"))
    for phase in PHASES:
        own = 0 if phase == "log-probs" else 4 * WEIGHTS + 2 * 16 * 4
        assert copied[phase].weights - offloaded[phase].weights == own, phase
    # Host memory is the device of a run on the CPU.
    assert of_run(reference="copy_offloaded") == of_run(reference="copy")


@pytest.mark.proof
def test_what_bounds_a_pass_bounds_its_memory():
    plain = of_run()
    # A process has half the rows, and its sampler half the slots but the one for what all prompts begin with.
    shared = of_run(Sharding(2))
    assert shared["sampling"].kv_cache * 9 == plain["sampling"].kv_cache * 5
    assert 0.4 < shared["prefill"].activations / plain["prefill"].activations < 0.6
    # The logits of a chunk of tokens do not shrink.
    assert shared["log-probs"].activations < plain["log-probs"].activations
    at_once = of_run(rollout_per_device_batch_size=ROWS // 2)["prefill"]
    assert (at_once.activations, at_once.kv_cache) == (shared["prefill"].activations, shared["prefill"].kv_cache)
    # Of all 8 * 48 tokens the logits are in memory, where it was 64.
    more = of_run(logprob_chunk_size=8 * 48)["log-probs"].activations
    assert more > 8 * 48 * VOCABULARY * 4 > plain["log-probs"].activations
    # `generate` reads a prompt for each of its samples.
    group = {"num_return_sequences": 4, "adv_estimator": "rloo"}
    once, again = (of_run(generation_backend=kind, **group)["prefill"] for kind in ("slots", "generate"))
    assert again.activations > 3 * once.activations


@pytest.mark.proof
def test_bfloat16_is_a_cast_under_autocast_and_the_weights_under_deepspeed():
    layout = {"critic_layout": "shared", "reference": "none", "kl_coef": 0.0}
    plain, autocast = (of_run(bf16=bf16, **layout) for bf16 in (False, True))
    assert plain["score"].weights == autocast["score"].weights
    # The casts of all layers and the head are kept while a rollout is sampled.
    assert autocast["sampling"].activations > 2 * (LAYERS * LAYER + VOCABULARY * 128)
    buffers = 2 * 16 * 4
    zero = of_run(Sharding(2, 1), bf16=True, **layout)["score"]
    assert zero.weights - buffers == (plain["score"].weights - buffers) / 2 == 2 * (WEIGHTS + 128)
    # Twelve bytes for each weight of this process's half, whatever the weights are.
    assert zero.optimizer == 12 / 2 * (WEIGHTS + 128)


def by_hand(sharding: Sharding, **overrides: Any) -> tuple[dict[str, Any], float]:
    """The phases of a run of two billion weights, of which a thousand train, in float32."""
    weights = {"policy": 8e9, "critic": 8e9}
    measured = Measured(weights, gradients=4000.0, elements=1000.0, layer=7e7, backward=5.0)
    found, offloaded = phases(measured, settings(**overrides), sharding)
    return {phase.phase: phase for phase in found}, offloaded


def test_zero_3_gathers_at_most_a_billion_weights_or_one_layer():
    adapter = {"critic_layout": "adapter"}
    for overrides, gathered, updating in (
        ({}, 4e9, 4e9),
        ({"bf16": True}, 2e9, 2e9),
        # The passes of the critic's own steps have an order that can be recorded.
        (adapter, 7e7, 4e9),
        ({**adapter, "critic_epochs": None}, 7e7, 7e7),
    ):
        found, _ = by_hand(Sharding(4, 3), **overrides)
        assert found["optimizer step"].weights == 16e9 / 4
        assert found["log-probs"].weights == 16e9 / 4 + gathered
        assert found["backward"].weights == 16e9 / 4 + updating
        assert found["sampling"].weights == 16e9 / 4 + 8e9


def test_what_is_offloaded_is_in_host_memory():
    # A quarter of 1000 weights on each process: 12 bytes of optimizer and 4 of gradient; buckets of 100 elements.
    moved = {"offload_optimizer": True}
    for stage, backward in ((1, 4000 + 800), (2, 1000 + 1600), (3, 400)):
        found, offloaded = by_hand(Sharding(4, stage, 100, **moved), **ON_A_DEVICE)
        assert offloaded == 250 * (12 + 4)
        assert found["backward"].gradients == backward and found["optimizer step"].optimizer == 0
        # On the CPU nothing moves.
        assert by_hand(Sharding(4, stage, 100, **moved)) == by_hand(Sharding(4, stage, 100))
    found, offloaded = by_hand(Sharding(4, 3, offload_weights=True), **ON_A_DEVICE)
    assert offloaded == 16e9 / 4 and found["optimizer step"].weights == 0
    assert by_hand(Sharding(4, 2, offload_weights=True), **ON_A_DEVICE)[1] == 0


def test_offloaded_models_are_in_host_memory_and_on_the_device_one_at_a_time():
    weights = {"policy": 8e9, "reference": 6e9, "teacher": 4e9}
    measured = Measured(weights, gradients=4000.0, elements=1000.0, layer=7e7)
    teacher = {"teacher_model_name_or_path": "teacher", "teacher_offloaded": True}
    args = settings(reference="copy_offloaded", **teacher, **ON_A_DEVICE)
    # ZeRO 3 shards them too.
    for sharding, on_host in ((Sharding(), 10e9), (Sharding(4, 2), 10e9), (Sharding(4, 3), 10e9 / 4)):
        assert phases(measured, args, sharding)[1] == on_host
    found, _ = phases(measured, args, Sharding())
    assert {phase.phase: phase.weights for phase in found} == dict.fromkeys(PHASES, 8e9) | {"log-probs": 14e9}


def test_fsdp_shards_nothing_over_one_process():
    assert by_hand(Sharding(fsdp=True)) == by_hand(Sharding())


def test_fsdp_shards_all_but_a_cached_critic():
    # All of it trains, in float32.
    measured = Measured({"policy": 800.0, "critic": 80.0}, gradients=880.0, elements=220.0, layer=0.0)
    for critic, gradients, options in (
        (20, 220, {"critic_layout": "separate"}),
        # In its steps, the policy has no gradients.
        (80, 200, {"critic_layout": "cached"}),
    ):
        step = phases(measured, settings(**options), Sharding(4, fsdp=True))[0][-1]
        assert (step.weights, step.gradients, step.optimizer) == (200 + critic, gradients, 400 + 2 * critic)


def test_the_states_that_a_cached_critic_reads_wait_in_host_memory():
    models, cached = Models(saved(llama())), {"critic_layout": "cached", "critic_width": 64}
    [on_cpu] = predict(models, settings(**cached), [Sharding()])
    [on_device] = predict(models, settings(**cached, **ON_A_DEVICE), [Sharding()])
    states = ROWS * RESPONSE * WIDE["hidden_size"] * 4
    assert (on_cpu.on_host, on_device.on_host) == (0, states)
    for phase, other in zip(on_cpu.phases, on_device.phases, strict=True):
        assert phase.activations - other.activations == (0 if phase.phase in ("prefill", "optimizer step") else states)


@pytest.mark.parametrize("kind", [proved("mixtral"), "qwen3_moe", proved("gemma2")])
def test_other_architectures_can_be_measured(kind):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    own = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": experts, "gemma2": {"head_dim": 32}}[kind]
    config = AutoConfig.for_model(kind, **WIDE, **own, vocab_size=512)
    assert all(phase.total > 0 for phase in predict(Models(saved(config)), settings(), [Sharding()])[0][0])


def test_the_live_bytes_are_those_of_the_storages_that_live():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        view = first[:10].view(2, 5)
        assert live.live == 4000
        second = first + 1
        del first
        assert live.live == 8000  # the view holds the whole storage
        del view, second
        assert (live.live, live.peak) == (0, 8000)
        live.reset_peak()
        assert live.peak == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model of one layer, to be read only."""
    path = tmp_path_factory.mktemp("model")
    llama(num_hidden_layers=1).save_pretrained(path)
    return str(path)


def estimated(*flags: str) -> dict[str, Any]:
    return estimate(*parse_args([EstimateArguments, LoraArguments, PPOConfig], flags))


FLAGS = ("--use_cpu", "--query_len=16", "--response_len=48", "--rollout_batch_size=8", "--step_batch_size=8")


def test_the_command_prints_each_phase_and_adds_up(folder, capsys):
    main(["--model_name_or_path", folder, *FLAGS])
    text = capsys.readouterr().out
    assert all(phase in text for phase in PHASES) and "peak: " in text
    main(["--model_name_or_path", folder, *FLAGS, "--json"])
    result = json.loads(capsys.readouterr().out)
    for phase in result["phases"]:
        assert phase["total"] == pytest.approx(sum(phase[cause] for cause in CAUSES))
    assert result["peak"] == max(phase["total"] for phase in result["phases"])


HALF = "dtype: bfloat16, bf16: true"
ON_ONE_BASE = f"critic_layout: adapter, {HALF}"


def test_what_does_not_fit_gets_three_changes_and_their_sum(folder):
    run = ("--model_name_or_path", folder, *FLAGS)
    result = estimated(*run, "--device_gib=1.5")
    # On a CPU nothing is reserved.
    assert result["fits"] and result["limit"] == 1.5 * 2**30 and "changes" not in result and "\nfits: " in table(result)
    small = ("--model_name_or_path", folder, "--device_gib=1.02", *FLAGS[1:], "--step_per_device_batch_size=8")
    result = estimated(*small)
    changes = result["changes"]
    texts = [change["change"] for change in changes]
    assert texts[0] == f"use_peft: true, {ON_ONE_BASE}"
    assert texts[1:3] == ["step_per_device_batch_size: 1", "logprob_chunk_size: 256"]
    assert texts[3] == ", ".join(texts[:3])
    assert [change["peak"] for change in changes[:3]] == sorted(change["peak"] for change in changes[:3])
    assert changes[3]["peak"] == min(change["peak"] for change in changes)
    assert [change["fits"] for change in changes] == [c["peak"] <= (1.02 - 1) * 2**30 for c in changes]
    assert "(fits)" in table({**result, "changes": [{**changes[3], "fits": True}]})


def test_rewards_a_value_model_and_environments_are_counted(folder, tmp_path):
    run = ("--model_name_or_path", folder, *FLAGS, "--critic_layout=separate")
    plain = {phase["phase"]: phase for phase in estimated(*run)["phases"]}
    assert plain["score"]["activations"] == 0
    llama(num_hidden_layers=1, num_labels=1).save_pretrained(tmp_path / "reward")
    rewarded = estimated(*run, "--reward_model_name_or_path", str(tmp_path / "reward"))["phases"]
    # The reward is the decoder with a head of 128, as the critic is.
    decoder = LAYER + 3 * 128 + VOCABULARY * 128 + 128
    buffers = 2 * 16 * 4
    assert rewarded[0]["weights"] - plain["prefill"]["weights"] == 4 * decoder + buffers
    assert rewarded[2]["activations"] > 0
    llama(num_hidden_layers=2, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "value")
    larger = estimated(*run, "--value_model_name_or_path", str(tmp_path / "value"))["phases"]
    assert larger[0]["weights"] - plain["prefill"]["weights"] == 4 * (LAYER + 2 * 128)
    answered = estimated(*run, "--environments", "env.py:Env")["phases"]
    assert answered[0]["activations"] > plain["prefill"]["activations"]


def test_the_estimate_has_the_critic_that_the_run_would_have(folder):
    large = saved(tiny_config("llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=10))
    for model, chosen, passes in ((folder, "separate", 4), (large, "cached", 8)):
        run = ("--model_name_or_path", model, *FLAGS)
        layouts = {layout: estimated(*run, f"--critic_layout={layout}")["peak"] for layout in ("separate", "cached")}
        assert layouts["separate"] != layouts["cached"]
        assert estimated(*run)["peak"] == estimated(*run, f"--critic_epochs={passes}")["peak"] == layouts[chosen]


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        (["--use_peft"], ON_ONE_BASE),
        proved(["--use_peft", "--dtype=bfloat16"], "critic_layout: adapter, bf16: true"),
        proved(["--use_peft", "--critic_layout=adapter"], "dtype: bfloat16, bf16: true"),
        proved(["--use_peft", "--critic_layout=shared"], "dtype: bfloat16, bf16: true"),
        proved(["--use_peft", "--reference=copy"], f"{ON_ONE_BASE}, reference: auto"),
        proved(["--adv_estimator=rloo", "--num_return_sequences=2"], f"use_peft: true, {HALF}"),
        proved(["--use_peft", "--max_tokens_per_micro_batch=128"], "logprob_chunk_size: 256"),
        proved(["--use_peft", "--critic_layout=adapter", "--dtype=bfloat16", "--bf16"], "gradient_checkpointing: true"),
        (
            ["--use_peft", "--query_len=448", "--response_len=1", "--rollout_batch_size=32", "--bf16"],
            "rollout_per_device_batch_size: 8",
        ),
    ],
)
def test_the_changes_that_save_most_are_found_from_any_start(folder, flags, change):
    run = ("--model_name_or_path", folder, *FLAGS[1:], *flags)
    result = estimated(*run, "--device_gib=1.001")
    found = {entry["change"]: entry["peak"] for entry in result["changes"]}
    assert change in found and max(found.values()) < result["peak"]
    # The run with the change has the peak that is promised.
    settings = ["--" + setting.replace(": ", "=") for setting in change.split(", ")]
    assert estimated(*run, *settings)["peak"] == found[change]


def test_a_run_that_nothing_shrinks_gets_no_advice(folder):
    flags = "--use_peft --critic_layout=adapter --dtype=bfloat16 --bf16 --gradient_checkpointing".split()
    least = "--step_per_device_batch_size=1 --rollout_per_device_batch_size=1 --logprob_chunk_size=1".split()
    result = estimated(
        "--model_name_or_path", folder, *FLAGS[1:], *flags, *least, "--load_in_4bit", "--device_gib=1.001"
    )
    assert result["changes"] == [] and "after each change" not in table(result)


def test_several_processes_get_the_peak_of_each_zero_stage(folder):
    run = ("--model_name_or_path", folder, *FLAGS, "--num_processes=2")
    result = estimated(*run)
    peaks = result["peak_by_zero_stage"]
    assert list(peaks) == ["0", "1", "2", "3", "fsdp"]
    assert peaks["0"] == result["peak"] and "ZeRO 3" in table(result) and "(FSDP2)" in table(result)
    assert peaks["3"] < peaks["1"] < result["peak"] and peaks["fsdp"] < peaks["2"]
    for flag, key in (("accelerate_config=fsdp", "fsdp"), ("fsdp=true", "fsdp"), ("accelerate_config=zero2", "2")):
        assert estimated(*run, f"--{flag}")["peak"] == peaks[key]
    # A launch configuration or the run's option says what is done, whatever the stage.
    for flag, key in (("accelerate_config=ddp", "0"), ("fsdp=true", "fsdp")):
        result = estimated(*run, f"--{flag}", "--zero_stage=3")
        assert (result["peak"], result["zero_stage"]) == (peaks[key], 0)


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [("--teacher_dtype=4bit", ["0", "1", "2"]), ("--reference=copy_offloaded", ["0", "1", "2", "3"])],
)
def test_only_shardings_that_the_options_allow_are_listed(folder, flag, allowed):
    run = ("--model_name_or_path", folder, *FLAGS, "--num_processes=2", "--teacher_model_name_or_path", folder)
    assert list(estimated(*run, flag)["peak_by_zero_stage"]) == allowed


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "model_name_or_path is not set"),
        (["--model_name_or_path=x", "--num_processes=0"], "num_processes is 0; "),
        (["--model_name_or_path=x", "--zero_stage=4"], "zero_stage is 4; "),
        (["--model_name_or_path=x", "--device_gib=0.5"], "device_gib is 0.5; "),
        (["--model_name_or_path=/no/such/folder"], "model_name_or_path is '/no/such/folder', neither"),
    ],
)
def test_an_estimate_that_cannot_be_made_is_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        estimated(*flags)


def test_adapters_that_do_not_go_together_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="reward_adapter is .* but the policy has no adapters; give peft_config"):
        estimated("--model_name_or_path", folder, *FLAGS, "--reward_adapter", folder)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=folder)
    config.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="model .*adapter' is an adapter; leave peft_config"):
        estimated("--model_name_or_path", str(tmp_path / "adapter"), *FLAGS, "--use_peft")
    with pytest.raises(ValueError, match="4-bit weights cannot all be trained"):
        four = ("--load_in_4bit", "--critic_layout=shared", "--reference=none", "--kl_coef=0")
        estimated("--model_name_or_path", folder, *FLAGS[1:], *four)


def test_an_adapter_is_trained_on_its_base(folder, tmp_path):
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=folder)
    config.inference_mode = True
    config.save_pretrained(str(tmp_path / "adapter"))
    flags = (*FLAGS, "--critic_layout=shared")
    fresh = estimated("--model_name_or_path", folder, *flags, "--use_peft", "--lora_r=8")
    found = estimated("--model_name_or_path", str(tmp_path / "adapter"), *flags)
    assert found["phases"] == fresh["phases"]
