"""Rows laid end to end give what rows with padding give, on every family that can be packed."""

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.models import ActorCritic, build_actor_critic, disable_dropout, packed_attention
from alpaca_ppo.models.trial import packing_problem
from tests.tiny_models import PACKED, tiny_causal_lm

PROMPTS = (3, 1, 6, 3, 3, 3)
RESPONSES = (7, 5, 1, 4, 7, 0)
"""Prompts 0, 3 and 4 are equal; rows 0 and 4 are equally long; row 5 is a dummy."""


class InFloat64(TorchFunctionMode):
    """Norms, routers and the softmax of transformers' models compute in float32 whatever the weights' dtype; here in
    float64, so that sums in another order agree.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        wider = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wider, **named)


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries, responses = (torch.randint(4, 64, (len(PROMPTS), width), generator=generator) for width in (6, 8))
    queries[3:5] = queries[0]
    queries_mask = (torch.arange(6) >= 6 - torch.tensor(PROMPTS).unsqueeze(1)).long()
    mask = torch.arange(8) < torch.tensor(RESPONSES).unsqueeze(1)
    # Tokens that the policy did not choose, such as those of a tool.
    mask[0, 2:4] = False
    return [queries, queries_mask, responses, mask]


def models(arch: str) -> tuple[ActorCritic, ActorCritic]:
    # In transformers 5.17 Gemma 2 has sdpa by default, which leaves out its soft cap; such a model keeps padding.
    eager = {"attn_implementation": "eager"} if arch.startswith("gemma2") else {}
    language_model = tiny_causal_lm(arch, dtype=torch.float64, **eager)
    # Their fast kernel has no float64.
    language_model.set_experts_implementation("eager")
    padded = build_actor_critic(language_model, critic_layout="separate")
    torch.nn.init.normal_(next(padded.critic.head.parameters()), generator=torch.Generator().manual_seed(1))
    padded.double()
    packed = copy.deepcopy(padded)
    packed.policy.padding_reason = packing_problem(packed.policy.model)
    packed.critic.padding_reason = packing_problem(packed.critic.backbone)
    return padded, packed


def run(
    model: ActorCritic, batch: list[Tensor], *, in_float64: bool = True, **parts: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs, entropies and values, and the gradients of a loss of them."""
    model.zero_grad()
    with InFloat64() if in_float64 else nullcontext():
        outputs = model(*batch, temperature=0.7, chunk_size=8, **parts)
        results = [part for part in (outputs.logprobs, outputs.entropies, outputs.values) if part is not None]
        weights = torch.linspace(-1, 1, batch[2].numel(), dtype=torch.float64).view_as(batch[2])
        sum((part * weights).sum() for part in results).backward()
    return [part.detach() for part in results], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found, wanted) -> None:
    for a, b in zip(found[0], wanted[0], strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert found[1].keys() == wanted[1].keys()
    scale = max(float(grad.abs().max()) for grad in wanted[1].values())
    for name, grad in wanted[1].items():
        assert_close(found[1][name], grad, rtol=0, atol=1e-10 * scale, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("arch", PACKED)
def test_packed_rows_have_the_outputs_and_gradients_of_padded_ones(arch):
    padded, packed = models(arch)
    batch = rows()
    assert_same(run(packed, batch), run(padded, batch))
    with torch.no_grad(), InFloat64():
        shared = packed.pack(*batch)[0]
        found, wanted = (model(*batch, temperature=0.7, chunk_size=8) for model in (packed, padded))
    # Rows 0, 3 and 4 share a prompt of 3: 3 + 6 + 3 + 6; row 1 has 5 and row 2 has 6.
    assert shared.input_ids.shape == (1, 29)
    for a, b in zip(found[:3], wanted[:3], strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("arch", ["qwen3", "mistral_window", "gpt2"])
def test_recomputed_layers_see_the_same_rows(arch, use_reentrant):
    padded, packed = models(arch)
    # The layers are recomputed outside of the mode.
    wanted = run(padded, rows(), in_float64=False)
    packed.train()
    for backbone in (packed.policy.model, packed.critic.backbone):
        disable_dropout(backbone)
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same(run(packed, rows(), in_float64=False), wanted)


@pytest.mark.parametrize("arch", ["llama", "gemma2_window", "gpt_oss", "deepseek_v3"])
def test_a_changed_row_leaves_every_bit_of_the_others(arch):
    packed = models(arch)[1]
    batch = rows()
    changed = [part.clone() for part in batch]
    changed[2][0] = (changed[2][0] + 1) % 60 + 4
    with torch.no_grad():
        one, other = (packed(*part, temperature=1.0, chunk_size=8) for part in (batch, changed))
    assert not torch.equal(one.logprobs[0], other.logprobs[0])
    assert torch.equal(one.logprobs[1:], other.logprobs[1:])
    assert torch.equal(one.values[1:], other.values[1:])


@pytest.mark.parametrize("layout", ["shared", "adapter"])
def test_critics_on_the_policy_s_base_read_packed_rows(layout):
    base = tiny_causal_lm("llama", dtype=torch.float64)
    if layout == "adapter":
        base = add_policy_adapter(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    padded = build_actor_critic(base, critic_layout=layout).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in padded.named_parameters():
        if "critic.head" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=generator)
    parts = [{"with_critic": False}, {"with_policy": False}, {}]
    wanted = [run(padded, rows(), **part) for part in parts]
    padded.policy.padding_reason = packing_problem(padded.policy.model)
    assert padded.padding_free
    for part, values in zip(parts, wanted, strict=True):
        assert_same(run(padded, rows(), **part), values)


def test_a_critic_that_needs_padding_has_it_beside_a_policy_that_does_not():
    padded, packed = models("llama")
    packed.critic.padding_reason = "asked for"
    assert packed.policy.padding_free and not packed.padding_free
    own, critics = packed.pack(*rows())
    assert own.spans is not None and critics.spans is None
    assert_same(run(packed, rows()), run(padded, rows()))


def test_a_batch_without_responses_reaches_every_parameter_with_a_gradient_of_zero():
    batch = rows()
    batch[3][:] = False
    for model in models("llama"):
        results, gradients = run(model, batch)
        assert all(bool((part == 0).all()) for part in results)
        assert gradients.keys() == dict(model.named_parameters()).keys()
        assert all(bool((gradient == 0).all()) for gradient in gradients.values())


def test_a_prompt_of_many_samples_is_computed_once():
    samples = [part[:1].repeat(4, 1) for part in rows()]
    samples[2][1:] = samples[2][1:].flip(1)
    packed = models("llama")[1]
    seen: list[int] = []
    packed.policy.model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].size(1)))
    with torch.no_grad():
        packed(*samples, temperature=1.0, chunk_size=8)
    packed(*samples, temperature=1.0, chunk_size=8)
    # The prompt has 3 tokens, each response 7, the last of which predicts nothing; with gradients nothing is shared.
    assert seen == [3 + 4 * 6, 4 * (3 + 6)]


