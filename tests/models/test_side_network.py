"""A side critic: what it computes from the policy's states, in which passes, and that it never trains the policy."""

from functools import partial

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from alpaca_ppo.adapters import add_policy_adapter
from alpaca_ppo.functional.packing import PackedRows, Span
from alpaca_ppo.models import SideNetwork, build_actor_critic
from alpaca_ppo.models.packing_probe import padding_reason
from alpaca_ppo.models.side_network import decoder_layers
from tests.tiny_models import tiny_causal_lm
from tests.tools.benchmarks.flops import flop_counter

# Prompts of 5, 2, 1 and 5 tokens, the last like the first; responses of 4, 6, 6 and 1 tokens, one with a hole.
QUERIES = torch.tensor([[4, 5, 6, 7, 8], [0, 0, 0, 9, 10], [0, 0, 0, 0, 11], [4, 5, 6, 7, 8]])
ROWS = (
    QUERIES,
    (QUERIES > 0).long(),
    torch.arange(12, 36).view(4, 6),
    torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]).bool(),
)
OPTIONS = {"temperature": 1.0, "chunk_size": 7}


def side_critic(arch="llama", *, lora=False, dtype=torch.float64, **settings):
    policy = tiny_causal_lm(arch, dtype=dtype, **({"num_hidden_layers": 3} if arch == "llama" else {}))
    torch.manual_seed(0)
    if lora:
        policy = add_policy_adapter(policy, LoraConfig(r=2, target_modules="all-linear"))
        # At first the adapter's product is 0.
        [nn.init.normal_(p, std=0.1) for name, p in policy.model.named_parameters() if "lora_B" in name]
    built = build_actor_critic(policy, critic_layout="side", side=partial(SideNetwork.on, **settings))
    nn.init.normal_(built.critic.head.weight)
    return built


