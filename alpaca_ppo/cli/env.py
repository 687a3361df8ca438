"""`alpaca-ppo env`: versions and hardware, to paste into a bug report. It imports none of the libraries that it names.

Of the environment it shows only variables that decide how a run computes, never one that may hold a key.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import psutil

from alpaca_ppo.config.git_state import package_commit

_PACKAGES = (
    "alpaca_ppo",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "deepspeed",
    "bitsandbytes",
    "safetensors",
    "numpy",
)
_VARIABLES = ("OMP_", "MKL_", "CUDA_", "NCCL_", "PYTORCH_", "ACCELERATE_", "DS_", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def main(argv: Sequence[str]) -> int:
    """Prints one line for each version and device; returns the exit status."""
    argparse.ArgumentParser(prog="alpaca-ppo env", description="Versions and hardware, for a bug report.").parse_args(
        argv
    )
    for name, value in report():
        print(f"{name:<16}{value}")
    return 0


def report() -> list[tuple[str, str]]:
    """What `main` prints: names with their values."""
    lines = [(name, _version(name)) for name in _PACKAGES]
    lines.insert(1, ("commit", package_commit() or "installed without its repository"))
    lines += [("python", f"{platform.python_version()} ({sys.executable})"), ("platform", platform.platform())]
    memory = psutil.virtual_memory().total / 2**30
    lines.append(("cpu", f"{os.cpu_count()} cores, {memory:.1f} GiB of memory"))
    lines += [("gpu", line) for line in _gpus()]
    lines += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    found = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return found.splitlines() or ["none that nvidia-smi reports"]


def _output(*command: str) -> str:
    """What `command` prints; empty if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
