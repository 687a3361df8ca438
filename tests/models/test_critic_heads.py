"""Critic heads: their values at the start and by a written-out formula, dtypes, risk levels and gradients.

Their losses are compared with those of the independent PPO, in `tests/independent`.
"""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo import PPOConfig
from alpaca_ppo.functional import quantile_midpoints
from alpaca_ppo.models import (
    ActorCritic,
    C51Head,
    Critic,
    CriticHead,
    HeadOutputs,
    HLGaussHead,
    IQNHead,
    Policy,
    QuantileHead,
    ScalarHead,
    build_actor_critic,
    load_sequence_classifier,
    register_critic_head,
)
from alpaca_ppo.models.critic_heads import build_head
from tests.models.test_policy import padded_batch
from tests.registered import temporary_choices
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier
from tests.tiny_runs import acting

HIDDEN = 32
HEADS = {"scalar": ScalarHead, "c51": C51Head, "hl_gauss": HLGaussHead, "quantile": QuantileHead, "iqn": IQNHead}
CATEGORICAL = ("c51", "hl_gauss")
DISTRIBUTIONAL = [kind for kind in HEADS if kind != "scalar"]
EACH_KIND = pytest.mark.parametrize("kind", HEADS)
EACH_LAYOUT = pytest.mark.parametrize("layout", ["separate", "shared"])
TAUS = torch.tensor([0.1, 0.5, 0.6, 0.95], dtype=torch.float64)


def some_states(count=5, dtype=torch.float32):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


def random_head(kind, risk_level="neutral", **settings):
    """A head with weights drawn from N(0, 0.3), none of them at its start any more."""
    head = HEADS[kind](HIDDEN, **settings)
    head.risk_level = risk_level
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return head


def run(actor_critic, **settings):
    return actor_critic(**padded_batch(), temperature=1.0, chunk_size=4, **settings)


@EACH_KIND
def test_a_new_head_values_every_state_at_zero(kind):
    head = HEADS[kind](HIDDEN)
    outputs = head(some_states())
    # Symmetric atoms or bins of equal probability add up to 0 but for rounding.
    tolerance = {"rtol": 0, "atol": 1e-6 if kind in CATEGORICAL else 0}
    assert_close(outputs.values, torch.zeros(5), **tolerance)
    assert_close(outputs.means, torch.zeros(5), **tolerance)
    if kind not in CATEGORICAL:
        assert bool((outputs.predictions == 0).all())


@EACH_KIND
def test_a_head_whose_weights_were_made_bfloat16_computes_in_float32(kind):
    # What DeepSpeed does to them; outputs are those of a float32 head with the rounded weights.
    head, rounded = random_head(kind).bfloat16(), random_head(kind)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    taus = TAUS.float() if kind == "iqn" else None
    for ours, theirs in zip(head(some_states(), taus), rounded(some_states(), taus), strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)


@EACH_KIND
def test_a_head_under_autocast_gives_the_very_numbers_of_float32(kind):
    head, states = random_head(kind), some_states(dtype=torch.bfloat16)
    plain = head(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = head(states)
    for one, other in zip(plain, cast, strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(part, part.bfloat16().float()) for part in plain), "no number needs float32"


@EACH_KIND
def test_a_half_precision_head_is_raised_to_float32_and_a_double_one_kept(kind):
    for asked, given in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert {p.dtype for p in build_head(HEADS[kind], HIDDEN, asked).parameters()} == {given}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("kind", "support"),
    [
        *((kind, support) for kind in CATEGORICAL for support in ((-1.0, 3.0), (-5.0, 0.5))),
        ("c51", (-1.0, 100.0)),
        # The first of the bins is 52 / 51 wide, and its centre near -1.5.
        ("hl_gauss", (-2.0, 50.0)),
    ],
)
def test_a_head_of_an_uneven_support_starts_at_the_value_zero(kind, support):
    head = HEADS[kind](HIDDEN, v_min=support[0], v_max=support[1])
    assert_close(head(some_states()).values, torch.zeros(5), rtol=0, atol=1e-6 * max(1.0, support[1] / 10))


@pytest.mark.parametrize(
    ("support", "edge"), [((0.0, 1.0), 0.0), ((1.0, 5.0), 1.0), ((-5.0, -1.0), -1.0), ((-5.0, 0.0), 0.0)]
)
def test_a_c51_head_whose_support_has_no_zero_inside_starts_beside_the_nearest_edge(support, edge):
    head = C51Head(HIDDEN, v_min=support[0], v_max=support[1])
    distance = (head(some_states()).values - edge).abs() / (support[1] - support[0])
    # 51 atoms, 1/50 of the width apart. Odds of 100 between neighbours put the mean 1/50 * (1/100) / (1 - 1/100) =
    # 0.000202 of the width from the edge; 0.999 of that and 0.001 of the uniform distribution's 1/2: 0.000702.
    assert_close(distance, torch.full((5,), 0.999 / 50 / 99 + 0.001 / 2), rtol=1e-3, atol=0)


