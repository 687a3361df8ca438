"""Memory estimates against live tensors of real runs and against arithmetic by hand; the changes that save memory."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.cli.estimate_memory import main
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.estimate_memory.estimator import EstimateArguments, MemoryEstimator, estimate
from alpaca_ppo.estimate_memory.fake_models import Models
from alpaca_ppo.estimate_memory.live_bytes import LiveBytes
from alpaca_ppo.estimate_memory.measure import measure
from alpaca_ppo.estimate_memory.phases import CAUSES, PHASES, peak_by_phase, predict, sizes_of
from alpaca_ppo.estimate_memory.recommend import Settings, all_changes, changes, single_changes
from alpaca_ppo.estimate_memory.sharding import Sharding
from alpaca_ppo.estimate_memory.table import table
from tests.tiny_models import tiny_config, tiny_tokenizer

QUERY, RESPONSE, ROWS, VOCABULARY = 16, 48, 8, 4096
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}


def llama(**overrides: Any) -> Any:
    """Two million weights. The large vocabulary keeps a random model from ending responses early."""
    return tiny_config("llama", vocab_size=VOCABULARY, **{**WIDE, **overrides})


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


def measured_peaks(args: PPOConfig, peft_config: LoraConfig | None, config: Any = None) -> dict[str, int]:
    """Bytes of the second PPO step, at whose start the optimizer's state already exists."""
    return trained(args, peft_config, config).peaks


def trained(args: PPOConfig, peft_config: LoraConfig | None, config: Any = None, value: Any = None) -> MeasuredTrainer:
    """A trainer that has made two steps; its critic starts from a language model of the configuration `value`."""
    live = LiveBytes()
    live.track_all()
    before = live.live
    words = [f"w{10 + i % 50}" for i in range(args.query_len)]
    # Every other prompt is a little shorter, so that there is padding.
    prompts = [{"prompt": " ".join(words[i % 2 :])} for i in range(2 * ROWS)]
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
    live.track_all()
    with live:
        trainer.train()
    return trainer


def predicted_peaks(models: Models, args: PPOConfig, sharding: Sharding) -> dict[str, float]:
    """What `measured_peaks` measures."""
    return by_half({m.phase: m.total for m in predict(models, args, sharding)})


def by_half(moments: dict[str, float]) -> dict[str, float]:
    """The peaks of rollout and update from those of the phases."""
    return {
        "rollout": max(moments[phase] for phase in ("prefill", "sampling", "score", "log-probs")),
        "update": max(moments[phase] for phase in ("backward", "optimizer step")),
    }


