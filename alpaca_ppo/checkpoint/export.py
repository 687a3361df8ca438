"""Exports the final policy, value model and merged model as folders that `from_pretrained` loads.

Checkpoints to resume from are in `serialization`, the README of each folder in `model_card`.
"""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from alpaca_ppo.adapters import POLICY, VALUE, AdapterSet, merged_weights
from alpaca_ppo.atomic_io import StrPath, write_folder_atomically
from alpaca_ppo.checkpoint.model_card import write_model_card, write_value_card
from alpaca_ppo.library_output import transformers_bars
from alpaca_ppo.models import (
    ActorCritic,
    CriticHead,
    write_critic,
    write_critic_adapter,
)
from alpaca_ppo.remote_code import has_remote_code, remote_code
from alpaca_ppo.tracking.weights_step import FILE as STEP_FILE
from alpaca_ppo.tracking.weights_step import WeightsStep


def save_final(
    folder: StrPath,
    actor_critic: ActorCritic,
    processing_class: Any,
    *,
    step: WeightsStep,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    reward_weights: Mapping[str, float] | None = None,
    merged: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Writes `folder`/policy with a model card and, if there is a critic, `folder`/value; each of them atomically. Then
    `folder`/step.json, which is absent while they are written.

    Args:
        folder: parent of both; its other content is left alone.
        actor_critic: unwrapped. A critic without a backbone of its own is exported with the policy's.
        processing_class: the policy's tokenizer, saved with each model.
        step: which step of the run the weights are from.
        metrics: metrics of that step, for the card.
        config: the run's configuration as plain values, for the card.
        reward_weights: the weight of each reward source by name, in the order of the sources, for the card.
        merged: if the policy is an adapter, also write `folder`/merged: the full model with the adapter merged in.
        trust_remote_code: run code that comes with the critic's architecture, to save it as a sequence classifier.
    """
    policy, adapters = actor_critic.policy.model, actor_critic.policy.adapters
    (Path(folder) / STEP_FILE).unlink(missing_ok=True)
    with write_folder_atomically(Path(folder) / "policy") as tmp_dir:
        _write_policy(tmp_dir, policy if adapters is None else adapters.peft, processing_class)
        write_model_card(
            tmp_dir,
            step=step,
            metrics=metrics,
            config=config,
            base_model=policy.config.name_or_path,
            reward_weights=reward_weights,
            own_code=has_remote_code(policy),
        )
    if actor_critic.critic is not None:
        _save_value(
            Path(folder) / "value",
            actor_critic,
            processing_class,
            trust_remote_code=trust_remote_code,
        )
    # Last, because it reads the base from disk again, which may fail.
    if merged and adapters is not None:
        save_merged(Path(folder) / "merged", adapters, processing_class)
    step.write(folder)


def _save_value(
    folder: Path,
    actor_critic: ActorCritic,
    processing_class: Any,
    *,
    trust_remote_code: bool,
) -> None:
    policy, critic = actor_critic.policy, actor_critic.critic
    assert critic is not None
    if critic.backbone is None and policy.adapters is not None:
        name = VALUE if critic.has_adapter else POLICY
        save_value_adapter(folder, policy.adapters, name, critic.head, processing_class)
        return
    backbone: Any = policy.model.base_model if critic.backbone is None else critic.backbone
    save_value_model(
        folder,
        backbone,
        critic.head,
        processing_class,
        trust_remote_code=trust_remote_code,
    )


def save_policy(folder: StrPath, policy: PreTrainedModel, processing_class: Any) -> None:
    """Writes weights, configuration and tokenizer atomically; for a PEFT model, only the policy's adapter."""
    with write_folder_atomically(folder) as tmp_dir:
        _write_policy(tmp_dir, policy, processing_class)


def save_merged(folder: StrPath, adapters: AdapterSet, processing_class: Any) -> None:
    """Writes the full policy with its adapter merged into the base, atomically and at least in float32.

    Its logits are those of the adapter on the stored base, whatever the precision of the run, unless `merged_weights`
    warns that the base cannot be read again.
    """
    model = adapters.model
    config: Any = copy.deepcopy(model.config)
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        # The adapter has an embedding of its own, which loading must not tie to the head.
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    with write_folder_atomically(folder) as tmp_dir, transformers_bars(shown=False):
        model.save_pretrained(tmp_dir, state_dict=merged_weights(adapters))
        # The line above wrote the base's configuration, with its dtype.
        config.architectures = [type(model).__name__]
        config.dtype = torch.promote_types(model.dtype, torch.float32)
        config.save_pretrained(tmp_dir)
        processing_class.save_pretrained(tmp_dir)


def save_value_model(
    folder: StrPath,
    backbone: PreTrainedModel,
    head: CriticHead,
    processing_class: Any,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Writes a critic with a full backbone, atomically. `value_model` accepts the folder.

    A scalar critic becomes a sequence classifier with one label, if transformers has one for the architecture;
    `AutoModelForSequenceClassification` loads it, and its `score` of the hidden state at position t is the value after
    reading tokens 0..t. Any other critic is written for `models.load_critic`.

    Args:
        folder: of the model.
        backbone: a base model of transformers (`LlamaModel`, ...), without a head.
        head: the value head.
        processing_class: the tokenizer, saved too. The classifier finds the end of a padded row by its pad token.
        trust_remote_code: run code that comes with the architecture's classifier; without it, such a critic is written
            for `models.load_critic`.
    """
    score = head.score_weight()
    classifier = None if score is None else matching_classifier(backbone, trust_remote_code=trust_remote_code)
    with write_folder_atomically(folder) as tmp_dir, transformers_bars(shown=False):
        if classifier is None or score is None:
            write_critic(tmp_dir, head, backbone)
        else:
            if processing_class.pad_token_id is not None:
                classifier.config.pad_token_id = processing_class.pad_token_id
            prefix = classifier.base_model_prefix
            weights = {f"{prefix}.{name}": tensor for name, tensor in backbone.state_dict().items()}
            weights["score.weight"] = score.detach()
            classifier.save_pretrained(tmp_dir, state_dict=weights)
        processing_class.save_pretrained(tmp_dir)
        form: Literal["critic", "classifier"] = "critic" if classifier is None else "classifier"
        write_value_card(tmp_dir, form, own_code=has_remote_code(backbone))


def save_value_adapter(
    folder: StrPath,
    adapters: AdapterSet,
    name: str,
    head: CriticHead,
    processing_class: Any,
) -> None:
    """Writes a critic that consists of the adapter `name` and a head, atomically.

    A scalar critic becomes an adapter of a sequence classifier, which `AutoPeftModelForSequenceClassification` loads;
    any other is written for `models.load_critic`.
    """
    with write_folder_atomically(folder) as tmp_dir:
        write_critic_adapter(tmp_dir, adapters, name, head)
        processing_class.save_pretrained(tmp_dir)
        form: Literal["critic_adapter", "adapter"] = "critic_adapter" if head.score_weight() is None else "adapter"
        write_value_card(tmp_dir, form, own_code=has_remote_code(adapters.model))


def matching_classifier(backbone: PreTrainedModel, *, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """A sequence classifier with one label for the architecture of `backbone`, on the meta device.

    None if neither transformers nor, with `trust_remote_code`, the code of `backbone` has one that consists of exactly
    `backbone` and a linear head `score` without bias. A warning tells why the code's own classifier cannot be built.
    """
    config = copy.deepcopy(backbone.config)
    config.num_labels = 1
    try:
        with remote_code(config.name_or_path or "", trust=trust_remote_code), torch.device("meta"):
            classifier: PreTrainedModel = AutoModelForSequenceClassification.from_config(
                config, dtype=backbone.dtype, trust_remote_code=trust_remote_code
            )
    except (ValueError, OSError) as error:
        # ValueError: transformers raises it for an architecture without a sequence classifier, and for one whose code
        # is not trusted; there is no other way to tell. OSError: the folder of that code is gone.
        own_classes = vars(config).get("auto_map") or {}
        if trust_remote_code and AutoModelForSequenceClassification.__name__ in own_classes:
            warnings.warn(
                f"the sequence classifier of {config.name_or_path!r} cannot be built ({type(error).__name__}: "
                f"{error}); the critic is saved in the form that models.load_critic loads",
                stacklevel=2,
            )
        return None
    needed = {f"{classifier.base_model_prefix}.{name}" for name in backbone.state_dict()} | {"score.weight"}
    return classifier if needed == set(classifier.state_dict()) else None


def _write_policy(folder: Path, policy: Any, processing_class: Any) -> None:
    # They would be drawn over the run's own bar.
    with transformers_bars(shown=False):
        if isinstance(policy, PeftModel):
            policy.save_pretrained(str(folder), selected_adapters=[POLICY])
        else:
            policy.save_pretrained(folder)
    processing_class.save_pretrained(folder)
