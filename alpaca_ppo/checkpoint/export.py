"""Exports the final policy, value model and merged model as folders that `from_pretrained` loads.

Checkpoints to resume from are in `serialization`, the README of each folder in `model_card`.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from alpaca_ppo.adapters import POLICY, VALUE, AdapterSet, merged_weights
from alpaca_ppo.atomic_io import StrPath, write_folder_atomically
from alpaca_ppo.checkpoint.model_card import TrainedRun, write_model_card, write_value_card
from alpaca_ppo.library_output import transformers_bars
from alpaca_ppo.models import ActorCritic, write_critic, write_critic_adapter
from alpaca_ppo.remote_code import has_remote_code, remote_code
from alpaca_ppo.tracking.weights_step import FILE as STEP_FILE


def save_final(
    folder: StrPath,
    actor_critic: ActorCritic,
    processing_class: Any,
    run: TrainedRun,
    *,
    merged: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Writes `folder`/policy with a model card and, if there is a critic, `folder`/value; each of them atomically. Then
    `folder`/step.json, which is absent while they are written.

    Args:
        folder: parent of both; its other content is left alone.
        actor_critic: unwrapped. A critic without a backbone of its own is exported with the policy's.
        processing_class: the policy's tokenizer, saved with each model.
        run: of which step the weights are, and what the card tells.
        merged: if the policy is an adapter, also write `folder`/merged: the full model with the adapter merged in.
        trust_remote_code: run code that comes with the critic's architecture, to save it as a sequence classifier.
    """
    policy, adapters = actor_critic.policy.model, actor_critic.policy.adapters
    folder = Path(folder)
    (folder / STEP_FILE).unlink(missing_ok=True)
    # transformers' bars would be drawn over the run's own.
    with write_folder_atomically(folder / "policy") as tmp_dir, transformers_bars(shown=False):
        if adapters is None:
            policy.save_pretrained(tmp_dir)
        else:
            adapters.peft.save_pretrained(str(tmp_dir), selected_adapters=[POLICY])
        processing_class.save_pretrained(tmp_dir)
        base = policy.config.name_or_path
        write_model_card(tmp_dir, run, base_model=base, own_code=has_remote_code(policy))
    if actor_critic.critic is not None:
        with write_folder_atomically(folder / "value") as tmp_dir, transformers_bars(shown=False):
            save_value(tmp_dir, actor_critic, processing_class, trust_remote_code=trust_remote_code)
    # Last, because it reads the base from disk again, which may fail.
    if merged and adapters is not None:
        save_merged(folder / "merged", adapters, processing_class)
    run.step.write(folder)


def save_value(folder: Path, actor_critic: ActorCritic, processing_class: Any, *, trust_remote_code: bool) -> None:
    """Writes the critic into the existing `folder`, which `value_model` accepts.

    A scalar critic becomes a sequence classifier with one label, if transformers has one for the architecture;
    `AutoModelForSequenceClassification` loads it, and its `score` of the hidden state at position t is the value after
    reading tokens 0..t. One that is an adapter on the policy's base becomes an adapter of such a classifier. Any other
    critic is written for `models.load_critic`.
    """
    policy, critic = actor_critic.policy, actor_critic.critic
    assert critic is not None
    score, adapter = critic.head.score_weight(), critic.backbone is None and policy.adapters is not None
    backbone: Any = policy.model.base_model if critic.backbone is None else critic.backbone
    classifier = None
    if adapter:
        assert policy.adapters is not None
        write_critic_adapter(folder, policy.adapters, VALUE if critic.has_adapter else POLICY, critic.head)
    elif score is None or (classifier := matching_classifier(backbone, trust_remote_code=trust_remote_code)) is None:
        write_critic(folder, critic.head, backbone)
    else:
        # The classifier finds the end of a padded row by its pad token.
        if processing_class.pad_token_id is not None:
            classifier.config.pad_token_id = processing_class.pad_token_id
        prefix = classifier.base_model_prefix
        weights = {f"{prefix}.{name}": tensor for name, tensor in backbone.state_dict().items()}
        classifier.save_pretrained(folder, state_dict={**weights, "score.weight": score.detach()})
    processing_class.save_pretrained(folder)
    is_classifier = classifier is not None or (adapter and score is not None)
    write_value_card(folder, adapter=adapter, classifier=is_classifier, own_code=has_remote_code(backbone))


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
