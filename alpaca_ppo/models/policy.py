"""A causal language model that computes log-probabilities and entropies of response tokens.

Policy, recomputed old policy and reference use this one path: the backbone runs on rows that lie end to end
(`packed_attention`) or, where the model needs padding, on left-aligned rows (`packing.pack_rows`), and logits are
computed only for the states that predict response tokens, one chunk at a time. Sampling is in `generation`.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import AccurateGELUActivation, GELUActivation, NewGELUActivation

from alpaca_ppo.adapters.adapter_set import AdapterSet
from alpaca_ppo.functional import chunked_logprobs
from alpaca_ppo.functional.packing import PackedRows, RowLayout, pack_rows
from alpaca_ppo.models.packed_attention import row_layout, sequence_keywords

# Bytes of a micro-batch's logits that are kept for the backward pass, which recomputes the others: those of 3,500
# tokens in bfloat16 at a vocabulary of 150,000.
KEPT_LOGITS = 2**30


class PolicyOutputs(NamedTuple):
    """(B, R), zero outside the response mask, float32 or wider, in nats. The entropies are those of the distributions
    that the tokens were drawn from; None if not requested.
    """

    logprobs: Tensor
    entropies: Tensor | None


class Policy(nn.Module):
    """The policy: a `PreTrainedModel` with a language-model head, not copied, in which some activations are replaced by
    faster ones (`use_torch_activations`).

    Args:
        model: the language model; `AdapterSet.model` if it has adapters.
        adapters: the adapters in the model's layers, if any.

    Attributes:
        padding_reason: why rows are padded; None lays them end to end. Set by `trial.fit_rows`.

    Raises:
        ValueError: if the model has no output embeddings or no backbone, or is the decoder of an encoder-decoder.
            Unless a subclass overrides `outputs_from_states`, also if the model draws random numbers in eval mode, or
            its logits are not finite or not its head's (see `logit_scaling`).
    """

    def __init__(self, model: PreTrainedModel, adapters: AdapterSet | None = None) -> None:
        super().__init__()
        if not isinstance(model.get_output_embeddings(), nn.Linear):
            raise ValueError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
        check_architecture(model, "policy")
        use_torch_activations(model)
        self.model = model
        # An AdapterSet is not a module: the adapters' parameters are registered in the model's own layers.
        self.adapters = adapters
        # The ids that end a response; of a policy that is not sampled from, none.
        self.stop_token_ids: tuple[int, ...] = ()
        self.padding_reason: str | None = f"{type(self).__name__} reads padded rows"
        if type(self).outputs_from_states is Policy.outputs_from_states:
            self._check_logits()

    @property
    def head(self) -> nn.Linear:
        """The language-model head, of weight (V, H)."""
        return cast(nn.Linear, self.model.get_output_embeddings())

    @property
    def padding_free(self) -> bool:
        return self.padding_reason is None

    @property
    def layout(self) -> RowLayout:
        """How the backbone reads rows."""
        return row_layout(self.model.base_model, padding_free=self.padding_free)

    def states(self, packed: PackedRows) -> Tensor:
        """The hidden states (N, H) that predict the N response tokens of `packed`."""
        return response_states(self.model.base_model, packed)

    def outputs_from_states(
        self,
        states: Tensor,
        packed: PackedRows,
        responses: Tensor,
        *,
        temperature: float,
        chunk_size: int,
        with_entropies: bool = True,
    ) -> PolicyOutputs:
        """Log-probabilities and entropies of `responses` (B, R) from the result of `self.states`. An override gets all
        three keywords, which are those of `forward`.
        """
        scale, transform = logit_scaling(self.model.config)
        flat = chunked_logprobs(
            states,
            self.head.weight,
            responses[packed.rows, packed.actions],
            temperature=temperature / scale,
            chunk_size=chunk_size,
            bias=self.head.bias,
            with_entropy=with_entropies,
            kept_bytes=KEPT_LOGITS,
            logit_transform=transform,
        )
        entropies = None if flat.entropies is None else scatter_tokens(flat.entropies, packed, responses)
        return PolicyOutputs(scatter_tokens(flat.logprobs, packed, responses), entropies)

    def forward(
        self,
        queries: Tensor,
        query_attn_masks: Tensor,
        responses: Tensor,
        response_mask: Tensor,
        *,
        temperature: float,
        chunk_size: int,
        with_entropies: bool = True,
        packed: PackedRows | None = None,
    ) -> PolicyOutputs:
        """Log-probabilities and entropies of `responses` under softmax(logits / temperature).

        Args:
            queries: (B, Q) int64, left-padded.
            query_attn_masks: (B, Q), 1 = a real token.
            responses: (B, R) int64, right-padded.
            response_mask: (B, R) bool, True = a token the policy chose.
            temperature: divides the logits.
            chunk_size: tokens whose logits are in memory at once.
            with_entropies: False leaves the entropies out.
            packed: `pack_rows` of these rows in `layout`, if the caller has it.
        """
        packed = packed or pack_rows(queries, query_attn_masks, responses, response_mask, layout=self.layout)
        states = self.states(packed)
        return self.outputs_from_states(
            states, packed, responses, temperature=temperature, chunk_size=chunk_size, with_entropies=with_entropies
        )

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compares two passes of the model on a tiny input, and its logits with ours: some architectures change logits
        after the head.
        """
        if self.head.weight.is_meta:
            return
        ids = _few_tokens(self.model)
        with eval_mode(self.model), unchanged(self.model):
            before = _random_state()
            expected, again = (self.model(input_ids=ids, use_cache=False).logits[0].float() for _ in range(2))
            drawn = _random_state() != before
            logits = self.head(_states_of_few_tokens(self.model))[0]
        scale, transform = logit_scaling(self.model.config)
        logits = (transform(logits) if transform else logits).float() * scale
        atol = 1e-3 * float(expected.abs().max())
        if not bool(expected.isfinite().all()):
            raise ValueError(f"{type(self.model).__name__}'s logits are not finite; check its weights, dtype and code")
        if drawn or not torch.allclose(again, expected, rtol=1e-3, atol=atol):
            raise ValueError(f"{type(self.model).__name__} draws random numbers also in eval mode; remove the noise")
        if not torch.allclose(logits, expected, rtol=1e-3, atol=atol):
            raise ValueError(f"{type(self.model).__name__}'s logits are not its head's; override outputs_from_states")


