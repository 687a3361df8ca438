"""The hub: whether the user may upload, and the upload of a folder.

The hub is reached with the user's own login (`hf auth login`, or HF_TOKEN), which is never stored.
"""

from pathlib import Path

from huggingface_hub import HfApi, constants

from alpaca_ppo.atomic_io import StrPath

_OFF = "or set push_to_hub: false and upload final/policy later (hf upload)"


def check_login() -> None:
    """Checks that the user is logged in with a token that may write.

    Raises:
        ValueError: if not, if the hub cannot be reached, or is not to be (HF_HUB_OFFLINE).
    """
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"push_to_hub is True, but HF_HUB_OFFLINE is set, with which nothing can be uploaded; unset it, {_OFF}"
        )
    try:
        user = HfApi().whoami()
    # What is raised depends on the version: by requests, httpx or huggingface_hub itself.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"push_to_hub is True, but the hub does not know who you are ({type(error).__name__}: {reason}); log in "
            f"(hf auth login, or HF_TOKEN), {_OFF}"
        ) from error
    token = user.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise ValueError(
            f"push_to_hub is True, but the token {token.get('displayName')!r} of {user.get('name')!r} may only read; "
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
