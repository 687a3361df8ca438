import math

import pytest
import torch
import torch.nn.functional as F
from torch import tensor
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from alpaca_ppo.functional import chunked_logprobs, entropy_from_logits, token_logprobs

TEMPERATURE = 0.7


def random_head(tokens=7, vocab=11, hidden_size=5, dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape) for shape in ((tokens, hidden_size), (vocab, hidden_size), (vocab,)))
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), torch.randint(vocab, (tokens,))


def softcap(logits):
    return torch.tanh(logits / 2) * 2


def plain(hidden, weight, labels, bias=None, logit_transform=None, temperature=TEMPERATURE):
    """The definition: all logits at once, in float32 or wider from there on."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = (logit_transform(logits) if logit_transform else logits) / temperature
    return token_logprobs(logits, labels), entropy_from_logits(logits)


def weighted_sum(logprobs, entropies):
    """A scalar whose gradient differs from token to token and reaches both results."""
    weights = torch.arange(1.0, 2 * len(logprobs) + 1).view(2, -1) / len(logprobs) - 1
    return (weights[0] * logprobs).sum() + (weights[1] * entropies).sum()


def test_token_logprobs_and_entropy_by_hand():
    # softmax of (ln 1, ln 3) is (1/4, 3/4); entropy -(1/4 ln 1/4 + 3/4 ln 3/4)
    logits = tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    assert_close(token_logprobs(logits, tensor([0, 1])), tensor([math.log(0.25), math.log(0.75)]))
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert_close(entropy_from_logits(logits), tensor([entropy, entropy]))


def test_the_temperature_divides_the_logits():
    # softmax of (0, 2 ln 3) / 2 is (1/4, 3/4)
    logits = tensor([[0.0, 2 * math.log(3)]])
    assert_close(token_logprobs(logits, tensor([1]), temperature=2.0), tensor([math.log(0.75)]))


def test_a_certain_token_has_logprob_and_entropy_zero_and_a_finite_gradient():
    logits = tensor([[0.0, -math.inf, -math.inf]], requires_grad=True)
    logprobs, entropies = token_logprobs(logits, tensor([0])), entropy_from_logits(logits)
    assert logprobs.item() == 0 and entropies.item() == 0
    assert torch.autograd.grad(logprobs.sum() + entropies.sum(), logits)[0].eq(0).all()


def test_half_precision_logits_are_computed_in_float32():
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 50).bfloat16(), torch.randint(50, (4,))
    for half, wide in (
        (token_logprobs(logits, labels), token_logprobs(logits.double(), labels)),
        (entropy_from_logits(logits), entropy_from_logits(logits.double())),
    ):
        assert half.dtype == torch.float32
        assert_close(half, wide.float(), rtol=0, atol=2e-6)


def test_gradients_of_logits_match_finite_differences():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), tensor([0, 4, 2])
    assert gradcheck(lambda x: token_logprobs(x, labels, temperature=TEMPERATURE), logits)
    assert gradcheck(entropy_from_logits, logits)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("transform", [None, softcap, torch.tanh, lambda logits: logits])
def test_chunks_give_the_numbers_and_gradients_of_the_whole(chunk_size, with_bias, transform):
    hidden, weight, bias, labels = random_head()
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    bias = bias if with_bias else None
    settings = {"temperature": TEMPERATURE, "chunk_size": chunk_size, "bias": bias, "logit_transform": transform}
    expected = plain(hidden, weight, labels, bias, transform)
    result = chunked_logprobs(hidden, weight, labels, **settings)
    assert_close(tuple(result), expected)
    grads = torch.autograd.grad(weighted_sum(*result), leaves)
    assert_close(grads, torch.autograd.grad(weighted_sum(*expected), leaves))


def test_without_entropy_the_logprobs_and_gradients_are_the_same():
    hidden, weight, _, labels = random_head()
    settings = {"temperature": TEMPERATURE, "chunk_size": 3}
    alone = chunked_logprobs(hidden, weight, labels, with_entropy=False, **settings)
    both = chunked_logprobs(hidden, weight, labels, **settings)
    assert alone.entropies is None
    assert_close(alone.logprobs, both.logprobs, rtol=0, atol=0)
    grads = [torch.autograd.grad(result.logprobs.square().sum(), (hidden, weight)) for result in (alone, both)]
    assert_close(*grads)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_each_input_alone_gets_its_gradient(trained):
    hidden, weight, bias, labels = random_head()
    inputs = {"hidden": hidden, "weight": weight, "bias": bias}
    fixed = {name: x if name == trained else x.detach() for name, x in inputs.items()}
    settings = {"temperature": TEMPERATURE, "chunk_size": 3, "bias": fixed["bias"]}
    result = chunked_logprobs(fixed["hidden"], fixed["weight"], labels, **settings)
    (grad,) = torch.autograd.grad(weighted_sum(*result), inputs[trained])
    assert_close(grad, torch.autograd.grad(weighted_sum(*plain(**inputs, labels=labels)), inputs[trained])[0])


def test_no_graph_is_kept_where_none_is_wanted():
    hidden, weight, _, labels = random_head()
    with torch.no_grad():
        result = chunked_logprobs(hidden, weight, labels, temperature=1.0, chunk_size=3)
    assert not result.logprobs.requires_grad and not result.entropies.requires_grad


@pytest.mark.parametrize("with_entropy", [True, False])
def test_no_token_at_all_gives_zero_gradients_not_none(with_entropy):
    hidden, weight, bias, labels = random_head(tokens=0)
    result = chunked_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_size=3, bias=bias, with_entropy=with_entropy
    )
    result.logprobs.sum().backward()
    assert result.logprobs.shape == (0,) and hidden.grad.shape == hidden.shape
    assert weight.grad.eq(0).all() and bias.grad.eq(0).all()


def test_leading_dimensions_are_those_of_the_labels():
    hidden, weight, _, labels = random_head(tokens=6)
    flat = chunked_logprobs(hidden, weight, labels, temperature=1.0, chunk_size=4)
    # not contiguous, as a slice of a batch of hidden states is
    padded = torch.cat([hidden, hidden], dim=1)[:, : hidden.size(1)].view(2, 3, -1)
    shaped = chunked_logprobs(padded, weight, labels.view(2, 3), temperature=1.0, chunk_size=4)
    assert_close(shaped.logprobs, flat.logprobs.view(2, 3))
    assert_close(shaped.entropies, flat.entropies.view(2, 3))


def test_a_certain_token_keeps_chunk_gradients_finite():
    # the bias forbids every token but 0, as a mask on the vocabulary does
    forbidden = tensor([0.0, -math.inf, -math.inf], dtype=torch.float64)
    hidden, weight, _, labels = random_head(tokens=2, vocab=3)
    result = chunked_logprobs(hidden, weight, labels * 0, temperature=1.0, chunk_size=1, bias=forbidden)
    assert result.logprobs.eq(0).all() and result.entropies.eq(0).all()
    grads = torch.autograd.grad(weighted_sum(*result), (hidden, weight))
    assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_softmax_in_float32(dtype):
    hidden, weight, bias, labels = random_head(tokens=40, vocab=300, hidden_size=16, dtype=dtype)
    result = chunked_logprobs(hidden, weight, labels, temperature=TEMPERATURE, chunk_size=8, bias=bias)
    expected = plain(hidden, weight, labels, bias)
    assert result.logprobs.dtype == result.entropies.dtype == torch.float32
    assert_close(tuple(result), expected, rtol=0, atol=1e-5)
    leaves = (hidden, weight, bias)
    grads = torch.autograd.grad(weighted_sum(*result), leaves)
    for grad, reference, leaf in zip(grads, torch.autograd.grad(weighted_sum(*expected), leaves), leaves, strict=True):
        assert grad.dtype == leaf.dtype
        assert (grad - reference).abs().max() <= 2e-2 * reference.abs().max()


def test_the_weights_gradient_is_summed_in_float32_over_chunks():
    # 600 equal chunks of one token: sums in bfloat16 stall once a share is below half a unit of the last place
    hidden = torch.ones(600, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(600, dtype=torch.int64)
    chunked_logprobs(hidden, weight, labels, temperature=1.0, chunk_size=1).logprobs.sum().backward()
    # each token adds (1 - 1/2) to row 0 and -1/2 to row 1
    assert_close(weight.grad.float(), tensor([[300.0], [-300.0]]).expand(2, 4))


def test_autocast_gives_the_numbers_of_the_models_own_head_in_backward_too():
    hidden, weight, bias, labels = random_head(tokens=40, vocab=300, hidden_size=16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = chunked_logprobs(hidden, weight, labels, temperature=TEMPERATURE, chunk_size=8, bias=bias)
        expected = plain(hidden, weight, labels, bias)
    assert_close(tuple(result), expected, rtol=0, atol=1e-5)
    leaves = (hidden, weight, bias)
    grads = torch.autograd.grad(weighted_sum(*result), leaves)
    for grad, reference in zip(grads, torch.autograd.grad(weighted_sum(*expected), leaves), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - reference).abs().max() <= 2e-2 * reference.abs().max()


def test_autocast_takes_bfloat16_states_with_a_float32_weight_and_leaves_float64_alone():
    hidden, weight, _, labels = random_head(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = chunked_logprobs(hidden.bfloat16(), weight, labels, temperature=1.0, chunk_size=3)
        wide = chunked_logprobs(hidden.double(), weight.double(), labels, temperature=1.0, chunk_size=3)
        assert_close(mixed.logprobs, plain(hidden, weight, labels, temperature=1.0)[0], rtol=0, atol=1e-5)
    assert_close(wide.logprobs, plain(hidden.double(), weight.double(), labels, temperature=1.0)[0])
    mixed.logprobs.sum().backward()
    assert weight.grad.dtype == hidden.grad.dtype == torch.float32


def memory_of(function):
    """Bytes that torch held for what `function` allocated: the most at once, temporaries inside operators included, and
    those at the end, less what it freed of others.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held, peak = 0, 0
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held


