"""Which commit a folder is at, and which one the installed package is of. Imports no library."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def git_commit(folder: Path) -> str | None:
    """The commit of the repository around `folder`, with -dirty after it if files that it tracks have changed since;
    None without a commit or git, and if git takes longer than five seconds.
    """
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Without the variable, git may write to the repository's index.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=5, env=environment).decode().strip()
    except (OSError, subprocess.SubprocessError):
        return None


def package_commit() -> str | None:
    """The commit of this package, as `git_commit` says it: of the clone that it is imported from, or what pip recorded
    when it installed from a repository's URL; None if neither is known.
    """
    # A virtual environment may lie in another project's repository.
    if (_ROOT / ".git").exists():
        return git_commit(_ROOT)
    try:
        recorded = importlib.metadata.distribution("alpaca_ppo").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    commit: str | None = json.loads(recorded or "{}").get("vcs_info", {}).get("commit_id")
    return commit