@pytest.fixture
def fresh_state():
    """Configurations differ in precision, of which Accelerate keeps one per process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize(
    ("with_lora", "overrides"),
    [
        (False, {"reference": "copy"}),
        (False, {"reference": "copy", "gradient_checkpointing": True}),
        (False, {"reference": "copy", "step_per_device_batch_size": ROWS}),
        # Three rows of 32 tokens, so three micro-batches of the eight.
        (False, {"reference": "copy", "max_tokens_per_micro_batch": 96}),
        (False, {"critic_layout": "shared"}),
        (False, {"adv_estimator": "rloo", "num_return_sequences": 4}),
        (False, {"adv_estimator": "rloo", "num_return_sequences": 4, "generation_backend": "generate"}),
        (True, {"reference": "adapter_off"}),
        (True, {"critic_layout": "adapter"}),
        ("dora", {"critic_layout": "adapter", "gradient_checkpointing": True, "dtype": "bfloat16"}),
        (True, {"critic_layout": "adapter", "gradient_checkpointing": True, "dtype": "bfloat16"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else f"lora={value}",
)
def test_a_step_takes_the_estimated_memory(tmp_path, fresh_state, with_lora, overrides):
    AcceleratorState._reset_state(True)
    # Sampling, token by token, would take most of the time.
    overrides = {**overrides, "response_len": 16}
    args = settings(output_dir=str(tmp_path), **overrides)
    torch.manual_seed(0)
    peft_config = lora(use_dora=with_lora == "dora") if with_lora else None
    predicted = predicted_peaks(Models(llama(), peft_config), args, Sharding())
    measured = measured_peaks(args, peft_config)
    ratios = {name: predicted[name] / measured[name] for name in predicted}
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), (ratios, predicted, measured)


def test_a_critic_of_another_size_takes_the_estimated_memory(tmp_path, fresh_state):
    AcceleratorState._reset_state(True)
    args = settings(output_dir=str(tmp_path), response_len=16)
    value = llama(hidden_size=256, num_hidden_layers=2)
    # As a folder of the model names it.
    value.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    predicted = predicted_peaks(Models(llama(), value=value), args, Sharding())
    measured = trained(args, None, value=value).peaks
    ratios = {name: predicted[name] / measured[name] for name in predicted}
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), (ratios, predicted, measured)


def test_no_change_is_proposed_to_a_layout_that_a_run_would_refuse():
    cases: list[tuple[dict[str, Any], bool, list[str]]] = [
        ({}, False, ["shared"]),
        ({}, True, ["adapter", "shared"]),
        ({"critic_epochs": 2}, False, []),
        ({"critic_epochs": 2}, True, ["adapter"]),
        ({"init_value_with_reward": True}, False, []),
    ]
    for options, lora, layouts in cases:
        run = Settings(settings(**options), LoraArguments(use_peft=lora), Sharding(), False)
        proposed = [change for strengths in changes(run) for change in strengths if "critic_layout" in change]
        assert proposed == [{"critic_layout": layout} for layout in layouts]
        # None of them is a combination that the configuration refuses.
        single_changes(run, lambda settings: 2.0, 1.0)


# Embedding and head have 4096 * 128 weights each. A layer: q and o 128 * 128, k and v 128 * 64, three of 128 * 256.
EMBEDDING, LINEAR, NORMS = 4096 * 128, 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256), (2 * 4 + 1) * 128
# q and o 128 + 128, k and v 128 + 64, gate, up and down 128 + 256, times rank 8.
ADAPTER = 4 * (2 * 256 + 2 * 192 + 3 * 384) * 8


def test_sampling_casts_trained_weights_once():
    chosen = settings(bf16=True, use_cpu=False)
    found = measure(Models(llama()), chosen, sizes_of(chosen, 1))
    # Autocast keeps the casts of all linear layers and of the head, of 2 bytes a weight.
    assert found["policy/sampling_cast"] == 2 * (EMBEDDING + LINEAR)


def test_an_offloaded_reference_stays_where_it_is_on_a_cpu(tmp_path, fresh_state):
    """The reference is a seventh of the update's peak."""
    AcceleratorState._reset_state(True)
    layout = {"reference": "copy_offloaded", "critic_layout": "shared"}
    args = settings(output_dir=str(tmp_path), **layout)
    predicted, measured = predicted_peaks(Models(llama()), args, Sharding()), measured_peaks(args, None)
    ratios = {name: predicted[name] / measured[name] for name in predicted}
    assert all(0.95 < ratio < 1.1 for ratio in ratios.values()), (ratios, predicted, measured)


@pytest.mark.parametrize("recomputed", [False, True])
def test_long_sequences_train_without_a_mask_of_all_pairs(tmp_path, fresh_state, recomputed):
    """At 1056 tokens a mask (L, L) would be a third of the peak; a real pass has none."""
    sizes = {"query_len": 1024, "response_len": 32, "rollout_per_device_batch_size": 2, "step_per_device_batch_size": 2}
    sizes |= {"rollout_batch_size": 2, "step_batch_size": 2, "total_episodes": 4}
    layout = {"critic_layout": "shared", "gradient_checkpointing": recomputed}
    args = settings(output_dir=str(tmp_path), **sizes, **layout)
    config = llama(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048)
    measured = measured_peaks(args, None, config)
    predicted = predicted_peaks(Models(config), args, Sharding())
    ratios = {name: predicted[name] / measured[name] for name in predicted}
    # The prompts' pass is estimated with rows of their own, and the cache with a slot for what all prompts begin with.
    assert 0.9 < ratios["update"] < 1.1 and 0.9 < ratios["rollout"] < 1.2, (ratios, predicted, measured)


def test_the_live_bytes_are_those_of_the_storages_that_live():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        assert live.live == 4000
        view = first[:10].view(2, 5)
        assert live.live == 4000
        second = first + 1
        assert live.live == 8000
        del first
        assert live.live == 8000  # the view holds the whole storage
        del view, second
        assert (live.live, live.peak) == (0, 8000)
        live.reset_peak()
        assert live.peak == 0


def test_autograd_keeps_a_result_alive_that_python_has_lost():
    weight = torch.ones(1000, requires_grad=True)
    live = LiveBytes()
    live.track(weight)
    with live:
        loss = (weight.exp().exp()).sum()
        # exp saves its own result: two of 4000 bytes, and the sum's 4.
        assert live.live == 4000 + 2 * 4000 + 4
        loss.backward()
        del loss
        assert live.live == 4000 + 4000


def test_weights_are_counted_to_the_byte():
    # Embedding and head: 2 * 4096 * 128. A layer: q and o 128 * 128, k and v 128 * 64, three of 128 * 256, two norms.
    weights = 2 * 4096 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128) + 128
    found = measure(Models(llama()), settings(), sizes_of(settings(), 1))
    assert found["policy/gradients"] == 4 * weights
    # The critic has the decoder and a head of 128.
    assert found["critic/gradients"] == 4 * (weights - 4096 * 128 + 128)
    # Rotary frequencies are no weights: 16 of them, twice.
    assert found["reference/weights"] == found["policy/weights"] == 4 * weights + 2 * 16 * 4


