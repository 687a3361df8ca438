"""Copies of weights in autocast's dtype: each weight is cast once per change, and no number moves by a bit."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from transformers.pytorch_utils import Conv1D

from alpaca_ppo.distributed.optimizer import make_engine
from alpaca_ppo.models import build_actor_critic, mark_weights_changed
from alpaca_ppo.models.half_weights import (
    HalfPrecisionCopies,
    copied_bytes,
    copied_layers,
    copies_read,
    head_weights,
)
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, tiny_config, tiny_trainer, weights


@pytest.fixture
def own_accelerator():
    """Accelerate keeps one precision per process, which is float32 for the other tests."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


class CountCasts(TorchDispatchMode):
    """Counts, by name, the casts of parameters to bfloat16."""

    def __init__(self, model):
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.counts = dict.fromkeys(self.names.values(), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source, to_bfloat16 = (
                (args[0], (kwargs or {}).get("dtype") == torch.bfloat16)
                if func is torch.ops.aten._to_copy.default
                else (args[1], args[0].dtype == torch.bfloat16)
            )
            name = self.names.get(source.data_ptr())
            if name is not None and to_bfloat16:
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def lora(**settings):
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **settings)


RUNS = {
    "all weights, recomputed": ({"gradient_checkpointing": True}, None),
    "adapters, recomputed": ({"critic_layout": "adapter", "gradient_checkpointing": True, "reference": "copy"}, {}),
    "DoRA": ({"critic_layout": "shared", "reference": "copy_offloaded"}, {"use_dora": True}),
    "GPT-2": ({"critic_layout": "shared"}, {}),
}


@pytest.mark.usefixtures("own_accelerator")
@pytest.mark.parametrize(("settings", "adapter"), RUNS.values(), ids=RUNS)
def test_a_run_is_that_of_autocast_alone_to_the_last_bit(settings, adapter, tmp_path, monkeypatch, request):
    @contextmanager
    def without_copies(self, *, trained):
        yield

    def run(name):
        model = tiny_causal_lm("gpt2" if "GPT-2" in request.node.callspec.id else "llama")
        given = {} if adapter is None else {"trainer_arguments": {"peft_config": lora(**adapter)}}
        trainer = tiny_trainer(tmp_path / name, model=model, bf16=True, total_episodes=10, **settings, **given)
        with CountCasts(trainer.actor_critic) as casts:
            trainer.train()
        return weights(trainer), metric_lines(tmp_path / name), sum(casts.counts.values())

    mine, lines, count = run("copies")
    monkeypatch.setattr(HalfPrecisionCopies, "active", without_copies)
    expected, expected_lines, all_casts = run("autocast")
    assert all(torch.equal(mine[name], value) for name, value in expected.items())
    assert lines == expected_lines
    assert count < all_casts


@pytest.mark.usefixtures("own_accelerator")
def test_a_step_casts_frozen_weights_never_again_and_trained_ones_once_per_change(tmp_path):
    settings = {"critic_layout": "adapter", "gradient_checkpointing": True, "step_per_device_batch_size": 1}
    trainer = tiny_trainer(
        tmp_path, bf16=True, trainer_arguments={"peft_config": lora()}, max_tokens_per_micro_batch=9, **settings
    )
    model = trainer.actor_critic
    copied = {id(p) for layer in copied_layers(model) for p in layer.parameters(recurse=False)}
    names = {name: p.requires_grad for name, p in model.named_parameters() if id(p) in copied}
    with CountCasts(model) as first:
        trainer.step(trainer.prompt_batches(0))
    assert {first.counts[name] for name, trained in names.items() if not trained} == {1}
    with CountCasts(model) as second:
        trainer.step(trainer.prompt_batches(1))
    assert {second.counts[name] for name, trained in names.items() if not trained} == {0}
    # Three optimizer steps, in each of them one cast for all micro-batches. Autocast keeps its own casts while it
    # samples and while it evaluates: two more of the policy's adapter, one of the critic's.
    assert {second.counts[n] for n, trained in names.items() if trained and ".default." in n} == {5}
    assert {second.counts[n] for n, trained in names.items() if trained and ".value." in n} == {4}