@EACH_KIND
def test_two_reads_are_equal_and_taus_change_predictions_only(kind):
    head = random_head(kind, "neutral" if kind == "scalar" else 0.25)
    first, again, drawn = head(some_states()), head(some_states()), head(some_states(), TAUS)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(drawn.values, first.values) and torch.equal(drawn.means, first.means)
    assert (drawn.predictions.shape == (5, 4)) == (kind == "iqn")
    assert torch.equal(drawn.predictions, first.predictions) == (kind != "iqn")


def test_a_head_takes_no_risk_level_that_it_could_not_read():
    head = random_head("quantile", 0.25)
    with pytest.raises(ValueError, match="risk_level is 'None'; write neutral"):
        head.risk_level = None
    assert head.risk_level == "0.25"


def test_quantiles_and_atoms_are_read_as_the_literal_law():
    # Quantiles 4, 1, 3, 2: mean 2.5; lower quarter 1; lower 3/8: (1 + 0.5 * 2) / 1.5 = 1.3333.
    head = QuantileHead(1, num_quantiles=4)
    head.linear.bias.data.copy_(torch.tensor([4.0, 1.0, 3.0, 2.0]))
    state = torch.zeros(1, 1)
    assert head(state).values.tolist() == [2.5]
    for alpha, expected in ((0.25, 1.0), (0.375, 4 / 3)):
        head.risk_level = alpha
        assert_close(head(state).values, torch.tensor([expected]))
    # Atoms -1, 0, 1 of probability 0.2, 0.3, 0.5: mean 0.3; lower 0.4: (0.2 * -1 + 0.2 * 0) / 0.4 = -0.5.
    head = C51Head(1, num_atoms=3, v_min=-1.0, v_max=1.0)
    head.linear.bias.data.copy_(torch.tensor([0.2, 0.3, 0.5]).log())
    assert_close(head(state).values, torch.tensor([0.3]))
    head.risk_level = 0.4
    assert_close(head(state).values, torch.tensor([-0.5]))
    # Upper 0.6: (0.5 * 1 + 0.1 * 0) / 0.6 = 0.8333.
    head.risk_level = "upper:0.6"
    assert_close(head(state).values, torch.tensor([0.5 / 0.6]))
    # Three bins of width 1 over [-1.5, 1.5] have the same three returns at their centres.
    head = HLGaussHead(1, num_atoms=3, v_min=-1.5, v_max=1.5)
    head.risk_level = "upper:0.6"
    head.linear.bias.data.copy_(torch.tensor([0.2, 0.3, 0.5]).log())
    assert_close(head(state).means, torch.tensor([0.3]))
    assert_close(head(state).values, torch.tensor([0.5 / 0.6]))


def test_iqn_quantiles_follow_the_written_out_formula():
    head = random_head("iqn", embedding_dim=3, num_quantiles=2)
    states = some_states(count=2)
    weights, offsets = head.embedding.weight.tolist(), head.embedding.bias.tolist()
    w, slopes, start = head.weight.tolist(), head.bias.weight[0].tolist(), head.bias.bias.item()

    def quantile(state, tau):
        cosines = [math.cos(math.pi * i * tau) for i in range(3)]
        total = start + sum(slope * cosine for slope, cosine in zip(slopes, cosines, strict=True))
        for j in range(HIDDEN):
            phi = max(0.0, offsets[j] + sum(weights[j][i] * cosines[i] for i in range(3)))
            total += w[j] * state[j] * phi
        return total

    def table(*taus):
        return torch.tensor([[quantile(state, tau) for tau in taus] for state in states.tolist()])

    assert_close(head(states, TAUS).predictions, table(*TAUS.tolist()))
    # Two midpoints: 1/4 and 3/4; of the lower half: 1/8 and 3/8.
    assert_close(head(states).predictions, table(0.25, 0.75))
    head.risk_level = 0.5
    assert_close(head(states).values, table(0.125, 0.375).mean(dim=1))
    # The upper tenth, from 0.9 to 1: the middles of its halves.
    head.risk_level = "upper:0.1"
    assert_close(head(states).values, table(0.925, 0.975).mean(dim=1))


@EACH_KIND
def test_the_predictions_reach_every_parameter_of_a_head(kind):
    head = random_head(kind)
    head(some_states(), TAUS.float()).predictions.square().sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name


def test_values_of_an_iqn_head_in_training_keep_no_graph():
    head = random_head("iqn")
    assert not head(some_states(), TAUS).values.requires_grad
    assert head(some_states()).values.requires_grad