def network(width=16, depth=2, layer=1):
    torch.manual_seed(0)
    return SideNetwork(8, side_layer=layer, side_width=width, side_depth=depth).double()


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3_window"])
def test_values_are_the_same_in_padded_rows_and_in_rows_laid_end_to_end(arch):
    built = side_critic(arch, side_layer=1)
    padded = built(*ROWS, **OPTIONS).values
    assert padded[~ROWS[-1]].eq(0).all() and padded[ROWS[-1]].abs().min() > 0
    assert padding_reason(built.policy.model, True) is None
    built.policy.padding_free = True
    torch.testing.assert_close(built(*ROWS, **OPTIONS).values, padded, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        # The prompt that two rows have is computed once.
        assert any(span.prefix_length for span in built.pack(*ROWS)[1].spans)
        torch.testing.assert_close(built(*ROWS, **OPTIONS).values, padded, rtol=1e-12, atol=1e-12)


def test_a_state_reads_those_before_it_in_its_row_and_no_others():
    side, states = network(), torch.randn(1, 9, 8, dtype=torch.float64)
    # Rows of 4 and 2 tokens, and one of 3 after the first two tokens of the first row.
    packed = PackedRows(torch.zeros(1, 9), *[torch.zeros(0)] * 3, spans=(Span(0, 4), Span(4, 2), Span(6, 3, 0, 2)))
    alone = side(states[:, 4:6])
    torch.testing.assert_close(side(states, packed)[:, 4:6], alone)
    torch.testing.assert_close(side(states, packed)[:, 6:], side(states[:, [0, 1, 6, 7, 8]])[:, 2:])
    before = side(states, packed)
    for moved, reached in [(0, [0, 1, 2, 3, 6, 7, 8]), (3, [3]), (4, [4, 5]), (7, [7, 8])]:
        others = states.clone()
        others[:, moved, 0] += 1
        assert (side(others, packed) != before).any(dim=2).nonzero()[:, 1].tolist() == reached
    # NaN in one row stays there.
    states[:, 4] = torch.nan
    assert side(states, packed).isnan().any(dim=2).nonzero()[:, 1].tolist() == [4, 5]


def test_a_block_is_the_layer_of_a_transformer():
    side = network(width=128, depth=1)
    block, states = side.blocks[0], torch.randn(2, 5, 128, dtype=torch.float64)
    theirs = nn.TransformerEncoderLayer(
        128, 2, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False, dtype=torch.float64
    )
    weights = {
        "self_attn.in_proj_weight": block.query_key_value.weight,
        "self_attn.out_proj.weight": block.attention_output.weight,
        "linear1.weight": block.mlp[0].weight,
        "linear2.weight": block.mlp[2].weight,
        "norm1.weight": block.attention_norm.weight,
        "norm2.weight": block.mlp_norm.weight,
    }
    theirs.load_state_dict(weights)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    torch.testing.assert_close(block(states, None), theirs(states, src_mask=mask, is_causal=True))


@pytest.mark.parametrize(("lora", "recomputed"), [(False, False), (True, True)])
def test_the_policy_gets_the_gradient_that_it_has_without_a_critic(lora, recomputed):
    gradients = []
    for with_critic in (True, False):
        built = side_critic(lora=lora).train()
        if recomputed:
            built.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        outputs = built(*ROWS, with_critic=with_critic, **OPTIONS)
        loss = outputs.logprobs.sum()
        if with_critic:
            critic = torch.autograd.grad(outputs.values.square().sum(), built.critic_parameters(), retain_graph=True)
            assert all(gradient.abs().max() > 0 for gradient in critic)
            loss = loss + outputs.values.square().sum()
        loss.backward()
        gradients.append([p.grad for p in built.policy_parameters()])
        assert {id(p) for p in built.critic.parameters()} == {id(p) for p in built.critic_parameters()}
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_value_loss_alone_reaches_no_weight_of_the_policy():
    built = side_critic()
    built(*ROWS, **OPTIONS).values.sum().backward()
    assert all(parameter.grad is None for parameter in built.policy.parameters())
    assert all(parameter.grad is not None for parameter in built.critic_parameters())


@pytest.mark.parametrize(("stops", "layers"), [(True, [0, 1]), (False, [0, 1, 2])])
def test_a_pass_for_the_critic_alone_ends_after_its_layer(stops, layers):
    built = side_critic()
    expected, ran = built(*ROWS, **OPTIONS), []
    for number, layer in enumerate(decoder_layers(built.policy.model.base_model)):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    built.stops_at_side_layer = stops
    outputs = built(*ROWS, with_policy=False, **OPTIONS)
    assert ran == layers and outputs.logprobs is None
    assert torch.equal(outputs.values, expected.values)
    outputs.values.sum().backward()
    assert all(parameter.grad is None for parameter in built.policy.parameters())
    # Nothing of it is left in the policy: the next pass is whole.
    assert torch.equal(built(*ROWS, with_critic=False, **OPTIONS).logprobs, expected.logprobs)


def test_the_states_are_those_of_the_layer_that_is_named():
    built = side_critic(side_layer=1, side_depth=0)
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = built.policy.model(input_ids=ids, output_hidden_states=True).hidden_states[1]
    normed = nn.functional.layer_norm(hidden, (32,))
    expected = nn.functional.layer_norm(normed @ built.critic.side.projection.weight.T, (8,))
    torch.testing.assert_close(built.critic.side.states_of(built.policy.model, ids), expected)


def test_the_defaults_are_two_thirds_of_the_depth_and_a_quarter_of_the_width():
    settings = {"hidden_size": 32, "side_layer": 2, "side_width": 8, "side_depth": 4}
    assert side_critic().critic.side.settings() == settings
    one = tiny_causal_lm("llama", num_hidden_layers=1)
    assert SideNetwork.on(one).side_layer == 1
    # A policy in half precision does not round what is trained.
    half = SideNetwork.on(one.to(torch.bfloat16), side_width=70)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float32}
    assert half(torch.zeros(1, 2, 32, dtype=torch.bfloat16)).dtype == torch.float32
    # Heads of 64 or more, of equal size.
    assert [network(width=w).blocks[0].num_heads for w in (8, 70, 128, 224, 1024)] == [1, 1, 2, 2, 16]


def test_a_layer_that_the_policy_does_not_have_is_refused():
    policy = tiny_causal_lm("llama")
    with pytest.raises(ValueError, match="side_layer is 3, but the policy has 2 layers; set side_layer to 1 to 2, or"):
        SideNetwork.on(policy, side_layer=3)
    policy.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="'side', but LlamaModel has no list of 5 layers .* choose another critic_lay"):
        SideNetwork.on(policy)


def test_it_costs_less_than_a_hundredth_of_the_policy():
    """Qwen2.5-0.5B on 512 tokens, of which 256 are the response; nothing is computed on the device `meta`."""
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
    )
    with torch.device("meta"):
        policy = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
        side, states = SideNetwork.on(policy), torch.zeros(1, 512, 896)
        ids, mask = torch.zeros(1, 512, dtype=torch.long), torch.ones(1, 1, 512, 512, dtype=torch.bool)

    def logits():
        return policy(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=256).logits

    counts = []
    for run in (logits, lambda: side(states)):
        with flop_counter() as counter:
            run().sum().backward()
        counts.append(counter.get_total_flops())
    assert side.settings() == {"hidden_size": 896, "side_layer": 16, "side_width": 224, "side_depth": 4}
    assert 0.007 < counts[1] / counts[0] < 0.009
