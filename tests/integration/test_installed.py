"""The package as users have it: built as a wheel, installed outside the clone, started by its command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import ENVIRONMENT, HANG, ROOT, write_run
from tests.tiny_runs import metric_lines


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    # Of a copy without what an earlier build may have left.
    source = folder / "source"
    ignored = ("--exclude=build", "--exclude=*.egg-info", "--exclude=__pycache__")
    source.mkdir()
    files = ("alpaca_ppo", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
    packed = subprocess.run(["tar", "-C", ROOT, *ignored, "-c", *files], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-C", source, "-x"], input=packed, check=True)
    wheel = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder / "wheels", source]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = (folder / "wheels").glob("*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", built]
    subprocess.run(install, check=True, capture_output=True)
    return folder / "site"


def alpaca_ppo(site: Path, cwd: Path, *arguments: str) -> str:
    """What `alpaca-ppo` of the installed wheel prints, started in `cwd`; it must succeed."""
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": str(site),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    start = (
        "import sys, alpaca_ppo.cli.commands as c; assert c.__file__.startswith(sys.argv.pop(1)), c.__file__; c.main()"
    )
    command = [sys.executable, "-c", start, str(site), *arguments]
    outcome = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANG)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.mark.proof
def test_an_installed_wheel_trains_on_two_processes_outside_the_clone(site, tmp_path):
    write_run(tmp_path)
    output = alpaca_ppo(
        site,
        tmp_path,
        *("train", "--config", "run.yaml", "--num_processes", "2", "--accelerate_config", "ddp"),
        *("--output_dir", "two", "--max_steps", "1"),
    )
    assert "each of 2 processes" in output
    assert [line["step"] for line in metric_lines(tmp_path / "two")] == [1]
    assert (tmp_path / "two/final/policy/model.safetensors").is_file() and (tmp_path / "two/report.html").is_file()


@pytest.mark.proof
def test_an_installed_wheel_holds_its_presets_and_launch_files(site, tmp_path):
    assert "vapo" in alpaca_ppo(site, tmp_path, "presets")
    for folder, suffix in (("accelerate_configs", "yaml"), ("deepspeed_configs", "json")):
        names = {path.name for path in (ROOT / "examples" / folder).glob(f"*.{suffix}")}
        assert names == {path.name for path in (site / "alpaca_ppo/cli" / folder).glob(f"*.{suffix}")}
