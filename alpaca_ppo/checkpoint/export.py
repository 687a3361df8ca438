"""Exports the final policy, value model and merged model as folders that `from_pretrained` loads, and uploads one with
the user's login (`hf auth login`, or HF_TOKEN).

Checkpoints to resume from are in `serialization`, the README of each folder in `model_card`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import nn

from alpaca_ppo.adapters.adapter_set import POLICY
from alpaca_ppo.atomic_io import StrPath, write_folder_atomically
from alpaca_ppo.checkpoint.model_card import TrainedRun, write_model_card, write_value_card
from alpaca_ppo.generation.stopping import write_stop_tokens
from alpaca_ppo.library_output import transformers_bars
from alpaca_ppo.models import ActorCritic, Policy, write_critic
from alpaca_ppo.saved_models import has_remote_code
from alpaca_ppo.tracking.results import STEP_FILE

_WITHOUT_UPLOAD = "or set hub_model_id: null and upload final/policy later (hf upload)"


def save_final(
    folder: StrPath, actor_critic: ActorCritic, processing_class: Any, run: TrainedRun, *, merged: bool = False
) -> None:
    """Writes the models of `actor_critic`, unwrapped, as folders in `folder`, each atomically and with the tokenizer:
    policy; value, if there is a critic (without a backbone, it gets the policy's); and merged (`save_merged`), with
    `merged` and if the policy is an adapter. Deletes step.json first, and writes it last.
    """
    policy, adapters = actor_critic.policy.model, actor_critic.policy.adapters
    folder = Path(folder)
    (folder / STEP_FILE).unlink(missing_ok=True)
    # transformers' progress bars would be drawn over the run's.
    with write_folder_atomically(folder / "policy") as tmp_dir, transformers_bars(shown=False):
        if adapters is None:
            policy.save_pretrained(tmp_dir)
        else:
            adapters.peft.save_pretrained(str(tmp_dir), selected_adapters=[POLICY])
        _write_stop_tokens(tmp_dir, actor_critic.policy)
        processing_class.save_pretrained(tmp_dir)
        write_model_card(tmp_dir, run, base_model=policy.config.name_or_path, own_code=has_remote_code(policy))
    if actor_critic.critic is not None:
        with write_folder_atomically(folder / "value") as tmp_dir, transformers_bars(shown=False):
            write_critic(tmp_dir, actor_critic)
            processing_class.save_pretrained(tmp_dir)
            write_value_card(tmp_dir, own_code=has_remote_code(actor_critic.critic.backbone or policy))
    if merged and adapters is not None:
        save_merged(folder / "merged", actor_critic.policy, processing_class)
    run.step.write(folder)


def _write_stop_tokens(folder: Path, policy: Policy) -> None:
    """Writes the generation config that ends answers where training has ended them."""
    if policy.model.generation_config is not None and policy.stop_token_ids:
        write_stop_tokens(folder, policy.model.generation_config, policy.stop_token_ids)


def save_merged(folder: StrPath, policy: Policy, processing_class: Any) -> None:
    """Writes the policy with its adapter merged into a copy of the base, atomically and at least in float32. Of a base
    in half precision, the rounded weights are merged; load it in float32 to merge those of its files.
    """
    assert policy.adapters is not None
    # In half precision, in which DeepSpeed may hold the adapter, its product would be rounded.
    peft: Any = copy.deepcopy(policy.adapters.peft).to("cpu", torch.promote_types(policy.model.dtype, torch.float32))
    model = peft.get_base_model()
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        # The adapter changes the embedding, but not the head that the base ties to it.
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    with write_folder_atomically(folder) as tmp_dir, transformers_bars(shown=False):
        peft.merge_and_unload(adapter_names=[POLICY]).save_pretrained(tmp_dir)
        _write_stop_tokens(tmp_dir, policy)
        processing_class.save_pretrained(tmp_dir)


def check_login() -> None:
    """Raises a ValueError unless the hub can be reached and the user is logged in with a token that may write."""
    try:
        user = HfApi().whoami()
    # requests, httpx or huggingface_hub raise their own errors, depending on the version.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        problem = f"the hub does not know who you are ({type(error).__name__}: {reason})"
        raise ValueError(f"hub_model_id is set, but {problem}; log in (hf auth login), {_WITHOUT_UPLOAD}") from error
    token = user.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        problem = f"the token {token.get('displayName')!r} of {user.get('name')!r} may only read"
        raise ValueError(f"hub_model_id is set, but {problem}; make one that may write, {_WITHOUT_UPLOAD}")


def push_folder(folder: StrPath, hub_model_id: str) -> str:
    """Uploads `folder` to the hub repository `hub_model_id`, creating it if needed; returns its URL."""
    api = HfApi()
    url = api.create_repo(hub_model_id, exist_ok=True)
    message = "Upload a policy trained by alpaca_ppo"
    api.upload_folder(repo_id=hub_model_id, folder_path=Path(folder), commit_message=message)
    return str(url)