def loop_kernel(query, key, value, query_ends, key_ends, longest_query, longest_key, **options):
    """torch's `varlen_attn`, row by row and query by query."""
    assert options["enable_gqa"] == (query.size(1) != key.size(1)) and options["window_size"][1] == 0
    scale = query.size(-1) ** -0.5 if options["scale"] is None else options["scale"]
    groups, outputs = query.size(1) // key.size(1), []
    for row in range(len(query_ends) - 1):
        first, last = int(query_ends[row]), int(query_ends[row + 1])
        k0, k1 = int(key_ends[row]), int(key_ends[row + 1])
        assert last - first <= longest_query and k1 - k0 <= longest_key
        for i in range(first, last):
            end = k1 - (last - 1 - i)
            left = options["window_size"][0]
            start = k0 if left < 0 else max(k0, end - 1 - left)
            k, v = (part[start:end].repeat_interleave(groups, dim=1) for part in (key, value))
            weights = (torch.einsum("hd,khd->hk", query[i], k) * scale).softmax(dim=-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(outputs)


@pytest.mark.parametrize("arch", ["llama", "mistral_window", "deepseek_v3"])
@pytest.mark.parametrize("with_grad", [True, False])
def test_the_arguments_of_the_kernel_describe_the_rows(arch, with_grad, monkeypatch):
    padded, packed = models(arch)
    monkeypatch.setattr(varlen, "varlen_attn", loop_kernel)
    # Tensors on the CPU pass as those of a GPU.
    monkeypatch.setattr(packed_attention, "kernel_serves", lambda *args, **kwargs: torch.float64)
    with torch.set_grad_enabled(with_grad), InFloat64():
        found, wanted = (model(*rows(), temperature=0.7, chunk_size=8) for model in (packed, padded))
    for a, b in zip(found[:3], wanted[:3], strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kernel", "works"),
    [
        (loop_kernel, True),
        # Queries aligned with the first keys instead of the last, as some kernels have it.
        (lambda q, k, v, qe, ke, lq, lk, **options: loop_kernel(q, k[:10], v[:10], qe, qe, lq, lk, **options), False),
        (lambda *args, **options: loop_kernel(*args, **{**options, "window_size": (-1, 0)}), False),
        (lambda *args, **options: args[0] @ args[1], False),
    ],
)
def test_a_kernel_is_used_only_where_it_computes_what_it_should(kernel, works, monkeypatch):
    def with_names(query, key, value, *ends, scale=None, window_size=(-1, -1), enable_gqa=False):
        return kernel(query, key, value, *ends, scale=scale, window_size=window_size, enable_gqa=enable_gqa)

    monkeypatch.setattr(varlen, "varlen_attn", with_names)
    try_out = packed_attention.kernel_works.__wrapped__
    cpu = torch.device("cpu")
    # Rollouts come first, and keep no graph.
    with torch.no_grad():
        assert try_out(cpu, torch.bfloat16, 4, 2, 8, 8, windowed=True) is works
    assert try_out(cpu, torch.float32, 4, 2, 8, 8, windowed=True) is False
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, is_causal=False: query)
    assert try_out(cpu, torch.bfloat16, 4, 2, 8, 8, windowed=False) is False


