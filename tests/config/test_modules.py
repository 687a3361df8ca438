"""Modules that a user names by file or by dotted name."""

import re
import sys
import time

import pytest

from alpaca_ppo.config.modules import import_modules, load_function, load_module


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module, a package and files that fail, as the current folder; nothing stays imported."""
    (tmp_path / "json.py").write_text("import neighbour\ncount = 0\n")
    (tmp_path / "neighbour.py").write_text("name = 'beside'\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/inner.py").write_text("name = 'inner'\n")
    (tmp_path / "this.py").write_text("limit = 3\ndef mine(): ...\nclass Game: ...\ndef _own(): ...\n")
    (tmp_path / "needs.py").write_text("import no_such_dependency\n")
    (tmp_path / "fails.py").write_text("raise ValueError('taken')\n")
    monkeypatch.chdir(tmp_path)
    before = dict(sys.modules), list(sys.path)
    yield tmp_path
    sys.modules.clear()
    sys.modules.update(before[0])
    assert sys.path == before[1]


def test_a_file_is_loaded_once_and_replaces_no_module_of_its_name(project):
    import json

    module = load_module("json.py", what="it")
    module.count += 1
    assert load_module(str(project / "json.py"), what="it").count == 1
    assert module.neighbour.name == "beside"
    assert sys.modules["json"] is json


def test_a_module_is_found_in_the_current_folder():
    assert load_module("time", what="it") is sys.modules["time"]


def test_a_package_is_found_in_the_current_folder(project):
    assert load_module("package.inner", what="it").name == "inner"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.py", "the file .*missing.py does not exist"),
        ("package.outer", ".* have no module 'package.outer'; name its file"),
        ("no_such_package.inner", ".* have no module 'no_such_package'"),
    ],
)
def test_a_missing_file_or_module_is_named(project, name, message):
    with pytest.raises(ValueError, match=f"^it: {message}"):
        load_module(name, what="it")
    with pytest.raises(ValueError, match=f"^import_modules holds '{name}': {message}"):
        import_modules(["json.py", name])


@pytest.mark.parametrize("name", ["needs.py", "needs"])
def test_an_error_inside_the_module_is_raised_unchanged_every_time(project, name):
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            load_module(name, what="it")


def test_an_error_inside_one_of_import_modules_is_raised_unchanged(project):
    with pytest.raises(ValueError, match="^taken$"):
        import_modules(["fails.py"])


def test_a_function_or_class_is_found_in_the_current_folder_before_installed_modules(project):
    assert load_function("this:mine", what="tool") is sys.modules["this"].mine
    assert load_function("this:Game", what="environment").__name__ == "Game"
    assert load_function(f"{project}/this.py:mine", what="tool").__name__ == "mine"
    assert load_function("time:sleep", what="tool") is time.sleep


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("package.inner", "must be 'module:function' or 'path/to/file.py:function'"),
        (":mine", "must be 'module:function'"),
        ("this:", "must be 'module:function'"),
        ("package.outer:mine", ": .* have no module 'package.outer'; name its file"),
        ("missing.py:mine", ": the file .*missing.py does not exist"),
        ("this:yours", ": this has no function 'yours'; it has mine, Game$"),
        ("this.py:limit", ": this.py has no function 'limit'; it has mine, Game$"),
        ("this:miine", ": this has no function 'miine'; did you mean mine?"),
        ("this:Nope", ": this has no function 'Nope'; it has mine, Game$"),
    ],
)
def test_a_function_that_is_not_there_is_named(project, spec, message):
    with pytest.raises(ValueError, match=f"^tool '{re.escape(spec)}' ?{message}"):
        load_function(spec, what="tool")


@pytest.mark.parametrize("spec", ["needs:mine", "needs.py:mine"])
def test_an_error_inside_the_module_of_a_function_is_raised_unchanged(project, spec):
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_function(spec, what="tool")
