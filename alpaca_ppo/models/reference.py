"""The reference policy of the KL penalty, without gradients: which model it is, and how it is kept.

It is a frozen copy, which may stay in host memory between passes, or the trained model itself with another adapter or
none: `AdapterSet.starting_point`, the adapter that training starts from.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.models.loading import ModelSource, load_causal_lm
from alpaca_ppo.models.policy import Policy
from alpaca_ppo.models.trial import fit_rows


class CopiedReference:
    """A separate model, frozen here; `offloaded` keeps it in host memory outside of `on_device`."""

    def __init__(self, policy: Policy, *, offloaded: bool = False) -> None:
        self.policy, self.offloaded = policy.requires_grad_(False), offloaded

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[Policy]:
        """Yields the frozen model, which is on `device` inside the block."""
        self.policy.to(device)
        try:
            yield self.policy
        finally:
            if self.offloaded:
                self.policy.to("cpu")


class AdapterReference:
    """The base model of the policy in training with another `adapter`, or with None: there is no second copy of it."""

    def __init__(self, policy: Policy, adapter: str | None) -> None:
        assert policy.adapters is not None
        self.policy, self.adapter, self.adapters = policy, adapter, policy.adapters

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[Policy]:
        """Yields the policy, which acts as the reference inside the block."""
        with self.adapters.active(self.adapter):
            yield self.policy


Reference = CopiedReference | AdapterReference


def make_reference(actor_critic: ActorCritic, ref_model: ModelSource | None, args: PPOConfig) -> Reference | None:
    """The reference that `args.reference` names, None for `none`; with `auto`, `ref_model` if it is given.

    Raises:
        ValueError: for a `ref_model` beside another reference than `auto`; when the reference has another vocabulary,
            too few positions, or needs padding with `padding_free: true`; for `adapter_off` without adapters.
    """
    policy, choice = actor_critic.policy, args.reference
    if ref_model is not None and choice != "auto":
        raise ValueError(f"ref_model is given and reference is {choice!r}; leave one of them out")
    if choice == "none":
        return None
    if choice == "adapter_off" and policy.adapters is None:
        raise ValueError("reference is 'adapter_off' but the policy has no adapter; give peft_config, or use copy")
    # Other choices are folders and hub ids.
    source = ref_model if choice in REFERENCES else choice
    if source is not None:
        reference = _other_policy(policy, source, args)
    elif policy.adapters is not None and choice in ("auto", "adapter_off"):
        return AdapterReference(policy, policy.adapters.starting_point)
    else:
        reference = initial_policy(policy)
    fit_rows(reference, reference.model, args, owner="reference")
    return CopiedReference(reference, offloaded=choice == "copy_offloaded")


def _other_policy(policy: Policy, source: ModelSource, args: PPOConfig) -> Policy:
    """The reference `source`, another model than the policy. One in memory is copied: it may be trained elsewhere."""
    # The adapter stays in its layers.
    model: Any = source.get_base_model() if isinstance(source, PeftModel) else source
    model = model if isinstance(model, str) else copy.deepcopy(model)
    loaded = load_causal_lm(
        model, trust_remote_code=args.trust_remote_code, dtype=policy.model.dtype, arguments=args.model_init_kwargs
    )
    vocabulary, needed = (part.config.get_text_config().vocab_size for part in (loaded, policy.model))
    if vocabulary != needed:
        raise ValueError(f"the reference's vocabulary is {vocabulary}, the policy's {needed}; choose one of that size")
    return Policy(loaded.eval())


def initial_policy(policy: Policy) -> Policy:
    """A copy of the model that the training of `policy` starts from, with bitwise equal outputs.

    A subclass of `Policy` is called with the copied model alone. An adapter that training starts from stays an adapter:
    merging would round it to the base's precision, and the KL would not be 0 at step 0.
    """
    if policy.adapters is None or policy.adapters.starting_point is None:
        return type(policy)(copy_without_adapters(policy).eval())
    peft: Any = copy.deepcopy(policy.adapters.peft).eval()
    start = policy.adapters.starting_point
    peft.set_adapter(start)
    for name in [name for name in peft.peft_config if name != start]:
        peft.delete_adapter(name)
    return type(policy)(peft.get_base_model())


def copy_without_adapters(policy: Policy) -> PreTrainedModel:
    """A copy of the model that the training of `policy` starts from, without adapter layers.

    An adapter that training starts from is merged into it. The base of adapters, which is frozen, becomes trainable.
    """
    if policy.adapters is None:
        return copy.deepcopy(policy.model)
    peft: Any = copy.deepcopy(policy.adapters.peft)
    start = policy.adapters.starting_point
    plain: PreTrainedModel = peft.unload() if start is None else peft.merge_and_unload(adapter_names=[start])
    return plain.requires_grad_(True)