class HalveFrozen(TrainerCallback):
    """Halves the frozen weights of linear layers before the second step, through `write`."""

    def __init__(self, write):
        self.write = write

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            for layer in copied_layers(model):
                if not layer.weight.requires_grad:
                    self.write(layer.weight)
            if self.write is halve_unseen:
                mark_weights_changed(model)


def halve_in_place(weight):
    with torch.no_grad():
        weight.mul_(0.5)


def halve_unseen(weight):
    weight.data.mul_(0.5)


@pytest.mark.usefixtures("own_accelerator")
def test_a_callbacks_write_to_frozen_weights_that_torch_does_not_count_is_read_once_it_is_marked(tmp_path):
    def run(write):
        given = {"peft_config": lora(), "callbacks": [HalveFrozen(write)]}
        settings = {"critic_layout": "adapter"}
        trainer = tiny_trainer(tmp_path / write.__name__, bf16=True, trainer_arguments=given, **settings)
        trainer.train()
        return weights(trainer), metric_lines(tmp_path / write.__name__)

    (seen, seen_lines), (marked, marked_lines) = run(halve_in_place), run(halve_unseen)
    assert all(torch.equal(marked[name], value) for name, value in seen.items())
    assert marked_lines == seen_lines


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def copies_made(model):
    return [copy for layer in copied_layers(model) for copy in layer.copies._copies.values()]


def bfloat16_linear(layer, x):
    return nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())


def test_copies_are_read_only_inside_the_block_and_under_autocast(layer):
    model, x = nn.Sequential(layer).requires_grad_(False), torch.randn(3, 6)
    expected, exact = bfloat16_linear(layer, x), layer(x)
    copies = HalfPrecisionCopies(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected) and not copies_made(model)
        with copies.active(trained=False):
            assert torch.equal(model(x), expected)
            (weight, bias), made = copies_read(model), copies_made(model)
            assert weight is made[0] and bias is made[1] and torch.equal(weight, layer.weight.bfloat16())
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(model(x), exact) and not copies_read(model)
        layer.weight.requires_grad_(True)
        with copies.active(trained=False):
            assert [tensor is bias for tensor in copies_read(model)] == [True]
        layer.weight.requires_grad_(False)
        assert not copies_read(model)
    with copies.active(trained=False):
        assert torch.equal(model(x), exact)
    assert isinstance(layer, nn.Linear) and dict(model.state_dict()).keys() == {"0.weight", "0.bias"}
    assert copied_bytes(model, trained=False) == 2 * (6 * 4 + 4) and copied_bytes(model, trained=True) == 0
    copies.release(frozen=False)
    assert len(copies_made(model)) == 2
    copies.release(frozen=True)
    assert not copies_made(model)