def test_running_out_of_memory_says_nothing_about_the_kernel(monkeypatch):
    def out_of_memory(q, k, v, qe, ke, lq, lk, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(varlen, "varlen_attn", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        packed_attention.kernel_works.__wrapped__(torch.device("cpu"), torch.bfloat16, 4, 2, 8, 8, windowed=False)


def test_a_flash_attention_of_transformers_gets_the_lengths(monkeypatch):
    def flash(module, query, key, value, attention_mask, *, scaling, cu_seq_lens_q=None, max_length_q=None, **kwargs):
        if cu_seq_lens_q is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
        assert attention_mask is None and cu_seq_lens_q.dtype == torch.int32
        assert max_length_q == kwargs["max_length_k"] and torch.equal(cu_seq_lens_q, kwargs["cu_seq_lens_k"])
        parts = [part[0].transpose(0, 1) for part in (query, key, value)]
        options = {"scale": scaling, "window_size": (-1, 0), "enable_gqa": True}
        out = loop_kernel(*parts, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options)
        return out.unsqueeze(0), None

    AttentionInterface.register("flash_attention_test", flash)
    AttentionMaskInterface.register("flash_attention_test", lambda **kwargs: None)
    model = tiny_causal_lm("llama", dtype=torch.float64)
    padded = build_actor_critic(copy.deepcopy(model), critic_layout="shared").double()
    model.config._attn_implementation = "flash_attention_test"
    packed = build_actor_critic(model, critic_layout="shared").double()
    packed.policy.padding_reason = packing_problem(model)
    assert model.config._attn_implementation == "flash_attention_test"
    batch = rows()
    assert_same(run(packed, batch), run(padded, batch))
    with torch.no_grad():
        # 9 + 5 + 6 + 6 + 9: no prompt is shared.
        assert packed.pack(*batch)[0].input_ids.shape == (1, 35)
