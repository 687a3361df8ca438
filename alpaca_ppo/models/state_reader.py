"""What a critic of the layout `cached` learns with: a small causal transformer that reads hidden states of the policy.

The states are computed once for each rollout and are not differentiated, so that a pass of this critic costs a small
part of one of the policy.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

from alpaca_ppo.functional.packing import PackedRows, Span
from alpaca_ppo.models.packed_attention import install_attention, sequence_keywords

_HEAD_WIDTH = 64


class StateReader(nn.Module):
    """A causal transformer over the policy's states before each response token, one row of tokens after the other.

    Args:
        policy: the language model whose states it reads; not kept.
        layers: numbers of the layers whose outputs it reads, from 1; by default those at 1/2 and 3/4 of the depth.
        width: its own hidden size, a multiple of 64.
        depth: its blocks.

    Raises:
        ValueError: if the policy does not have these layers.
    """

    def __init__(
        self, policy: PreTrainedModel, *, layers: Sequence[int] | None = None, width: int = 256, depth: int = 3
    ) -> None:
        super().__init__()
        count = policy.config.get_text_config().num_hidden_layers
        self.layers = sorted({*layers} if layers else {max(1, count // 2), max(1, 3 * count // 4)})
        self.width, self.depth = width, depth
        # For its errors.
        decoder_layers(policy, self.layers)
        self.input = nn.Linear(len(self.layers) * policy.config.get_text_config().hidden_size, width)
        config = LlamaConfig(
            vocab_size=1,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=depth,
            num_attention_heads=width // _HEAD_WIDTH,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.blocks = LlamaModel(config)
        # It reads no tokens.
        self.blocks.embed_tokens = nn.Identity()
        assert install_attention(self.blocks), "the attention of LlamaModel cannot be replaced"

    @property
    def state_shape(self) -> tuple[int, int]:
        """(layers, H) of the states that it reads."""
        return len(self.layers), self.input.in_features // len(self.layers)

    def settings(self) -> dict[str, Any]:
        """What rebuilds it for a policy, stored as JSON beside its weights."""
        return {"layers": self.layers, "width": self.width, "depth": self.depth}

    def check_like(self, saved: "StateReader") -> None:
        """Raises a `ValueError` if this reader cannot take the weights of `saved`."""
        if saved.settings() != self.settings():
            has, needed = [*saved.settings().values()], [*self.settings().values()]
            problem = f"the critic has critic_layers, critic_width and critic_depth {has}, the options are {needed}"
            raise ValueError(f"{problem}; set the same")

    def forward(self, states: Tensor, rows: PackedRows) -> Tensor:
        """Its states (N, width) for those of the policy, (N, layers, H), before the N response tokens of `rows`."""
        dtype = self.input.weight.dtype
        inputs = self.input(layer_norm(states.to(dtype), states.shape[-1:]).flatten(1)).unsqueeze(0)
        ends = accumulate(rows.counts)
        spans = tuple(Span(end - count, count) for end, count in zip(ends, rows.counts, strict=True) if count)
        if not spans:
            # A dummy, where ranks must make the same number of passes: one token of no row.
            inputs, keywords = torch.cat([inputs, inputs.new_zeros(1, 1, self.width)], dim=1), {}
        else:
            positions = torch.cat([torch.arange(span.length) for span in spans]).to(inputs.device).unsqueeze(0)
            keywords = sequence_keywords(self.blocks, rows._replace(position_ids=positions, spans=spans))
        read: Tensor = self.blocks(inputs_embeds=inputs, use_cache=False, **keywords).last_hidden_state
        return read[0, : len(states)]


def decoder_layers(model: Any, numbers: Sequence[int] | None = None) -> list[nn.Module]:
    """The layers of a language model with these `numbers`, from 1, or all. Raises a ValueError if it does not have
    them.
    """
    count = model.config.get_text_config().num_hidden_layers
    stack = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    numbers = range(1, count + 1) if numbers is None else numbers
    if stack is None or not set(numbers) <= set(range(1, len(stack) + 1)):
        layers = "no list of its layers" if stack is None else f"the layers 1 to {len(stack)}"
        problem = f"critic_layers is {list(numbers)}, but {type(model).__name__} has {layers}"
        raise ValueError(f"{problem}; name others, or choose another critic_layout")
    return [stack[number - 1] for number in numbers]


@contextmanager
def captured_outputs(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yields the list of the outputs (B, L, H) of `modules` in the passes of the block, in their order."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output if torch.is_tensor(output) else output[0])

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(keep))
        yield found
