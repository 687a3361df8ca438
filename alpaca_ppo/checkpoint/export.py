"""Exports the final policy, value model and merged model as folders that `from_pretrained` loads, and uploads one.

The hub is reached with the user's own login (`hf auth login`, or HF_TOKEN), which is never stored. Checkpoints to
resume from are in `serialization`, the README of each folder in `model_card`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import nn

from alpaca_ppo.adapters.adapter_set import POLICY, AdapterSet
from alpaca_ppo.adapters.merging import merged_weights
from alpaca_ppo.atomic_io import StrPath, write_folder_atomically
from alpaca_ppo.checkpoint.model_card import TrainedRun, write_model_card, write_value_card
from alpaca_ppo.library_output import transformers_bars
from alpaca_ppo.models import ActorCritic, write_critic
from alpaca_ppo.saved_models import has_remote_code
from alpaca_ppo.tracking.results import STEP_FILE

_OFF = "or set hub_model_id: null and upload final/policy later (hf upload)"


def save_final(
    folder: StrPath, actor_critic: ActorCritic, processing_class: Any, run: TrainedRun, *, merged: bool = False
) -> None:
    """Writes `folder`/policy with a model card and, if there is a critic, `folder`/value; each of them atomically. Then
    `folder`/step.json, which is absent while they are written.

    Args:
        folder: parent of both; its other content is left alone.
        actor_critic: unwrapped. A critic without a backbone of its own is exported with the policy's.
        processing_class: the policy's tokenizer, saved with each model.
        run: of which step the weights are, and what the card tells.
        merged: if the policy is an adapter, also write `folder`/merged: the full model with the adapter merged in.
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
            write_critic(tmp_dir, actor_critic)
            processing_class.save_pretrained(tmp_dir)
            write_value_card(tmp_dir, own_code=has_remote_code(actor_critic.critic.backbone or policy))
    if merged and adapters is not None:
        save_merged(folder / "merged", adapters, processing_class)
    run.step.write(folder)


def save_merged(folder: StrPath, adapters: AdapterSet, processing_class: Any) -> None:
    """Writes the full policy with its adapter merged into the base, atomically and at least in float32.

    Its logits are those of the adapter on this base; see `merged_weights` for one in half precision.
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


def check_login() -> None:
    """Checks that the user is logged in with a token that may write.

    Raises:
        ValueError: if not, if the hub cannot be reached, or is not to be (HF_HUB_OFFLINE).
    """
    try:
        user = HfApi().whoami()
    # What is raised depends on the version: by requests, httpx or huggingface_hub itself.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"hub_model_id is set, but the hub does not know who you are ({type(error).__name__}: {reason}); log in "
            f"(hf auth login, or HF_TOKEN), {_OFF}"
        ) from error
    token = user.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise ValueError(
            f"hub_model_id is set, but the token {token.get('displayName')!r} of {user.get('name')!r} may only read; "
            f"make one that may write (huggingface.co/settings/tokens), {_OFF}"
        )


def push_folder(folder: StrPath, hub_model_id: str) -> str:
    """Uploads `folder` to the hub repository `hub_model_id`, creating it if needed; returns its URL."""
    api = HfApi()
    url = api.create_repo(hub_model_id, exist_ok=True)
    api.upload_folder(
        repo_id=hub_model_id, folder_path=Path(folder), commit_message="Upload a policy trained by alpaca_ppo"
    )
    return str(url)
