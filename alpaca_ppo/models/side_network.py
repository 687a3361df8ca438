"""The network of a `side` critic: a few narrow transformer blocks on the states of one layer of the policy.

No gradient goes back into the policy, and the policy's own pass computes the states, so at its default size such a
critic has less than a hundredth of the policy's FLOPs. After ladder side-tuning (arXiv:2206.06522), with one connection
instead of one for each layer: intermediate layers are often better features than the last (arXiv:2502.02013), and a
single one lets a pass that is made for the critic alone end there.

The blocks attend to the row's earlier states, which a network for each token by itself could not: the policy's state
of a token holds what predicts the next tokens, not everything in the row that the return depends on. They have no
position embedding, because the policy's states hold positions already, and causal attention needs none
(arXiv:2305.19466).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional.packing import PackedRows
from alpaca_ppo.models.packed_attention import AttentionSettings, dense_attention
from alpaca_ppo.models.packed_sequences import PackedSequences

_HEAD_SIZE = 64


class SideNetwork(nn.Module):
    """A map from the policy's states (B, T, H) after one of its layers to states (B, T, W) for a critic's head.

    The weights have at least 32 bits, whatever the policy's. Without `side_depth` the map is linear after a
    normalization.

    Args:
        hidden_size: H.
        side_layer: the number, from 1, of the policy's layer.
        side_width: W.
        side_depth: blocks of attention and MLP.
    """

    def __init__(self, hidden_size: int, *, side_layer: int, side_width: int, side_depth: int) -> None:
        super().__init__()
        self.hidden_size, self.side_layer = hidden_size, side_layer
        self.side_width, self.side_depth = side_width, side_depth
        # A few entries of a model's states can be thousands of times larger than the others (arXiv:2402.17762).
        self.norm = nn.LayerNorm(hidden_size)
        self.projection = nn.Linear(hidden_size, side_width, bias=False)
        self.blocks = nn.ModuleList(_Block(side_width) for _ in range(side_depth))
        self.output_norm = nn.LayerNorm(side_width)

    @classmethod
    def on(
        cls,
        policy: PreTrainedModel,
        *,
        side_layer: int | None = None,
        side_width: int | None = None,
        side_depth: int = 4,
    ) -> Self:
        """A new network for `policy`.

        Args:
            policy: a causal language model.
            side_layer: None = two thirds of its depth.
            side_width: None = a quarter of its hidden size.
            side_depth: of the network.

        Raises:
            ValueError: when the policy has no such layer, or its layers are not found.
        """
        text, layers = policy.config.get_text_config(), len(decoder_layers(policy.base_model))
        if side_layer is not None and side_layer > layers:
            raise ValueError(
                f"side_layer is {side_layer}, but the policy has {layers} layers; set side_layer to 1 to {layers}, or "
                "null for two thirds of them"
            )
        network = cls(
            text.hidden_size,
            side_layer=side_layer or max(1, 2 * layers // 3),
            side_width=side_width or max(1, text.hidden_size // 4),
            side_depth=side_depth,
        )
        return network.to(torch.promote_types(policy.dtype, torch.float32))

    def settings(self) -> dict[str, int]:
        """The arguments that a network of the same shape is made with."""
        return {
            "hidden_size": self.hidden_size,
            "side_layer": self.side_layer,
            "side_width": self.side_width,
            "side_depth": self.side_depth,
        }

    def forward(self, states: Tensor, packed: PackedRows | None = None) -> Tensor:
        """States (B, T, W) of the policy's `states` (B, T, H), in any dtype; each sees those before it in its row.

        Args:
            states: of rows that begin at column 0, or with the spans of `packed` of rows laid end to end.
            packed: the rows; None = each of the B is one.
        """
        hidden = self.projection(self.norm(states.to(self.norm.weight.dtype)))
        packing = None if packed is None or packed.spans is None else PackedSequences(packed.spans)
        for block in self.blocks:
            hidden = block(hidden, packing)
        normed: Tensor = self.output_norm(hidden)
        return normed

    def response_states(self, states: Tensor, packed: PackedRows) -> Tensor:
        """The states (N, W) that predict the N response tokens of `packed`."""
        hidden: Tensor = self(states, packed)
        return hidden[packed.rows if packed.spans is None else 0, packed.states]

    @torch.no_grad()
    def states_of(self, policy: PreTrainedModel, input_ids: Tensor) -> Tensor:
        """The states (B, T, W) for rows `input_ids` (B, T) without padding on the left, in a pass of `policy`."""
        with layer_states(policy.base_model, self.side_layer, stop=True) as found:
            policy.base_model(input_ids=input_ids, use_cache=False)
        states: Tensor = self(found[-1])
        return states


def new_side_network(args: PPOConfig, policy: PreTrainedModel) -> SideNetwork:
    """The network that `args` describe for `policy`; see `SideNetwork.on`."""
    return SideNetwork.on(policy, side_layer=args.side_layer, side_width=args.side_width, side_depth=args.side_depth)


class _Block(nn.Module):
    """Causal attention and an MLP, each with its input normalized and its output added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = next(n for n in range(max(1, width // _HEAD_SIZE), 0, -1) if width % n == 0)
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, states: Tensor, packing: PackedSequences | None) -> Tensor:
        states = states + self.attention_output(self._attended(self.attention_norm(states), packing))
        added: Tensor = states + self.mlp(self.mlp_norm(states))
        return added

    def _attended(self, states: Tensor, packing: PackedSequences | None) -> Tensor:
        parts = self.query_key_value(states).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(dim=-3))
        if packing is None:
            heads = dense_attention(query, key, value, None, AttentionSettings()).transpose(1, 2)
        else:
            heads = packing.attend(self, query, key, value, AttentionSettings())
        return heads.flatten(-2)


class _LayerReached(Exception):
    """Ends a pass that is made for the states of a layer alone."""


@contextmanager
def layer_states(backbone: nn.Module, layer: int, *, stop: bool) -> Iterator[list[Tensor]]:
    """Yields a list that gets the detached output (B, T, H) of the layer with number `layer` (from 1) in each pass of
    `backbone` inside the block.

    A hook, because `output_hidden_states` would keep the output of every layer.

    Args:
        backbone: of the policy.
        layer: whose output is kept.
        stop: the first pass ends after that layer, and with it the block.
    """
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).detach())
        if stop:
            raise _LayerReached

    handle = decoder_layers(backbone)[layer - 1].register_forward_hook(keep)
    try:
        yield found
    except _LayerReached:
        pass
    finally:
        handle.remove()


def decoder_layers(backbone: Any) -> nn.ModuleList:
    """The layers of `backbone`, in order.

    Raises:
        ValueError: when it has no list of as many modules as its configuration says.
    """
    depth = backbone.config.get_text_config().num_hidden_layers
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(
        f"critic_layout is 'side', but {type(backbone).__name__} has no list of {depth} layers (num_hidden_layers) "
        "whose states a critic could read; choose another critic_layout"
    )