def peak_bytes(function):
    return memory_of(function)[0]


@pytest.mark.parametrize("with_entropy", [True, False])
def test_forward_and_backward_hold_two_chunks_of_logits_and_never_all(with_entropy):
    tokens, vocab, chunk_size = 256, 4096, 16
    hidden, weight, _, labels = random_head(tokens, vocab, 8, torch.float32)

    def run():
        result = chunked_logprobs(
            hidden, weight, labels, temperature=1.0, chunk_size=chunk_size, with_entropy=with_entropy
        )
        (weighted_sum(*result) if with_entropy else result.logprobs.sum()).backward()

    chunk = chunk_size * vocab * 4
    gradients, per_token = weight.nbytes + hidden.nbytes, 64 * tokens
    peak = peak_bytes(run)
    assert chunk < peak <= 2 * chunk + gradients + per_token
    whole = peak_bytes(lambda: weighted_sum(*plain(hidden, weight, labels)).backward())
    assert peak < whole / 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, r"temperature is 0.0; it must be positive"),
        ({"chunk_size": 0}, "chunk_size is 0; it must be at least 1 token"),
        ({"labels": torch.zeros(6, dtype=torch.int64)}, r"labels has shape \(6,\), hidden \(7, 5\)"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes, message):
    hidden, weight, _, labels = random_head()
    arguments = {"labels": labels, "temperature": 1.0, "chunk_size": 3} | changes
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(hidden, weight, **arguments)


