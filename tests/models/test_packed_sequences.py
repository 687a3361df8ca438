"""Rows laid end to end give what rows with padding give, on every family that can be packed."""

import copy

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from alpaca_ppo.models import ActorCritic, build_actor_critic
from alpaca_ppo.models.packing_probe import use_padding_free
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
    language_model = tiny_causal_lm(arch, dtype=torch.float64)
    # Their fast kernel has no float64.
    language_model.set_experts_implementation("eager")
    padded = build_actor_critic(language_model, critic_layout="separate")
    torch.nn.init.normal_(next(padded.critic.head.parameters()), generator=torch.Generator().manual_seed(1))
    padded.double()
    packed = copy.deepcopy(padded)
    packed.policy.padding_free = use_padding_free(packed.policy.model, True)
    packed.critic.padding_free = use_padding_free(packed.critic.backbone, True)
    return padded, packed


def run(model: ActorCritic, batch: list[Tensor], **parts: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs, entropies and values, and the gradients of a loss of them."""
    model.zero_grad()
    with InFloat64():
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