@pytest.mark.parametrize("kind", ["c51", "hl_gauss"])
def test_a_critic_of_bins_has_logits_and_a_bias_for_each(kind):
    scalar, bins = (
        measure(Models(llama()), chosen, sizes_of(chosen, 1))
        for chosen in (settings(), settings(critic=kind, num_atoms=101, value_support=[-1.0, 10.0]))
    )
    # 128 weights and a bias for each of 101 atoms or bins, in place of 128 weights.
    assert bins["critic/gradients"] - scalar["critic/gradients"] == 4 * (101 * 129 - 128)


def test_the_cache_holds_keys_and_values_of_every_layer():
    decoded, in_slots, on_device = (
        measure(Models(llama()), chosen, sizes_of(chosen, 1))
        for chosen in (settings(generation_backend="generate"), settings(), settings(use_cpu=False))
    )
    # 8 rows, 2 key-value heads of 32, keys and values of 4 bytes, 4 layers, 16 + 47 columns.
    assert decoded["policy/kv_cache"] == 8 * 2 * 32 * 2 * 4 * 4 * (16 + 47)
    # A slot more, for what all prompts begin with; 16 + 48 columns, which a layer that grows has twice.
    assert in_slots["policy/kv_cache"] == 4 * in_slots["policy/kv_layer"] == 9 * 2 * 32 * 2 * 4 * 4 * (16 + 48)
    # On an accelerator a multiple of 256 columns, once and for all.
    assert (on_device["policy/kv_cache"], on_device["policy/kv_layer"]) == (9 * 2 * 32 * 2 * 4 * 4 * 256, 0.0)


def test_slots_have_the_rows_of_the_limit_and_one_for_samples_that_wait():
    args = settings(num_return_sequences=3, adv_estimator="rloo")
    found = measure(Models(llama()), args, sizes_of(args, 1))
    # Eight rows of three prompts, and two more.
    assert found["policy/kv_cache"] == 10 * 2 * 32 * 2 * 4 * 4 * (16 + 48)


def test_a_micro_batch_has_the_tokens_of_its_budget():
    # Rows have at most 16 + 48 tokens; 8 rows in an optimizer step, 4 in a micro-batch.
    for overrides, processes, rows, tokens in (
        ({}, 1, 4, 256),
        ({"step_batch_size": 6}, 1, 4, 256),
        ({}, 4, 2, 128),
        ({"max_tokens_per_micro_batch": 160}, 1, 3, 160),
        ({"max_tokens_per_micro_batch": 9999}, 1, 8, 512),
        # With padding on one process, rows that are as many in each micro-batch, unless the limit is one of tokens.
        ({"padding_free": False, "step_batch_size": 6}, 1, 3, 192),
        ({"padding_free": False, "step_batch_size": 6}, 2, 3, 192),
        ({"padding_free": False, "max_tokens_per_micro_batch": 160}, 1, 3, 160),
        ({"padding_free": False, "max_tokens_per_micro_batch": 9999}, 1, 8, 512),
    ):
        sizes = sizes_of(settings(**overrides), processes)
        assert (sizes.micro_rows, sizes.micro_tokens) == (rows, tokens), overrides
    few, many = (
        measure(Models(llama()), args, sizes_of(args, 1))
        for args in (settings(max_tokens_per_micro_batch=128), settings(max_tokens_per_micro_batch=192))
    )
    assert many["policy/train.saved"] / few["policy/train.saved"] == pytest.approx(1.5, rel=0.05)


def test_generate_computes_every_sample_s_prompt_and_keeps_no_room():
    args = settings(num_return_sequences=4, adv_estimator="rloo")
    ours, theirs = (
        measure(Models(llama()), chosen, sizes_of(args, 1))
        for chosen in (args, replace(args, generation_backend="generate"))
    )
    # As above, with 16 + 47 columns: the last token is not read again.
    assert theirs["policy/kv_cache"] == 8 * 2 * 32 * 2 * 4 * 4 * (16 + 47)
    # 8 rows instead of 2; the mask and other small things are not four times as many.
    assert 3.5 < theirs["policy/prefill"] / ours["policy/prefill"] < 4.1
    # A copy of the logits in float32: 8 rows of 4096.
    assert theirs["policy/choose"] - ours["policy/choose"] >= 8 * VOCABULARY * 4