def check_architecture(model: PreTrainedModel, role: str) -> None:
    """Raises a `ValueError` for models from which no hidden states can be taken, or whose positions would be wrong.
    `role` (policy, critic) is for the error.
    """
    fields = {"decoder_layers", "num_decoder_layers"} & model.config.to_dict().keys()
    if not fields and model.base_model is not model:
        return
    obstacle = f"no backbone under its base_model_prefix ({model.base_model_prefix!r})"
    if fields:
        obstacle = f"{', '.join(fields)}, as the decoder of an encoder-decoder"
    raise ValueError(f"{type(model).__name__} cannot be a {role}: it has {obstacle}; use a decoder-only model")


def logit_scaling(config: object) -> tuple[float, Callable[[Tensor], Tensor] | None]:
    """What an architecture does to its head's output: a factor, and Gemma's soft-capping (Gemma 2, arXiv:2408.00118,
    section 2) or None. Both are fields of the configuration; `Policy` checks the result against the model's own logits.
    """
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    return scale, (lambda logits: cap * torch.tanh(logits / cap)) if cap else None


def response_states(backbone: nn.Module, packed: PackedRows) -> Tensor:
    """The hidden states (N, H) of `backbone` that predict the N response tokens of `packed`."""
    keywords = {} if packed.spans is None else sequence_keywords(backbone, packed)
    hidden: Tensor = backbone(input_ids=packed.input_ids, use_cache=False, **keywords).last_hidden_state
    return before_tokens(hidden, packed)


def before_tokens(hidden: Tensor, packed: PackedRows) -> Tensor:
    """Those of a layer's outputs (N, H) that predict the N response tokens of `packed`."""
    return hidden[packed.rows, packed.states] if packed.spans is None else hidden[0, packed.states]


def scatter_tokens(flat: Tensor, packed: PackedRows, responses: Tensor) -> Tensor:
    """(B, R, ...) zeros with the values `flat` (N, ...) of the N response tokens in their rows and columns."""
    return flat.new_zeros(*responses.shape, *flat.shape[1:]).index_put((packed.rows, packed.actions), flat)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module of `model` into eval mode, and restores the mode of each at the end."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Restores the buffers of `model`, such as running statistics, and torch's random generators at the end."""
    kept = [(part, name, b, b.clone()) for part in model.modules() for name, b in part.named_buffers(recurse=False)]
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        for part, name, buffer, value in kept:
            setattr(part, name, buffer.copy_(value))


