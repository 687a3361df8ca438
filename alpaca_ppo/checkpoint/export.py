"""The folders a run leaves behind: a policy and a value model that `from_pretrained` loads, and model cards.

What is needed to continue the run is not here (`checkpointing`).
"""

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging

from alpaca_ppo.adapters import POLICY, VALUE, AdapterSet, merged_weights
from alpaca_ppo.atomic_io import StrPath, write_folder_atomically, write_text_atomically
from alpaca_ppo.checkpoint.model_card import (
    _ADAPTER_USE,
    _CLASSIFIER_USE,
    _HEAD_USE,
    _STARTS,
    _VALUE_CARD,
    write_model_card,
)
from alpaca_ppo.models import ActorCritic, CriticHead, write_critic, write_critic_adapter


def save_final(
    folder: StrPath,
    actor_critic: ActorCritic,
    processing_class: Any,
    *,
    figures: Mapping[str, float],
    config: Mapping[str, Any],
    merged: bool = False,
) -> None:
    """Writes `folder`/policy, with its model card, and `folder`/value; each complete or as it was before.

    Args:
        folder: for both; nothing else in it is touched.
        actor_critic: unwrapped. A critic without a backbone of its own is exported with the policy's; no critic, no
            value/.
        processing_class: the policy's tokenizer, saved with either.
        figures: the run's last metrics, for the card.
        config: the run's configuration, plain values, for the card.
        merged: write `folder`/merged too, where the policy is an adapter: the whole model with the adapter merged.
    """
    policy, adapters = actor_critic.policy.model, actor_critic.policy.adapters
    with write_folder_atomically(Path(folder) / "policy") as aside:
        _write_policy(aside, policy if adapters is None else adapters.peft, processing_class)
        write_model_card(aside, figures=figures, config=config, base_model=policy.config.name_or_path)
    if actor_critic.critic is not None:
        _save_value(Path(folder) / "value", actor_critic, processing_class)
    # Last: it reads the base again, which is not the run's own.
    if merged and adapters is not None:
        save_merged(Path(folder) / "merged", adapters, processing_class)


def _save_value(folder: Path, actor_critic: ActorCritic, processing_class: Any) -> None:
    policy, critic = actor_critic.policy, actor_critic.critic
    assert critic is not None
    if critic.backbone is None and policy.adapters is not None:
        name = VALUE if critic.has_adapter else POLICY
        save_value_adapter(folder, policy.adapters, name, critic.head, processing_class)
        return
    backbone: Any = policy.model.base_model if critic.backbone is None else critic.backbone
    save_value_model(folder, backbone, critic.head, processing_class)


def save_policy(folder: StrPath, policy: PreTrainedModel, processing_class: Any) -> None:
    """Writes weights (of an adapter alone, where `policy` is one), configuration and tokenizer, all or nothing."""
    with write_folder_atomically(folder) as aside:
        _write_policy(aside, policy, processing_class)


def save_merged(folder: StrPath, adapters: AdapterSet, processing_class: Any) -> None:
    """Writes the whole policy with its adapter merged into the base, at least in float32, all or nothing.

    Its logits are those of the adapter on the base as it is stored, whatever precision the run held it in, unless
    `merged_weights` warns that the base cannot be read again.
    """
    model = adapters.model
    config: Any = copy.deepcopy(model.config)
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        # The adapter has its own: loading must not tie them to the head.
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    with write_folder_atomically(folder) as aside, _quiet_unless_watched():
        model.save_pretrained(aside, state_dict=merged_weights(adapters))
        # What the line above wrote is the configuration of the base, in its precision.
        config.architectures = [type(model).__name__]
        config.dtype = torch.promote_types(model.dtype, torch.float32)
        config.save_pretrained(aside)
        processing_class.save_pretrained(aside)


def save_value_model(folder: StrPath, backbone: PreTrainedModel, head: CriticHead, processing_class: Any) -> None:
    """Writes the critic, all or nothing: a scalar one as a sequence classifier with one label, where transformers has
    one for the architecture; any other as `models.load_critic` reads it. `value_model` takes either.

    `AutoModelForSequenceClassification` loads the first; `score` applied to the hidden state at position t is the value
    after reading tokens 0..t.

    Args:
        folder: of the model.
        backbone: a base model of transformers (`LlamaModel`, ...), without a head.
        head: the value head.
        processing_class: the tokenizer, saved too. Its pad token tells the classifier where a padded row ends.
    """
    score = head.score_weight()
    classifier = None if score is None else matching_classifier(backbone)
    with write_folder_atomically(folder) as aside, _quiet_unless_watched():
        if classifier is None or score is None:
            write_critic(aside, head, backbone)
        else:
            if processing_class.pad_token_id is not None:
                classifier.config.pad_token_id = processing_class.pad_token_id
            prefix = classifier.base_model_prefix
            weights = {f"{prefix}.{name}": tensor for name, tensor in backbone.state_dict().items()}
            weights["score.weight"] = score.detach()
            classifier.save_pretrained(aside, state_dict=weights)
        processing_class.save_pretrained(aside)
        write_text_atomically(
            aside / "README.md", _VALUE_CARD + _STARTS + (_HEAD_USE if classifier is None else _CLASSIFIER_USE)
        )


def save_value_adapter(
    folder: StrPath, adapters: AdapterSet, name: str, head: CriticHead, processing_class: Any
) -> None:
    """Writes a critic that is the adapter `name` and a head, all or nothing: a scalar one as an adapter of a sequence
    classifier (`AutoPeftModelForSequenceClassification` loads it), any other as `models.load_critic` reads it.
    """
    with write_folder_atomically(folder) as aside:
        write_critic_adapter(aside, adapters, name, head)
        processing_class.save_pretrained(aside)
        use = _HEAD_USE if head.score_weight() is None else _ADAPTER_USE
        write_text_atomically(aside / "README.md", _VALUE_CARD + use)


def matching_classifier(backbone: PreTrainedModel) -> PreTrainedModel | None:
    """A sequence classifier with one label around the architecture of `backbone`, without memory for weights; None
    where transformers has none that is `backbone` and a linear head `score` without bias.
    """
    config = copy.deepcopy(backbone.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            classifier: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=backbone.dtype)
    except ValueError:
        # What transformers raises for an architecture without a sequence classifier, and nothing else tells.
        return None
    needed = {f"{classifier.base_model_prefix}.{name}" for name in backbone.state_dict()} | {"score.weight"}
    return classifier if needed == set(classifier.state_dict()) else None


def push_folder(folder: StrPath, hub_model_id: str) -> None:
    """Uploads `folder` to the hub repository `hub_model_id`, made if it is missing, with the user's own login."""
    api = HfApi()
    api.create_repo(hub_model_id, exist_ok=True)
    api.upload_folder(
        repo_id=hub_model_id, folder_path=Path(folder), commit_message="Upload a policy trained by alpaca_ppo"
    )


def _write_policy(folder: Path, policy: Any, processing_class: Any) -> None:
    how = {"selected_adapters": [POLICY]} if isinstance(policy, PeftModel) else {}
    with _quiet_unless_watched():
        policy.save_pretrained(folder, **how)
    processing_class.save_pretrained(folder)


@contextlib.contextmanager
def _quiet_unless_watched() -> Iterator[None]:
    """Keeps the progress bars of transformers out of log files."""
    silence = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()