def test_a_critic_that_starts_from_the_reward_model_has_its_depth():
    args = settings(init_value_with_reward=True)
    deep, measured = llama(num_hidden_layers=9), {}
    for name, reward in (("same", llama()), ("deep", deep)):
        measured[name] = measure(Models(llama(), rewards=(reward,)), args, sizes_of(args, 1))
    # 5 layers more than the policy's 4; a layer as in the count of weights above.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128
    assert measured["deep"]["critic/gradients"] - measured["same"]["critic/gradients"] == 5 * layer * 4
    assert measured["deep"]["policy/gradients"] == measured["same"]["policy/gradients"]


def test_a_critic_that_another_run_saved_brings_its_own_adapter(tmp_path):
    llama().save_pretrained(tmp_path / "policy")
    LoraConfig(r=3, target_modules=["q_proj"]).save_pretrained(tmp_path / "value")
    names = {"model_name_or_path": str(tmp_path / "policy"), "value_model_name_or_path": str(tmp_path / "value")}
    found = {}
    for layout in ("adapter", "shared"):
        args, adapters = settings(critic_layout=layout), LoraArguments(use_peft=True)
        estimator = MemoryEstimator(EstimateArguments(**names), args, lora=True)
        found[layout] = estimator.measurements(Settings(args, adapters, estimator.sharding))["critic/elements"]
    # In each of 4 layers 3 * (128 + 128) weights, and a head of 128.
    assert found == {"adapter": 4 * 3 * 256 + 128, "shared": 128}


def test_a_sliding_layer_caches_its_window_alone():
    config, args = tiny_config("gemma3", sliding_window=8), settings(generation_backend="generate")
    found = measure(Models(config), args, sizes_of(args, 1))
    assert found["policy/kv_cache"] == found["policy/kv_column"] * (8 + 63)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2", "gpt_neox", "opt", "gemma2", "phi", "bloom"])
def test_other_depths_are_linear_in_those_measured(arch):
    names = {"gpt2": "n_layer", "bloom": "n_layer"}
    args = settings(gradient_checkpointing=True)
    with_depth = [
        measure(Models(tiny_config(arch, **{names.get(arch, "num_hidden_layers"): n})), args, sizes_of(args, 1))
        for n in (2, 5)
    ]
    assert with_depth[1]["policy/weights"] > with_depth[0]["policy/weights"] > 0
    assert with_depth[1]["policy/train.saved"] > with_depth[0]["policy/train.saved"]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_measurements_of_few_layers_are_those_of_all(monkeypatch, layers):
    models, args = Models(tiny_config("qwen2", num_hidden_layers=layers)), settings()
    assert models.policy.layer_types is not None
    extrapolated = measure(models, args, sizes_of(args, 1))
    monkeypatch.setattr("alpaca_ppo.estimate_memory.measure.layers_are_alike", lambda *given: False)
    whole = measure(models, args, sizes_of(args, 1))
    names = whole.keys() - {"policy/layer", "policy/outside"}
    assert {name: extrapolated[name] for name in names} == pytest.approx({name: whole[name] for name in names})


def measurements_of_ones(**changed: float) -> dict[str, float]:
    parts = {
        f"{name}/{kind}.{part}": 0.0
        for name in ("policy", "critic")
        for kind in ("eval", "train")
        for part in ("backbone", "saved", "head", "tail")
    }
    names = (
        "weights",
        "gradients",
        "cast",
        "sampling_cast",
        "largest",
        "hidden",
        "layer",
        "outside",
        "unpacked",
        "prefill",
        "prompt_cache",
        "decode",
        "replies",
        "choose",
        "score",
        "kv_cache",
        "kv_layer",
        "copied",
        "copied_frozen",
        "copied_trained",
        "copied_in_update",
    )
    zero = {f"{name}/{part}": 0.0 for name in ("policy", "critic", "reference") for part in names}
    return {
        **parts,
        **zero,
        "policy/weights": 1.0,
        "critic/weights": 1.0,
        "policy/gradients": 1.0,
        "critic/gradients": 1.0,
        # Of float32, 4 bytes each.
        "policy/elements": 0.25,
        "critic/elements": 0.25,
        "reference/weights": 1.0,
        **changed,
    }


