"""TRL in a virtual environment of its own, beside this one: what the comparisons with it run in.

TRL is no dependency of this package, and its versions may contradict the package's.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

VERSION, GRPO_VERSION = "1.12.0", "1.16.0"
"""The last version that has PPO, and that of November 2026, for GRPO."""
FOLDER, GRPO_FOLDER = (Path(__file__).resolve().parents[1] / name for name in (".venv-trl", ".venv-trl-grpo"))
SHARED_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")
"""Installed for TRL in the versions that this environment has, so that only the trainers differ."""


def trl_python(folder: Path, version: str = VERSION) -> str | None:
    """The Python of a virtual environment at `folder` with TRL, which is made if it does not exist. None, with the
    reason printed, if TRL cannot be installed.
    """
    python = folder / "bin/python"
    # A version such as 2.13.0+cpu is found under 2.13.0.
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in SHARED_PACKAGES} | {"trl": version}
    found = (
        f"import importlib.metadata as m; assert {{n: m.version(n).split('+')[0] for n in {versions}}} == {versions}"
    )
    probe = [str(python), "-c", found]
    if python.exists() and subprocess.run(probe, capture_output=True).returncode == 0:
        return str(python)
    install = [str(python), "-m", "pip", "install", *map("==".join, versions.items())]
    print(f"installing TRL {version} in {folder}", flush=True)
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], install, probe):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            error = (result.stderr or result.stdout).strip().splitlines()
            print(
                f"no TRL, so no comparison with it: {' '.join(command)} failed:\n" + "\n".join(error[-3:]), flush=True
            )
            return None
    return str(python)