@EACH_KIND
def test_a_head_is_built_again_from_its_settings(kind):
    own = {"c51": {"num_atoms": 7, "v_min": -2.0}, "quantile": {"num_quantiles": 3}, "iqn": {"embedding_dim": 5}}
    own["hl_gauss"] = {"num_atoms": 9, "v_max": 3.0}
    head = random_head(kind, **own.get(kind, {}))
    again = HEADS[kind](HIDDEN, **head.settings())
    again.load_state_dict(head.state_dict())
    assert torch.equal(again(some_states()).values, head(some_states()).values)
    assert again.settings() == head.settings() and own.get(kind, {}).items() <= head.settings().items()


@EACH_KIND
def test_only_an_iqn_head_samples_levels_and_as_its_generator_gives_them(kind):
    head = HEADS[kind](HIDDEN)
    taus = head.sample_taus(torch.Generator().manual_seed(5))
    if kind != "iqn":
        assert taus is None
    else:
        assert torch.equal(taus, torch.rand(32, generator=torch.Generator().manual_seed(5), dtype=torch.float64))


@EACH_KIND
def test_a_head_from_the_configuration_has_the_options_named_there(kind):
    options = {"num_atoms": 7, "value_support": [-2, 5]}
    args = PPOConfig(**acting({"critic": kind, **options}))
    expected = {
        "scalar": {},
        "c51": {"num_atoms": 7, "v_min": -2.0, "v_max": 5.0},
        "hl_gauss": {"num_atoms": 7, "v_min": -2.0, "v_max": 5.0},
        "quantile": {"num_quantiles": 7},
        "iqn": {"num_quantiles": 7, "embedding_dim": 64},
    }
    assert HEADS[kind].from_config(args, HIDDEN).settings() == expected[kind]


def test_a_head_must_define_how_it_reads_and_what_it_minimises():
    with pytest.raises(TypeError, match="abstract methods '?loss'?, '?read'?"):
        CriticHead(HIDDEN)


def test_a_registered_head_may_have_a_fixed_support():
    with temporary_choices():
        register_critic_head("bins", distributional=True, fixed_support=True)(type("Bins", (C51Head,), {}))
        assert HEADS["c51"].from_config(PPOConfig(critic="bins", value_support=[-3, 10]), HIDDEN).v_min == -3.0


def trained_critic(kind, **settings):
    return Critic(random_head(kind, **settings), tiny_causal_lm("llama", seed=3).base_model)


def test_a_critic_is_taken_with_all_its_weights():
    critic = trained_critic("quantile", num_quantiles=4)
    head = partial(QuantileHead, num_quantiles=4)
    built = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate", value_model=critic, head=head)
    assert built.critic is critic


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (partial(QuantileHead, num_quantiles=8), "'num_quantiles': 4, .*}, critic .*8, .*}; set the same options"),
        (partial(IQNHead, num_quantiles=4), "'kind': 'quantile'.*'kind': 'iqn'"),
        (ScalarHead, "'kind': 'quantile'.*'kind': 'scalar'"),
    ],
)
def test_a_critic_with_another_head_than_asked_for_is_refused(head, message):
    critic = trained_critic("quantile", num_quantiles=4)
    with pytest.raises(ValueError, match=message):
        build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate", value_model=critic, head=head)


@pytest.mark.parametrize(
    ("layout", "message"), [("shared", "critic_layout is 'shared'"), (None, "critic_layout is None")]
)
@pytest.mark.parametrize("kind", ["critic", "classifier"])
def test_a_value_model_without_a_place_is_refused(layout, message, kind):
    value_model = trained_critic("scalar") if kind == "critic" else tiny_sequence_classifier("llama")
    with pytest.raises(ValueError, match=message):
        build_actor_critic(tiny_causal_lm("llama"), critic_layout=layout, value_model=value_model)


@pytest.mark.parametrize("layout", ["auto", "seperate"])
def test_an_unknown_layout_is_refused(layout):
    with pytest.raises(ValueError, match=f"critic_layout is '{layout}'; choose separate, adapter"):
        build_actor_critic(tiny_causal_lm("llama"), critic_layout=layout)


@EACH_KIND
def test_a_classifier_gives_its_backbone_and_only_to_a_scalar_head_its_score(kind):
    classifier = load_sequence_classifier(tiny_sequence_classifier("llama"))
    built = build_actor_critic(
        tiny_causal_lm("llama"), critic_layout="separate", value_model=classifier, head=HEADS[kind]
    )
    assert built.critic.backbone is classifier.base_model
    ids = torch.tensor([[5, 6, 7]])
    states = classifier.base_model(input_ids=ids).last_hidden_state[:, -1]
    expected = classifier(input_ids=ids).logits[:, 0] if kind == "scalar" else torch.zeros(1)
    assert_close(built.critic.head(states).values, expected, rtol=1e-5, atol=1e-6)