def use_eval_mode_but_checkpoint(model: nn.Module) -> None:
    """Puts `model` into eval mode, except the innermost modules that checkpoint activations, which they do in train
    mode only. A model around them may draw random numbers there, for `layerdrop`.
    """
    for module in model.modules():
        checkpointing = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]
        module.training = checkpointing == [module]


def use_update_mode(backbone: PreTrainedModel) -> None:
    """Puts `backbone` into eval mode, as the sampler has it, so that no pass of an update draws noise: dropout, a
    router's jitter, sampled experts. In train mode stay modules that checkpoint activations, and those whose weights
    would get no gradient in eval mode, such as experts with a faster path for inference.

    Raises:
        ValueError: if a pass of an update draws random numbers, changes buffers, or computes something else than the
            sampler does.
    """
    with unchanged(backbone):
        backbone.train()
        trained = _reached_by_gradient(backbone)
        use_eval_mode_but_checkpoint(backbone)
        lost = trained - _reached_by_gradient(backbone)
        for module in backbone.modules():
            if not lost.isdisjoint(module.parameters()):
                module.training = True
        with torch.no_grad(), eval_mode(backbone):
            expected = _states_of_few_tokens(backbone)
        before, buffers = _random_state(), {name: b.clone() for name, b in backbone.named_buffers()}
        with torch.enable_grad():
            found = _states_of_few_tokens(backbone)
        changed = [name for name, b in backbone.named_buffers() if not torch.equal(b, buffers.get(name, b))]
        problem = f"its buffer {changed[0]} changes" if changed else difference(found.detach(), expected, "states")
        if _random_state() != before:
            problem = "it draws random numbers"
    if problem is not None:
        in_train_mode = {type(module).__name__: None for module in backbone.modules() if module.training}
        part = f"{' or '.join(in_train_mode) or 'the code'} of {type(backbone).__name__}"
        remedy = "remove that from it, or set gradient_checkpointing: false if that needs train mode"
        raise ValueError(f"in an update, {part} does not compute what the sampler does: {problem}; {remedy}")


def _reached_by_gradient(backbone: PreTrainedModel) -> set[Tensor]:
    """The parameters that a backward pass from the states of a few tokens would give a gradient."""
    reached, seen = set[Tensor](), set[Any]()
    with torch.enable_grad():
        pending: list[Any] = [_states_of_few_tokens(backbone).grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                reached.add(node.variable)
            pending += [following for following, _ in node.next_functions]
    return reached


def _few_tokens(model: PreTrainedModel) -> Tensor:
    """(1, up to 4) ids on the model's device."""
    return torch.arange(min(4, model.config.get_text_config().vocab_size), device=model.device).unsqueeze(0)


def _states_of_few_tokens(backbone: PreTrainedModel) -> Tensor:
    return cast(Tensor, backbone.base_model(input_ids=_few_tokens(backbone), use_cache=False).last_hidden_state)


def _random_state() -> str:
    """The states of the global random generators: Python's, NumPy's and torch's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return str((random.getstate(), np.random.get_state(), [state.tolist() for state in (torch.get_rng_state(), *cuda)]))


def difference(found: Tensor, expected: Tensor, what: str) -> str | None:
    """Says by how much `what` differs, or None if it is by no more than the rounding of a deep model."""
    # Parts of a float64 model may compute in float32.
    tolerance = 1e-3 if expected.dtype in (torch.float64, torch.float32) else 0.1
    largest = float((found - expected).abs().max())
    return None if largest <= tolerance * float(expected.abs().max()) else f"its {what} differ by {largest:.3g}"


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0 in place, since modules that checkpoint activations stay in train mode.

    Covers `nn.Dropout` and float attributes that layers read, such as `attention_dropout`, `resid_pdrop` and
    `layerdrop`.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def use_torch_activations(model: nn.Module) -> None:
    """Replaces activations that transformers computes in several operators by the one operator that torch has for each.

    They differ by rounding only (2e-7 in float32, 1e-15 in float64). torch's are about three times as fast, and their
    backward pass needs the input alone instead of half a dozen tensors of its size. Left as they are: `gelu_fast` and
    BLOOM's, whose constants are rounded to 10 and 8 digits, and `quick_gelu`, which torch does not have.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            # Not isinstance: a subclass may compute something else.
            if type(child) in (NewGELUActivation, AccurateGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
            elif type(child) is GELUActivation and child.act is not nn.functional.gelu:
                setattr(module, name, nn.GELU())
