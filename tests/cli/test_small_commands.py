"""`alpaca-ppo presets`, the commit of the package, and what a wheel of the package holds."""

import configparser
import fnmatch
import importlib
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from alpaca_ppo.cli.commands import main
from alpaca_ppo.config import git_state
from alpaca_ppo.config.parser import read_preset
from alpaca_ppo.presets import preset_names
from tests.docs.markdown import ROOT


def test_presets_are_listed_with_their_origin_and_shown(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(preset_names())
    assert all(line.endswith(".") and len(line) <= 134 for line in lines)
    assert any(line.startswith("vapo          VAPO (arXiv:2504.05118") for line in lines)
    assert main(["presets", "vapo"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown) == read_preset("vapo")
    assert re.search(r"^lam_policy: adaptive +# default null; 1 - 1 / \(0.05 \* length\)", shown, flags=re.MULTILINE)
    assert main(["presets", "dpao"]) == 2
    assert (
        "'dpao', but there is no preset of that name; did you mean dapo? the presets are alpaca_farm"
        in capsys.readouterr().err
    )


def test_a_clone_has_its_commit_and_an_installed_package_the_one_that_pip_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(git_state, "_ROOT", tmp_path)
    recorded = {"url": "https://host/alpaca_ppo", "vcs_info": {"vcs": "git", "commit_id": "c" * 40}}
    installed = SimpleNamespace(read_text=lambda name: json.dumps(recorded) if name == "direct_url.json" else None)
    monkeypatch.setattr(git_state.importlib.metadata, "distribution", lambda name: installed)
    assert git_state.package_commit() == "c" * 40
    assert git_state.package_pages() == f"https://host/alpaca_ppo/blob/{'c' * 40}/"
    # From a folder, or an index, which writes no such file.
    recorded = {"url": "file:///somewhere", "dir_info": {}}
    assert git_state.package_commit() is git_state.package_pages() is None
    installed.read_text = lambda name: None
    assert git_state.package_commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_state.package_commit() == commit and git_state.package_pages() is None
    subprocess.run([*git, "remote", "add", "origin", "https://me:secret@host/a/alpaca_ppo.git"], check=True)
    assert git_state.package_pages() == "https://host/a/alpaca_ppo/blob/HEAD/"
    for address in ("git@host:a/alpaca_ppo.git", "ssh://git@host/a/alpaca_ppo.git"):
        subprocess.run([*git, "remote", "set-url", "origin", address], check=True)
        assert git_state.package_pages() == "https://host/a/alpaca_ppo/blob/HEAD/"
    # What is on no web host can be opened in the clone's folder.
    subprocess.run([*git, "remote", "set-url", "origin", "/srv/alpaca_ppo.git"], check=True)
    assert git_state.package_pages() is None
    (tmp_path / "docs").mkdir()
    assert git_state.package_pages() == f"{tmp_path.as_uri()}/"
    (tmp_path / "file").write_text("2")
    assert git_state.package_commit() == f"{commit}-dirty"
    shutil.rmtree(tmp_path / ".git")

    def missing(name):
        raise git_state.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(git_state.importlib.metadata, "distribution", missing)
    assert git_state.package_commit() is None


def setup_cfg() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def test_every_data_file_of_the_package_is_in_the_wheel():
    patterns = []
    for package, globs in setup_cfg()["options.package_data"].items():
        patterns += [f"{package.replace('.', '/')}/{glob.strip()}" for glob in globs.split(",")]
    files = [p.relative_to(ROOT).as_posix() for p in (ROOT / "alpaca_ppo").rglob("*") if p.is_file()]
    data = [file for file in files if not file.endswith((".py", ".pyc"))]
    assert {file.rpartition(".")[2] for file in data} >= {"yaml", "json", "typed"}
    assert [file for file in data if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)] == []
    packages = {file.rpartition("/")[0] for file in files if file.endswith("/__init__.py")}
    assert [file for file in files if file.endswith(".py") and file.rpartition("/")[0] not in packages] == []


def test_the_entry_point_is_the_dispatcher():
    (script,) = setup_cfg()["options.entry_points"]["console_scripts"].strip().splitlines()
    name, _, target = script.partition(" = ")
    module, _, function = target.partition(":")
    assert name == "alpaca-ppo" and getattr(importlib.import_module(module), function) is main


@pytest.mark.parametrize("folder", ["accelerate_configs", "deepspeed_configs"])
def test_the_examples_link_to_the_packages_launch_configurations(folder):
    assert (ROOT / "examples" / folder).resolve() == ROOT / "alpaca_ppo/cli" / folder
