"""The commit of a folder and of the installed package, and the package's address on the web. Imports no library."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

_ROOT = Path(__file__).parents[2]


def git_commit(folder: Path) -> str | None:
    """The commit of the repository around `folder`, with -dirty if tracked files have changed; None without git or a
    commit, and if git takes longer than five seconds.
    """
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def package_commit() -> str | None:
    """The commit of this package: of the clone that it is imported from, or the one that pip installed from a
    repository's URL; None if neither is known.
    """
    # Otherwise git would find another project's repository around a virtual environment.
    if (_ROOT / ".git").exists():
        return git_commit(_ROOT)
    return cast(str | None, _installed().get("vcs_info", {}).get("commit_id"))


def package_pages() -> str | None:
    """The web address of this package's files, at the commit of `package_commit` or, for a clone, at its remote's HEAD;
    None if it is not on the web.
    """
    in_clone = (_ROOT / ".git").exists()
    url = _git(_ROOT, "remote", "get-url", "origin") if in_clone else _installed().get("url")
    commit = "HEAD" if in_clone else package_commit()
    parts = urlsplit(url or "")
    if parts.scheme != "https" or not commit:
        return None
    # The part before an @ may be a password.
    return f"https://{parts.netloc.rpartition('@')[2]}{parts.path.removesuffix('.git')}/blob/{commit}/"


def _git(folder: Path, *arguments: str) -> str | None:
    # Otherwise, git may write to the repository's index.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=5, env=environment).decode().strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _installed() -> dict[str, Any]:
    """pip's record of where it installed the package from."""
    try:
        recorded = importlib.metadata.distribution("alpaca_ppo").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(recorded or "{}"))