@pytest.mark.parametrize(
    ("processes", "stage", "expected"),
    [
        # weights 3, gradients 2, two moments 4
        (1, 0, 9.0),
        # DDP's buckets: gradients twice
        (4, 0, 11.0),
        # weights 3; gradients 2 / 4, the policy's once more 1 / 4; moments and master weights 6 / 4
        (4, 1, 5.25),
        # as in stage 1: only this process's part of the gradients is left
        (4, 2, 5.25),
        # weights 3 / 4, the reference included; the rest as in stage 2
        (4, 3, 3.0),
    ],
)
def test_zero_shares_out_state_then_gradients_then_all_weights(processes, stage, expected):
    args = settings(step_batch_size=32, rollout_batch_size=32, step_per_device_batch_size=1)
    moments = peak_by_phase(measurements_of_ones(), args, Sharding(processes, stage))
    assert moments[PHASES.index("optimizer step")].total == expected


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        # weights 3, moments 4, gradients and their copies 4, throughout every micro-batch but the first
        (0, 11.0),
        # weights 3, moments and master weights 6 / 4; gradients 2 whole, and this process's part 2 / 4
        (1, 7.0),
        # gradients: earlier ones (2 / 4, zeros 1 / 4), this process's part 2 / 4, zeros for the other model 1 / 4
        (2, 6.0),
        # weights 3 / 4, the gathered weights of the running model 1, gradients 2 / 4, moments and master weights 6 / 4
        (3, 3.75),
    ],
)
def test_zero_holds_in_a_backward_pass_what_deepspeed_holds(stage, expected):
    args = settings(step_batch_size=32, rollout_batch_size=32, step_per_device_batch_size=1)
    moments = peak_by_phase(measurements_of_ones(), args, Sharding(4, stage))
    assert moments[PHASES.index("backward")].total == expected


def test_sampling_shows_its_cache_though_the_prompts_pass_is_higher():
    found = measurements_of_ones(**{"policy/prefill": 9.0, "policy/kv_cache": 2.0, "policy/choose": 3.0})
    found["policy/prompt_cache"] = 0.5
    moments = {m.phase: m for m in peak_by_phase(found, settings(), Sharding())}
    assert (moments["prefill"].activations, moments["prefill"].kv_cache) == (9.0, 0.0)
    assert (moments["sampling"].kv_cache, moments["sampling"].logits) == (2.0, 3.0)
    assert moments["prefill"].total > moments["sampling"].total
    # On an accelerator the cache of slots is whole from the start, in place of the prompts' own, 0.5.
    args = settings(use_cpu=False)
    prefill, *_, update = peak_by_phase(found, args, Sharding())[1:]
    assert (prefill.activations, prefill.kv_cache, update.kv_cache) == (8.5, 2.0, 0.0)
    args = settings(use_cpu=False, generation_backend="generate")
    assert peak_by_phase(found, args, Sharding())[1] == moments["prefill"]


def test_an_offloaded_reference_is_on_the_device_only_during_its_own_pass():
    found = measurements_of_ones() | {f"reference/eval.{part}": 0.0 for part in ("backbone", "saved", "head")}

    def weights(**overrides: Any) -> dict[str, float]:
        args = settings(reference="copy_offloaded", **overrides)
        return {m.phase: m.weights for m in peak_by_phase(found, args, Sharding())}

    assert weights(use_cpu=False) == dict.fromkeys(PHASES, 2.0) | {"log-probs": 3.0}
    # On a CPU, host memory is device memory.
    assert weights() == dict.fromkeys(PHASES, 3.0)


