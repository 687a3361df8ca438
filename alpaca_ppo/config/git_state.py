"""Which commit a folder is at, and which one the installed package is of. Imports no library."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any

_SECONDS = 5.0
_ROOT = Path(__file__).parents[2]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and branch of the repository around `folder`, and whether files that it tracks have changed since; None
    without a repository or git, and if git takes too long.
    """
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # Without the variable, git may write to the repository's index.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    lines = done.stdout.splitlines()
    heads = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch."))
    return {
        "commit": heads.get("oid"),
        "branch": heads.get("head"),
        "dirty": any(not line.startswith("#") for line in lines),
    }


def package_commit() -> str | None:
    """The commit of this package, with -dirty after it if files have changed since: of the clone that it is imported
    from, or what pip recorded when it installed from a repository's URL; None if neither is known.
    """
    # A virtual environment may lie in another project's repository.
    if (_ROOT / ".git").exists():
        state = git_state(_ROOT)
        return None if state is None or not state["commit"] else state["commit"] + ("-dirty" if state["dirty"] else "")
    try:
        recorded = importlib.metadata.distribution("alpaca_ppo").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    commit = json.loads(recorded or "{}").get("vcs_info", {}).get("commit_id")
    return None if commit is None else str(commit)