def test_without_a_layout_there_is_no_critic_and_no_values():
    actor_critic = build_actor_critic(tiny_causal_lm("llama"), critic_layout=None, head=IQNHead)
    assert actor_critic.critic is None
    outputs = run(actor_critic)
    assert outputs.logprobs is not None and outputs[2:] == (None, None, None, None)


def actor_critic_of(layout, kind):
    """With a random head, so that a gradient could pass it."""
    policy = Policy(tiny_causal_lm("llama"))
    backbone = None if layout == "shared" else tiny_causal_lm("llama", seed=1).base_model
    return ActorCritic(policy, Critic(random_head(kind), backbone))


@EACH_KIND
@EACH_LAYOUT
def test_without_the_policy_the_critic_learns_alone_from_the_same_numbers(layout, kind):
    actor_critic = actor_critic_of(layout, kind)
    outputs = run(actor_critic, with_policy=False)
    assert outputs.logprobs is None and outputs.entropies is None
    whole = run(actor_critic)
    assert torch.equal(outputs.values, whole.values) and torch.equal(outputs.predictions, whole.predictions)
    outputs.predictions.square().sum().backward()
    learning = {name for name, p in actor_critic.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert not [name for name in learning if name.startswith("policy.")]
    assert {name for name, _ in actor_critic.named_parameters() if name.startswith("critic.head.")} <= learning
    assert any(name.startswith("critic.backbone.") for name in learning) == (layout == "separate")


@EACH_LAYOUT
def test_without_the_critic_the_policy_gives_the_same_numbers_and_no_values(layout):
    actor_critic = actor_critic_of(layout, "c51")
    outputs, whole = run(actor_critic, with_critic=False), run(actor_critic)
    assert outputs[2:] == (None, None, None, None)
    assert torch.equal(outputs.logprobs, whole.logprobs) and torch.equal(outputs.entropies, whole.entropies)


@EACH_LAYOUT
def test_a_shared_critic_trains_the_policys_backbone_where_the_policy_learns_too(layout):
    actor_critic = actor_critic_of(layout, "iqn")
    run(actor_critic, value_taus=TAUS).predictions.square().sum().backward()
    grads = [p.grad for p in actor_critic.policy.model.base_model.parameters()]
    assert all(grad is not None and bool(grad.any()) for grad in grads) == (layout == "shared")


@EACH_KIND
def test_values_are_zero_outside_the_mask_and_predictions_have_the_head_s_shape(kind):
    mask = padded_batch()["response_mask"]
    outputs = run(actor_critic_of("separate", kind), value_taus=quantile_midpoints(4) if kind == "iqn" else None)
    last = {"scalar": (), "c51": (51,), "hl_gauss": (51,), "quantile": (32,), "iqn": (4,)}[kind]
    assert outputs.predictions.shape == (*mask.shape, *last)
    assert bool((outputs.values[~mask] == 0).all()) and bool((outputs.values[mask] != 0).all())
    assert (outputs.value_means is None) == (kind == "scalar")


def zeros(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (zeros(5), "returned a Tensor, not HeadOutputs"),
        (HeadOutputs(zeros(5), None, zeros(5)), "returned means of NoneType, not"),
        (HeadOutputs(zeros(5, 1), zeros(5), zeros(5)), r"returned values of \(5, 1\), not \(5,\)$"),
        (
            HeadOutputs(zeros(5), zeros(5), zeros(5, 2, 2)),
            r"returned predictions of \(5, 2, 2\), not \(5,\) or \(5, M\)$",
        ),
        (HeadOutputs(zeros(5), zeros(5), zeros(6, 2)), r"returned predictions of \(6, 2\), not"),
    ],
)
def test_what_a_head_reads_is_checked(returned, message):
    head = FixedHead.made(returned)
    with pytest.raises(ValueError, match=rf"^read\(\) of the critic 'fixed' {message}"):
        head(some_states())


@pytest.mark.parametrize("predictions", [zeros(5), zeros(5, 1), zeros(5, 7)])
def test_a_head_without_parameters_reads_states_in_float32(predictions):
    returned = HeadOutputs(zeros(5), zeros(5), predictions)
    head = FixedHead.made(returned)
    assert head(some_states(dtype=torch.bfloat16)) is returned
    assert head.dtypes == [torch.float32]


class FixedHead(CriticHead):
    """Returns what it is given, and has no parameters."""

    @classmethod
    def made(cls, returned):
        with temporary_choices():
            head = register_critic_head("fixed")(cls)(HIDDEN)
        head.returned, head.dtypes = returned, []
        return head

    def read(self, states, taus):
        self.dtypes.append(states.dtype)
        return self.returned

    def loss(self, predictions, batch, args):
        raise NotImplementedError