def test_copies_follow_the_weights_at_the_same_addresses(layer):
    model, x = nn.Sequential(layer), torch.randn(3, 6)
    copies = HalfPrecisionCopies(model)

    def read():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), copies.active(trained=True):
            return model(x)

    def addresses():
        return [tensor.data_ptr() for tensor in copies_made(model)]

    with torch.autocast("cpu", torch.bfloat16), copies.active(trained=True):
        copies.make()
    before = addresses()
    assert len(before) == 2
    read()
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(read(), bfloat16_linear(layer, x)) and addresses() == before
    # As a kernel of an optimizer's own, of which torch knows nothing.
    layer.weight.data.numpy()[:] += 1
    copies.weights_changed()
    assert torch.equal(read(), bfloat16_linear(layer, x)) and addresses() == before
    # Trained weights are marked too, and from any module around the layer.
    layer.weight.data.mul_(3)
    mark_weights_changed(nn.ModuleList([model]))
    assert torch.equal(read(), bfloat16_linear(layer, x)) and addresses() == before
    # Other storage, as after a move.
    layer.weight.data = torch.randn(4, 6)
    assert torch.equal(read(), bfloat16_linear(layer, x)) and addresses() == before
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(other(x), bfloat16_linear(other[0], x))
        with torch.autocast("cpu", torch.float16), torch.no_grad(), copies.active(trained=True):
            assert model(x).dtype == torch.float16
    later = HalfPrecisionCopies(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with copies.active(trained=True):
            model(x)
        assert not copies_made(model)
        with later.active(trained=True):
            assert torch.equal(model(x), bfloat16_linear(layer, x))
    assert len(copies_made(model)) == 2


def test_gradients_of_several_micro_batches_add_up_in_float32(layer):
    model, rows = nn.Sequential(layer), [torch.randn(3, 6) for _ in range(3)]
    copies = HalfPrecisionCopies(model)
    for x in rows:
        with torch.autocast("cpu", torch.bfloat16), copies.active(trained=True):
            # Under no_grad first: autocast's own cache would lose the gradient of what it casts there.
            with torch.no_grad():
                model(x)
            # Two reads in one backward pass add up in float32 too.
            loss = model(x).float().square().sum() + model(2 * x).float().square().sum()
        loss.backward()
    expected = torch.zeros_like(layer.weight)
    for x in rows:
        for factor in (1, 2):
            states = (factor * x).bfloat16()
            outputs = bfloat16_linear(layer, factor * x).detach()
            # d(sum of squares) / d(output) = 2 * output; a product of bfloat16 tensors is rounded to bfloat16.
            expected += ((2 * outputs.float()).bfloat16().t() @ states).float()
    assert torch.equal(layer.weight.grad, expected)


def test_an_output_head_reads_a_frozen_copy_and_its_own_trained_weight(layer):
    assert head_weights(layer)[0] is layer.weight
    copies = HalfPrecisionCopies(layer)
    with torch.autocast("cpu", torch.bfloat16), copies.active(trained=True):
        assert head_weights(layer)[0] is layer.weight
        layer.requires_grad_(False)
        weight, bias = head_weights(layer)
    assert torch.equal(weight, layer.weight.bfloat16()) and torch.equal(bias, layer.bias.bfloat16())
    unbiased = nn.Linear(2, 2, bias=False).requires_grad_(False)
    copies = HalfPrecisionCopies(unbiased)
    with torch.autocast("cpu", torch.bfloat16), copies.active(trained=True):
        assert head_weights(unbiased)[1] is None and unbiased(torch.ones(1, 2)).dtype == torch.bfloat16


def number_of_copies(model):
    return sum(len(module.copies._copies) for module in model.modules() if hasattr(module, "copies"))


@pytest.mark.parametrize(
    ("device", "settings", "kept"),
    [
        ("cuda", {}, True),
        ("cuda", {"generation_backend": "slots"}, True),
        ("cuda", {"cuda_graphs": False}, False),
        ("cuda", {"generation_backend": "decode"}, False),
        ("cpu", {}, False),
    ],
)
def test_only_where_steps_are_replayed_the_policy_s_trained_weights_have_copies_that_stay(device, settings, kept):
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
    # Everything is on the CPU; the engine is told otherwise.
    accelerator = SimpleNamespace(
        device=torch.device(device),
        native_amp=True,
        num_processes=1,
        distributed_type="NO",
        prepare_model=lambda model, evaluation_mode: model,
        prepare_optimizer=lambda optimizer: optimizer,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
        unscale_gradients=lambda: None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = make_engine(accelerator, model, optimizer, tiny_config("unused", **settings), 1)
    # The head, and seven layers in each of two blocks.
    count = 15 if kept else 0
    with engine.autocast(sampling=True):
        assert number_of_copies(model.policy) == count
    assert number_of_copies(model.policy) == count
    ids = torch.ones(1, 4, dtype=torch.long)
    with engine.micro_batch(last=True), engine.autocast():
        model.policy.model(input_ids=ids).logits.sum().backward()
        model.critic.backbone(input_ids=ids).last_hidden_state.sum().backward()
    assert number_of_copies(model.policy) == 15 and number_of_copies(model.critic) == 14
    engine.step()
    assert (number_of_copies(model.policy), number_of_copies(model.critic)) == (count, 0)


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_only_plain_float32_linear_layers_are_copied():
    plain = nn.Sequential(nn.Linear(2, 2), Conv1D(2, 2), Doubled(2, 2), nn.Linear(2, 2).bfloat16(), nn.LayerNorm(2))
    assert copied_layers(plain) == [plain[0], plain[1]]
    for use_dora, count in ((False, 15), (True, 1)):
        model = get_peft_model(tiny_causal_lm("llama"), lora(use_dora=use_dora)).get_base_model()
        frozen = [m for m in copied_layers(model) if not m.weight.requires_grad]
        # Seven layers in each of two blocks, and the head, which has no adapter.
        assert len(frozen) == count
