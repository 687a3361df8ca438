"""Policy and critic in one module, so that a single wrapper (DDP, DeepSpeed) covers everything that is trained.

Critic heads, with the critic's losses, are in `critic_heads`; the policy's losses are in `ppo.losses`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from alpaca_ppo.adapters.adapter_set import VALUE
from alpaca_ppo.functional.packing import PackedRows, RowLayout, pack_rows
from alpaca_ppo.models.critic_heads import CriticHead
from alpaca_ppo.models.packed_attention import row_layout
from alpaca_ppo.models.policy import Policy, before_tokens, response_states, scatter_tokens, use_torch_activations
from alpaca_ppo.models.state_reader import StateReader, captured_outputs, decoder_layers


class ActorCriticOutputs(NamedTuple):
    """The outputs of one forward pass for the response tokens, zero outside the response mask, float32 or wider.

    A field is None if that part of the pass was not requested.

    Attributes:
        logprobs: (B, R), nats.
        entropies: (B, R), nats.
        values: (B, R), value of the state before the token, in reward units; used by GAE.
        value_means: (B, R), the mean return that a distributional critic predicts; not `values` at a risk level.
        predictions: the input of the critic's loss: (B, R) values, (B, R, atoms) logits or (B, R, K) quantiles.
        policy_states: (N, layers, H), what a critic with a `reader` has read before the N response tokens, row by row.
    """

    logprobs: Tensor | None
    entropies: Tensor | None
    values: Tensor | None
    value_means: Tensor | None
    predictions: Tensor | None
    policy_states: Tensor | None = None


class Critic(nn.Module):
    """A critic head and the source of the hidden states that it reads: its own `backbone` (layout `separate`), the
    policy's base model with the adapter `value` (`adapter`, `has_adapter`), the policy's hidden states (`shared`), or
    a `reader` of some of these, without a gradient into the policy (`cached`).

    Attributes:
        padding_reason: why rows are padded for the critic's own backbone; None lays them end to end.
    """

    def __init__(
        self,
        head: CriticHead,
        backbone: nn.Module | None,
        *,
        has_adapter: bool = False,
        reader: StateReader | None = None,
    ) -> None:
        super().__init__()
        if backbone is not None:
            use_torch_activations(backbone)
        self.head = head
        self.backbone = backbone
        self.has_adapter = has_adapter
        self.reader = reader
        self.padding_reason: str | None = "Critic reads padded rows"

    @property
    def layout(self) -> Literal["separate", "adapter", "shared", "cached"]:
        """As the option `critic_layout`."""
        if self.reader is not None:
            return "cached"
        if self.backbone is not None:
            return "separate"
        return "adapter" if self.has_adapter else "shared"

    @property
    def reads_policy(self) -> bool:
        """Whether it reads states of the policy in training."""
        return self.layout in ("shared", "cached")


class ActorCritic(nn.Module):
    """The policy in training and its critic; None for advantage estimators without a critic."""

    def __init__(self, policy: Policy, critic: Critic | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def padding_free(self) -> bool:
        """Whether neither policy nor critic pads rows."""
        return all(layout.padding_free for layout in self.layouts)

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The layers of the policy whose states a critic with a `reader` reads, if `Policy.states` is not overridden:
        whoever runs the model may then keep them.
        """
        reader = None if self.critic is None else self.critic.reader
        return () if reader is None or type(self.policy).states is not Policy.states else tuple(reader.layers)

    @property
    def layouts(self) -> tuple[RowLayout, RowLayout]:
        """How policy and critic read rows."""
        if self.critic is None or self.critic.backbone is None or self.critic.reader is not None:
            return self.policy.layout, self.policy.layout
        padding_free = self.critic.padding_reason is None
        return self.policy.layout, row_layout(self.critic.backbone, padding_free=padding_free)

    def pack(self, *rows: Tensor, device: torch.device | None = None) -> tuple[PackedRows, PackedRows]:
        """The rows (queries, query_attn_masks, responses and response_mask of `forward`) as the policy and as the
        critic read them; see `pack_rows`.
        """
        policy_layout, critic_layout = self.layouts
        packed = pack_rows(*rows, layout=policy_layout, device=device)
        if critic_layout == policy_layout:
            return packed, packed
        return packed, pack_rows(*rows, layout=critic_layout, device=device)

    def forward(
        self,
        queries: Tensor,
        query_attn_masks: Tensor,
        responses: Tensor,
        response_mask: Tensor,
        *,
        temperature: float,
        chunk_size: int,
        with_policy: bool = True,
        with_critic: bool = True,
        with_entropies: bool = True,
        value_taus: Tensor | None = None,
        policy_states: Tensor | None = None,
        packed: tuple[PackedRows, PackedRows] | None = None,
    ) -> ActorCriticOutputs:
        """Log-probabilities, entropies and values of `responses`. Arguments that are not listed: see `Policy.forward`.

        Args:
            with_policy: False runs only the critic; no gradient reaches the policy then.
            with_critic: False runs only the policy.
            value_taus: (K,) quantile levels of `predictions`, for an iqn critic in training.
            policy_states: those of the outputs of an earlier pass, which a critic with a `reader` then reads.
            packed: `pack` of these rows, if the caller has it.
        """
        rows, critic_rows = packed or self.pack(queries, query_attn_masks, responses, response_mask)
        logprobs = entropies = None
        critic = self.critic if with_critic else None
        reader = None if critic is None else critic.reader
        read = [] if reader is None or policy_states is not None else decoder_layers(self.policy.model, reader.layers)
        if with_policy or (critic is not None and critic.reads_policy and policy_states is None):
            with torch.set_grad_enabled(torch.is_grad_enabled() and with_policy), captured_outputs(read) as outputs:
                states = self.policy.states(rows)
            if read:
                policy_states = torch.stack([before_tokens(output, rows) for output in outputs], dim=1).detach()
        if with_policy:
            logprobs, entropies = self.policy.outputs_from_states(
                states, rows, responses, temperature=temperature, chunk_size=chunk_size, with_entropies=with_entropies
            )
        if critic is None:
            return ActorCriticOutputs(logprobs, entropies, None, None, None)
        if reader is not None:
            assert policy_states is not None
            states = reader(policy_states, rows)
        elif critic.layout != "shared":
            states = self._critic_states(critic, critic_rows)
        flat = critic.head(states, value_taus)
        values = scatter_tokens(flat.values, critic_rows, responses)
        predictions = scatter_tokens(flat.predictions, critic_rows, responses)
        means = scatter_tokens(flat.means, critic_rows, responses) if critic.head.distributional else None
        return ActorCriticOutputs(logprobs, entropies, values, means, predictions, policy_states)

    def critic_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the critic only: its head, and its backbone, adapter or reader."""
        if self.critic is None:
            return []
        parameters = [p for p in self.critic.parameters() if p.requires_grad]
        if self.critic.has_adapter and self.policy.adapters is not None:
            parameters += self.policy.adapters.parameters_of(VALUE)
        return parameters

    def policy_parameters(self) -> list[nn.Parameter]:
        """All other trainable parameters: the policy's, which a `shared` critic trains too."""
        critic = {id(p) for p in self.critic_parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in critic]

    def critic_active(self) -> AbstractContextManager[None]:
        """Activates the critic's adapter on the base model, if it has one."""
        adapters = self.policy.adapters if self.critic is not None and self.critic.has_adapter else None
        return nullcontext() if adapters is None else adapters.active(VALUE)

    def _critic_states(self, critic: Critic, packed: PackedRows) -> Tensor:
        """The states (N, H) from the critic's own backbone or adapter."""
        if critic.backbone is not None:
            return response_states(critic.backbone, packed)
        adapters, model = self.policy.adapters, self.policy.model
        assert adapters is not None
        # With checkpointing, the backward pass computes the states again, by the adapter that is active there.
        recomputes = torch.is_grad_enabled() and model.is_gradient_checkpointing
        if recomputes and adapters.peft.active_adapter != VALUE:
            raise ValueError("gradient checkpointing needs the critic's adapter; run both passes in critic_active()")
        with self.critic_active():
            return self.policy.states(packed)