def test_token_logprobs_refuses_logits_that_are_not_the_labels():
    with pytest.raises(ValueError, match=r"labels has shape \(2,\), logits \(3, 4\)"):
        token_logprobs(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))


BYTES_OF_A_CHUNK = 3 * 11 * 8
"""Of three tokens' logits over the vocabulary of `random_head`, in float64."""


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("transform", [None, softcap, lambda logits: logits])
@pytest.mark.parametrize("kept_bytes", [BYTES_OF_A_CHUNK, 2 * BYTES_OF_A_CHUNK + 1, 1e9])
def test_kept_logits_change_no_bit(kept_bytes, transform, with_entropy):
    hidden, weight, bias, labels = random_head()
    settings = {"temperature": TEMPERATURE, "chunk_size": 3, "bias": bias, "logit_transform": transform}
    found = []
    for room in (0, kept_bytes):
        result = chunked_logprobs(hidden, weight, labels, with_entropy=with_entropy, kept_bytes=room, **settings)
        loss = weighted_sum(*result) if with_entropy else result.logprobs.square().sum()
        grads = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
        # The kept logits are used up: a second pass recomputes them.
        again = torch.autograd.grad(loss, (hidden, weight, bias))
        assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))
        found.append((*grads, *(part for part in result if part is not None)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("autocast", [True, False])
def test_kept_logits_change_no_bit_in_half_precision(autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight, bias, labels = random_head(tokens=40, vocab=300, hidden_size=16, dtype=dtype)
    grads = []
    for room in (0, 1e9):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            result = chunked_logprobs(hidden, weight, labels, temperature=0.7, chunk_size=8, bias=bias, kept_bytes=room)
        grads.append(torch.autograd.grad(weighted_sum(*result), (hidden, weight, bias)))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def addmm_flops(sum_shape, a_shape, b_shape, **how):
    """Of the accumulating product, which FlopCounterMode does not know."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def head_flops(kept_bytes, *, backward=True):
    hidden, weight, _, labels = random_head(tokens=7, vocab=11, hidden_size=5)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops}) as counter:
        result = chunked_logprobs(hidden, weight, labels, temperature=1.0, chunk_size=3, kept_bytes=kept_bytes)
        if backward:
            result.logprobs.sum().backward()
    return counter.get_total_flops()


def test_kept_logits_save_the_product_of_their_chunks():
    # The logits, their recomputation, and the gradients of states and weight: four products of 2 * 7 * 5 * 11.
    product = 2 * 7 * 5 * 11
    assert head_flops(0, backward=False) == product
    assert head_flops(0) == 4 * product
    assert head_flops(1e9) == head_flops(math.inf) == 3 * product
    # Two of three chunks of 3, 3 and 1 tokens; a chunk is kept whole or not at all.
    assert head_flops(2 * BYTES_OF_A_CHUNK + 1) == 4 * product - 2 * 6 * 5 * 11
    assert head_flops(2 * BYTES_OF_A_CHUNK - 1) == 4 * product - 2 * 3 * 5 * 11


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_take_no_more_memory_than_they_may_and_are_freed_one_by_one(dtype, with_entropy):
    tokens, vocab, chunk_size = 256, 4096, 16
    hidden, weight, _, labels = random_head(tokens, vocab, 8, dtype)
    chunk, kept = chunk_size * vocab * 4, 8 * chunk_size * vocab * dtype.itemsize
    results = []

    def forward():
        settings = {"temperature": 1.0, "chunk_size": chunk_size, "with_entropy": with_entropy}
        results.append(chunked_logprobs(hidden, weight, labels, kept_bytes=kept + 100, **settings))

    def backward():
        result = results.pop()
        (weighted_sum(*result) if with_entropy else result.logprobs.sum()).backward()

    per_token, gradients = 64 * tokens, 2 * 4 * (weight.numel() + hidden.numel())
    peak, held = memory_of(forward)
    assert kept <= held <= kept + per_token
    assert peak <= kept + 2 * chunk + per_token
    peak, released = memory_of(backward)
    # Beyond what the forward pass kept: a chunk, and half a chunk of gradients in the dtype of the product.
    assert peak <= chunk + chunk * (dtype == torch.bfloat16) + gradients + per_token
    assert released <= gradients - kept
    with torch.no_grad():
        assert memory_of(forward)[0] <= 3 * chunk < kept, "nothing is kept for a backward pass that will not come"
