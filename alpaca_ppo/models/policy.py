"""A causal language model that scores responses: log-probabilities and entropies of the response tokens, nothing else.

The forward pass runs the backbone on left-aligned rows (no mask, no position ids: see `batching.pack_rows`), picks
the hidden states that chose response tokens, and only for those computes logits, a chunk at a time. Policy, old
policy and reference all go through this one path. Sampling is not here (`alpaca_ppo.generation`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.adapters.adapter_set import AdapterSet
from alpaca_ppo.functional import chunked_logprobs
from alpaca_ppo.functional.packing import PackedRows, pack_rows


class PolicyOutputs(NamedTuple):
    """What a policy says of the response tokens; zero outside the response mask."""

    logprobs: Tensor
    """(B, R) at least float32, in nats."""
    entropies: Tensor
    """(B, R) at least float32, in nats."""


class Policy(nn.Module):
    """Wraps a `PreTrainedModel` with a language-model head; shares its parameters, changes none of them.

    Args:
        model: the language model; of an `AdapterSet`, its `model`.
        adapters: the adapters in the model's layers, where it has any.

    Raises:
        ValueError: when the model has no output embeddings, or computes logits in a way that this class does not know.
    """

    def __init__(self, model: PreTrainedModel, adapters: AdapterSet | None = None) -> None:
        super().__init__()
        if not isinstance(model.get_output_embeddings(), nn.Linear):
            raise ValueError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
        self.model = model
        # No module: its parameters are those of the model's own layers.
        self.adapters = adapters
        self._check_logits()

    @property
    def head(self) -> nn.Linear:
        """The language-model head; its weight is (V, H)."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def recomputes(self) -> bool:
        """Whether activations are checkpointed: the backward pass runs parts of the model again.

        Asked of the layers: a model in memory may come with it, or get it later.
        """
        return any(vars(module).get("gradient_checkpointing", False) for module in self.model.modules())

    def states(self, packed: PackedRows) -> Tensor:
        """Hidden states (N, H) from which the N response tokens of `packed` were chosen."""
        return response_states(self.model.base_model, packed)

    def score(
        self, states: Tensor, packed: PackedRows, responses: Tensor, *, temperature: float, chunk_size: int
    ) -> PolicyOutputs:
        """Log-probabilities and entropies (B, R) of `responses` from the hidden states of `states`."""
        scale, transform = logit_rule(self.model.config)
        flat = chunked_logprobs(
            states,
            self.head.weight,
            responses[packed.rows, packed.actions],
            temperature=temperature / scale,
            chunk_size=chunk_size,
            bias=self.head.bias,
            logit_transform=transform,
        )
        assert flat.entropies is not None
        return PolicyOutputs(unpack(flat.logprobs, packed, responses), unpack(flat.entropies, packed, responses))

    def forward(
        self,
        queries: Tensor,
        query_attn_masks: Tensor,
        responses: Tensor,
        response_mask: Tensor,
        *,
        temperature: float,
        chunk_size: int,
    ) -> PolicyOutputs:
        """Log-probabilities and entropies (B, R) of `responses` (B, R) after `queries` (B, Q), under softmax(logits /
        temperature).
        """
        packed = pack_rows(queries, query_attn_masks, responses, response_mask)
        return self.score(self.states(packed), packed, responses, temperature=temperature, chunk_size=chunk_size)

    @torch.no_grad()
    def _check_logits(self) -> None:
        """One tiny forward pass: our logits must be the model's own, whatever its architecture does after the head."""
        device = self.head.weight.device
        if device.type == "meta":
            return
        ids = torch.arange(min(4, self.head.weight.size(0)), device=device).unsqueeze(0)
        was_training = self.model.training
        self.model.eval()
        expected = self.model(input_ids=ids, use_cache=False).logits[0].float()
        scale, transform = logit_rule(self.model.config)
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.head(hidden)[0]
        logits = (transform(logits) if transform else logits).float() * scale
        self.model.train(was_training)
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
            raise ValueError(
                f"{type(self.model).__name__} (model_type {self.model.config.model_type!r}) does more to its logits "
                f"than its head, "
                f"soft-capping and scaling: they differ by {float((logits - expected).abs().max()):.3g} on a test "
                f"input. "
                "Subclass Policy and override `score`, or use another model"
            )


def logit_rule(config: object) -> tuple[float, Callable[[Tensor], Tensor] | None]:
    """What an architecture does to its head's output: a factor, and an elementwise function (Gemma's soft-capping) or
    None.

    The configuration's fields are the only place where transformers says so; `Policy` checks the outcome against the
    model's own logits.
    """
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, partial(soft_cap, cap=float(cap)) if cap else None


def soft_cap(logits: Tensor, *, cap: float) -> Tensor:
    """cap * tanh(logits / cap), elementwise (Gemma 2, arXiv:2408.00118, section 2)."""
    return cap * torch.tanh(logits / cap)


def response_states(backbone: nn.Module, packed: PackedRows) -> Tensor:
    """Hidden states (N, H) of `backbone` at the N positions that chose the response tokens of `packed`."""
    hidden: Tensor = backbone(input_ids=packed.input_ids, use_cache=False).last_hidden_state
    return hidden[packed.rows, packed.states]


def unpack(flat: Tensor, packed: PackedRows, responses: Tensor) -> Tensor:
    """(N, ...) numbers of response tokens at their places in a (B, R, ...) tensor of zeros."""
    return flat.new_zeros(*responses.shape, *flat.shape[1:]).index_put((packed.rows, packed.actions), flat)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0 in place, so that train mode computes the same numbers as eval mode.

    Attention dropout lives in plain float attributes of the attention modules (`attention_dropout`, `resid_pdrop`,
    `layerdrop`).
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name):
                setattr(module, name, 0.0)