def test_four_bits_shrink_the_linear_layers_of_the_base():
    args = settings(use_cpu=False, critic_layout="adapter", dtype="bfloat16")
    whole, packed = (
        measure(Models(llama(), lora()), chosen, sizes_of(args, 1))
        for chosen in (args, replace(args, load_in_4bit=True))
    )
    linear = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    # 2 bytes become half a byte and 4 bytes per 64 weights; layers are dequantized one at a time, to 2 bytes.
    assert whole["policy/weights"] - packed["policy/weights"] == linear * (2 - 0.5 - 4 / 64)
    assert packed["policy/unpacked"] == 2 * 128 * 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model, to be read only."""
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def each_run_is_measured_once():
    """Commands on the same run have the measurements of the first: they depend on what `measure` is given, alone."""
    found = {}

    def measured(*given: Any, **how: Any) -> dict[str, float]:
        key = repr((given, how))
        if key not in found:
            found[key] = measure(*given, **how)
        return dict(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alpaca_ppo.estimate_memory.estimator.measure", measured)
        yield


def estimated(*flags: str) -> dict[str, Any]:
    return estimate(*parse_args([EstimateArguments, LoraArguments, PPOConfig], flags))


FLAGS = ("--use_cpu", "--query_len=16", "--response_len=48", "--rollout_batch_size=8", "--step_batch_size=8")
SMALL = ("--rollout_per_device_batch_size=1", "--step_per_device_batch_size=1", "--logprob_chunk_size=128")
"""Small passes, which leave few changes to try."""


def test_the_command_prints_each_phase_and_adds_up(folder, capsys):
    main(["--model_name_or_path", folder, *FLAGS])
    text = capsys.readouterr().out
    assert all(phase in text for phase in PHASES) and "peak: " in text
    main(["--model_name_or_path", folder, *FLAGS, "--json"])
    result = json.loads(capsys.readouterr().out)
    for phase in result["phases"]:
        assert phase["total"] == pytest.approx(sum(phase[cause] for cause in CAUSES))
    assert result["peak"] == max(phase["total"] for phase in result["phases"])


def test_the_command_reads_a_run_s_file(folder, tmp_path):
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {folder}\nuse_peft: true\ncritic_layout: adapter\n")
    result = estimated("--config", str(tmp_path / "run.yaml"), *FLAGS)
    assert result["peak"] < estimated("--model_name_or_path", folder, *FLAGS)["peak"] / 1.5


def test_several_processes_get_the_peak_of_each_zero_stage(folder):
    result = estimated("--model_name_or_path", folder, *FLAGS, "--num_processes=2")
    peaks = list(result["peak_by_zero_stage"].values())
    # Stage 2 leaves more behind after a pass than stage 1 if the model is small.
    assert result["peak"] == peaks[0] == max(peaks) and peaks[3] == min(peaks)
    assert "ZeRO 3" in table(result)


def test_a_run_that_fits_gets_no_list_of_changes(folder):
    result = estimated("--model_name_or_path", folder, *FLAGS, "--device_gib=2")
    assert result["fits"] and "changes" not in result and "fits: 2.00 of 2 GiB" in table(result)


def on_device(monkeypatch, folder: str, mib: float, *flags: str) -> dict[str, Any]:
    """The estimate for a device of `mib` MiB."""
    monkeypatch.setattr("alpaca_ppo.estimate_memory.estimator.GIB", 2**20)
    return estimated("--model_name_or_path", folder, *FLAGS, f"--device_gib={mib}", *flags)


def test_single_changes_that_fit_are_marked_and_the_first_is_recommended(folder, monkeypatch):
    before = estimated("--model_name_or_path", folder, *FLAGS)["peak"]
    # A change that saves a single MiB is enough.
    result = on_device(monkeypatch, folder, before / 2**20 - 1)
    first = result["changes"][0]
    assert first["change"] == "gradient_checkpointing: true" and first["fits"] and "all_changes" not in result
    checkpointed = estimated("--model_name_or_path", folder, *FLAGS, "--gradient_checkpointing=true")["peak"]
    assert first["peak"] == checkpointed < before - 2**20
    lines = table(result).splitlines()
    (line,) = [line for line in lines if "gradient_checkpointing" in line]
    assert line.endswith("fits: recommended") and sum("recommended" in line for line in lines) == 1
    assert any(line.endswith("  fits") and "use_peft: true" in line for line in lines)


def test_changes_are_listed_together_where_no_single_one_is_enough(folder, monkeypatch):
    flags = ("--use_peft", "--critic_layout=shared", "--dtype=bfloat16", "--gradient_checkpointing=true")
    least = estimated("--model_name_or_path", folder, *FLAGS, *SMALL, *flags)["peak"] / 2**20
    result = on_device(monkeypatch, folder, least + 0.2, *SMALL)
    assert not result["fits"] and not any(change["fits"] for change in result["changes"])
    together = result["all_changes"]
    assert together["fits"] and together["peak"] <= result["limit"]
    assert {"use_peft: true", "dtype: bfloat16"} < set(together["changes"])
    assert "bf16: false" in together["changes"]
    peak = f"{together['peak'] / 2**30:.2f} GiB with gradient_checkpointing: true; "
    assert f"no single change is enough; all of them together fit ({peak}" in table(result)


def test_a_model_that_is_too_large_with_all_changes_is_reported_as_such(folder, monkeypatch):
    nothing_fits = {"changes": ["bf16: true"], "peak": 3 * 2**30, "fits": False}
    monkeypatch.setattr("alpaca_ppo.estimate_memory.estimator.all_changes", lambda *_: nothing_fits)
    monkeypatch.setattr("alpaca_ppo.estimate_memory.estimator.single_changes", lambda *_: [])
    result = on_device(monkeypatch, folder, 1.5)
    assert "even all of them together do not fit: use a smaller model (3.00 GiB with bf16: true)" in table(result)


def singles(before: PPOConfig, fits: Any, *, use_peft: bool = False, processes: int = 1) -> list[str]:
    """The texts of all single changes, where settings weigh 1 byte if `fits` is True of them and 3 bytes if not."""
    found = single_changes(run_settings(before, use_peft=use_peft, processes=processes), weight(fits), 2.0)
    return [change["change"] for change in found if change["fits"]]


def together(before: PPOConfig, *, use_peft: bool = False, processes: int = 1, fits: Any = lambda s: True) -> list[str]:
    """The texts of all changes together; `fits` as in `singles`."""
    return all_changes(run_settings(before, use_peft=use_peft, processes=processes), weight(fits), 2.0)["changes"]


def run_settings(before: PPOConfig, *, use_peft: bool, processes: int) -> Settings:
    return Settings(before, LoraArguments(use_peft=use_peft), Sharding(processes))


def weight(fits: Any) -> Any:
    return lambda s: 1.0 if fits(s) else 3.0


def test_a_change_of_several_strengths_is_listed_at_the_weakest_that_fits():
    # Micro-batches of 4 could be 2 or 1.
    assert singles(settings(), lambda s: s.args.step_per_device_batch_size <= 2) == ["step_per_device_batch_size: 2"]
    assert singles(settings(), lambda s: s.args.step_per_device_batch_size <= 1) == ["step_per_device_batch_size: 1"]


def test_a_budget_of_ones_own_is_halved_instead_of_the_rows():
    # 64 tokens is the longest row; 50 would be refused.
    args = settings(max_tokens_per_micro_batch=200)
    found = singles(args, lambda s: s.args.micro_batch_tokens <= 100)
    assert found == ["max_tokens_per_micro_batch: 100"]
    assert "max_tokens_per_micro_batch: 100" in together(args) and "step_per_device_batch_size: 1" not in together(args)


def test_a_change_that_is_not_enough_is_listed_at_full_strength():
    found = single_changes(run_settings(settings(), use_peft=False, processes=4), weight(lambda s: False), 2.0)
    assert {change["peak"] for change in found} == {3.0}
    assert [change["change"] for change in found] == [
        "gradient_checkpointing: true",
        "step_per_device_batch_size: 1",
        "rollout_per_device_batch_size: 1",
        "bf16: true",
        "use_peft: true, dtype: bfloat16",
        "critic_layout: shared",
        "zero_stage: 3",
    ]


def test_a_change_that_the_run_refuses_is_left_out():
    def refuses_shared(s: Settings) -> bool:
        if s.args.critic_layout == "shared":
            raise ValueError("a value model is given")
        return s.lora.use_peft and s.args.critic_layout == "adapter"

    # Of the two layouts that save memory with LoRA, only one is refused.
    assert singles(settings(), refuses_shared, use_peft=True) == ["critic_layout: adapter"]
    assert singles(settings(), refuses_shared) == []
    both = together(settings(), fits=refuses_shared, processes=2)
    assert {"use_peft: true", "dtype: bfloat16", "critic_layout: adapter", "zero_stage: 3"} < set(both)


def test_lora_needs_no_copy_of_the_reference():
    """Offloading the reference comes before LoRA, which does without a copy."""
    labels = together(settings(reference="copy", use_cpu=False))
    assert "reference: adapter_off" in labels and "reference: copy_offloaded" not in labels
    assert singles(settings(reference="copy"), lambda s: s.args.reference == "adapter_off") == [
        "use_peft: true, reference: adapter_off"
    ]
    assert singles(settings(reference="copy"), lambda s: s.args.reference == "adapter_off", use_peft=True) == [
        "reference: adapter_off"
    ]


def test_a_reference_is_not_offloaded_where_host_memory_is_device_memory():
    def is_offloaded(s: Settings) -> bool:
        return s.args.reference == "copy_offloaded"

    assert singles(settings(use_cpu=False), is_offloaded) == ["reference: copy_offloaded"]
    assert singles(settings(), is_offloaded) == []


def test_a_policy_that_is_an_adapter_gets_the_changes_of_one(folder, tmp_path, monkeypatch):
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=folder)
    config.save_pretrained(str(tmp_path / "adapter"))
    changes = [{"change": "dtype: bfloat16", "peak": 1.0, "fits": True}]
    monkeypatch.setattr(
        "alpaca_ppo.estimate_memory.estimator.single_changes",
        lambda settings, *_: changes if settings.starts_from_adapter and not settings.lora.use_peft else [],
    )
    assert on_device(monkeypatch, str(tmp_path / "adapter"), 1.5)["changes"] == changes


def test_a_starting_adapter_has_the_changes_of_lora():
    def labels(fits: Any, **overrides: Any) -> list[str]:
        before = Settings(settings(**overrides), LoraArguments(), Sharding(), starts_from_adapter=True)
        return [change["change"] for change in single_changes(before, weight(fits), 2.0) if change["fits"]]

    for copied in ("copy", "copy_offloaded"):
        assert labels(lambda s: s.args.reference == "adapter_off", reference=copied) == ["reference: adapter_off"]
    assert labels(lambda s: s.args.reference == "copy_offloaded", use_cpu=False) == []
    assert labels(lambda s: s.args.dtype == "bfloat16") == ["dtype: bfloat16"]
    assert labels(lambda s: s.lora.use_peft) == []
    assert labels(lambda s: s.args.load_in_4bit, use_cpu=False, critic_layout="adapter") == ["load_in_4bit: true"]


def test_four_bits_are_offered_on_a_device_to_a_base_that_is_shared():
    def has_four_bits(s: Settings) -> bool:
        return s.args.load_in_4bit

    shared = {"use_cpu": False, "critic_layout": "adapter"}
    assert singles(settings(**shared), has_four_bits, use_peft=True) == ["load_in_4bit: true"]
    assert singles(settings(critic_layout="adapter"), has_four_bits, use_peft=True) == []
    assert singles(settings(use_cpu=False), has_four_bits, use_peft=True) == []
    # With the critic on the base, which comes before.
    assert "load_in_4bit: true" in together(settings(use_cpu=False), use_peft=True)


def test_zero_is_offered_to_several_processes():
    assert singles(settings(), lambda s: s.sharding.stage >= 2, processes=2) == ["zero_stage: 2"]
    assert singles(settings(), lambda s: s.sharding.stage >= 2) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "model_name_or_path is not set"),
        (["--model_name_or_path=x", "--num_processes=0"], "num_processes is 0; "),
        (["--model_name_or_path=x", "--zero_stage=4"], "zero_stage is 4; "),
        (["--model_name_or_path=x", "--zero_stage=2"], "zero_stage is 2 but num_processes is 1"),
        (["--model_name_or_path=x", "--device_gib=0.5"], "device_gib is 0.5; "),
        (["--model_name_or_path=/no/such/folder"], "model_name_or_path: no configuration can be read"),
    ],
)
def test_an_estimate_that_cannot_be_made_is_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        estimated(*flags)


def test_adapters_that_do_not_go_together_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="reward_adapter is .* but the policy has no adapters; set use_peft"):
        estimated("--model_name_or_path", folder, *FLAGS, "--reward_adapter", folder)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=folder)
    config.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="is an adapter, but use_peft asks for another"):
        estimated("--model_name_or_path", str(tmp_path / "adapter"), *FLAGS, "--use_peft")


def test_the_frozen_copy_of_an_adapter_that_training_starts_from_is_counted(folder, tmp_path):
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=folder)
    config.save_pretrained(str(tmp_path / "adapter"))
    flags = (*FLAGS, "--critic_layout=shared")
    started = estimated("--model_name_or_path", str(tmp_path / "adapter"), *flags)["phases"]
    new = estimated("--model_name_or_path", folder, *flags, "--use_peft", "--lora_r=8")["phases"]
    # q and o 128 + 128, k and v 128 + 64, gate, up and down 128 + 256, times rank 8, 4 bytes, 4 layers.
    assert started[0]["weights"] - new[0]["weights"] == (2 * 256 + 2 * 192 + 3 * 384) * 8 * 4 * 4
    assert started[-1]["optimizer"] == new[-1]["optimizer"]


def test_a_reward_adapter_that_is_none_is_refused(folder):
    with pytest.raises(ValueError, match="reward_adapter is .*not an adapter's folder or hub id"):
        estimated("--model_name_or_path", folder, *FLAGS, "--use_peft", "--reward_adapter", folder)


def test_four_bits_without_adapters_are_refused(folder):
    with pytest.raises(ValueError, match="load_in_4bit is True, but all weights are trained: set use_peft"):
        estimated(
            "--model_name_or_path",
            folder,
            *FLAGS[1:],
            "--load_in_4bit",
            "--critic_layout=shared",
            "--reference=none",
            "--kl_coef=0",
        )


def test_a_model_that_reads_its_tensors_is_refused(monkeypatch):
    def reads(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr("alpaca_ppo.estimate_memory.measure.choose_tokens", reads)
    with pytest.raises(ValueError, match="model_name_or_path: Llama cannot run without weights .data-dependent."):
        measure(Models(llama()), settings(), sizes_of(settings(), 1))


def test_a_reward_adapter_weighs_less_than_a_reward_model(folder, tmp_path):
    LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS").save_pretrained(tmp_path / "reward")
    flags = ("--model_name_or_path", folder, *FLAGS, "--use_peft", "--critic_layout=adapter")
    none = estimated(*flags)["phases"][0]["total"]
    adapter = estimated(*flags, "--reward_adapter", str(tmp_path / "reward"))["phases"][0]["total"]
    model = estimated(*flags, "--reward_model_name_or_path", folder)["phases"][0]["total"]
    # q and o 128 + 128, k and v 128 + 64, gate, up and down 128 + 256, times rank 8, 4 bytes, 4 layers.
    assert adapter - none == (2 * 256 + 2 * 192 + 3 * 384) * 8 * 4 * 4
    assert model - none > 10 * (adapter - none)
