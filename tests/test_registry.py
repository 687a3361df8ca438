"""Registries of names that users may extend."""

import importlib
import importlib.util
import sys
from functools import partial
from types import ModuleType

import pytest

from alpaca_ppo.registry import (
    ADV_ESTIMATORS,
    CRITIC_HEADS,
    GENERATION_BACKENDS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    Registry,
)


@pytest.fixture
def colours():
    return Registry("colour", {"red": {"warm": True}, "blue": {}}, {"warm": False, "weight": None})


def test_a_built_in_name_has_traits_and_code(colours):
    @colours.implement("red")
    def red():
        return "#f00"

    assert colours.get("red") is red
    assert colours.names == colours.built_in == ("red", "blue")
    assert (colours.trait("red", "warm"), colours.trait("blue", "warm"), colours.trait("red", "weight")) == (
        True,
        False,
        None,
    )


def test_a_registered_name_comes_last_and_has_its_traits(colours):
    @colours.register("orange", warm=True, weight=2)
    def orange():
        return "#fa0"

    assert colours.get("orange") is orange
    assert colours.names == ("red", "blue", "orange") and colours.built_in == ("red", "blue")
    assert colours.names_with(warm=True) == ("red", "orange")
    assert colours.names_with(warm=True, weight=2) == ("orange",)


@pytest.mark.parametrize("ask", [lambda r: r.get("pink"), lambda r: r.trait("pink", "warm"), lambda r: r.check("pink")])
def test_an_unknown_name_is_refused_with_the_choices(colours, ask):
    message = "^colour is 'pink'; choose one of red, blue, or register your own and add its file to import_modules$"
    with pytest.raises(ValueError, match=message):
        ask(colours)


@pytest.mark.parametrize("name", ["", "dark red", "red,blue", "a:b", " red"])
def test_a_name_that_yaml_or_a_command_line_would_split_is_refused(colours, name):
    with pytest.raises(ValueError, match=f"colour cannot be named '{name}'; use a word without spaces"):
        colours.register(name)


def test_an_unknown_trait_is_refused(colours):
    with pytest.raises(TypeError, match="colour 'pink' is registered with soft; valid traits: warm, weight"):
        colours.register("pink", soft=True)
    with pytest.raises(
        TypeError, match="kl_estimator 'mine' is registered with needs_critic; valid traits: kink_at_zero"
    ):
        KL_ESTIMATORS.register("mine", needs_critic=True)


def test_a_name_belongs_to_its_first_owner(colours):
    def pink():
        return 1

    def rose():
        return 2

    colours.register("pink")(pink)
    for name in ("pink", "blue"):
        with pytest.raises(ValueError, match=f"colour '{name}' exists already; choose another name"):
            colours.register(name)(rose)
    # An object without a name of its own is nobody's second version.
    with pytest.raises(ValueError, match="colour 'pink' exists already"):
        colours.register("pink")(partial(pink))
    assert colours.get("pink") is pink


def test_what_cannot_be_called_is_refused(colours):
    with pytest.raises(TypeError, match="^colour 'pink' is 3, which cannot be called; register a function$"):
        colours.register("pink")(3)
    assert "pink" not in colours.names


def test_a_reloaded_module_replaces_what_it_registered(colours, tmp_path, monkeypatch):
    path = tmp_path / "reloaded_colours.py"
    path.write_text("def pink(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded_colours")
    monkeypatch.setitem(sys.modules, "reloaded_colours", module)
    colours.register("pink")(module.pink)
    path.write_text("# a line more, as an edit would leave it\ndef pink(): return 22\n")
    colours.register("pink")(importlib.reload(module).pink)
    assert colours.get("pink")() == 22


def test_a_cell_of_a_notebook_may_be_run_again(colours, monkeypatch):
    notebook = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    for code in (1, 2):
        exec(f"def pink(): return {code}", notebook.__dict__)
        colours.register("pink")(notebook.pink)
        assert colours.get("pink")() == code


def test_the_same_code_may_be_registered_again(colours, tmp_path, monkeypatch):
    """A file that is imported under two names, and one that is run again after an edit."""
    path = tmp_path / "mine.py"
    for name, text in (("first", ""), ("second", ""), ("second", "# one line more\n")):
        path.write_text(text + "def pink(): pass\nclass Rose: pass\n")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        for target in (module.pink, module.Rose):
            assert colours.register(target.__name__)(target) is target
            assert colours.get(target.__name__) is target


def test_what_the_configuration_knows_of_the_built_in_names():
    assert ADV_ESTIMATORS.names_with(needs_critic=True) == ("gae",)
    assert ADV_ESTIMATORS.names_with(needs_group=False) == ("gae", "reinforce_plus_plus", "remax")
    assert ADV_ESTIMATORS.names_with(needs_greedy_baseline=True) == ("remax",)
    assert ADV_ESTIMATORS.names_with(uses_gamma=True) == ("gae", "reinforce_plus_plus")
    assert POLICY_LOSSES.trait("gspo", "loss_agg_mode") == "seq-mean-token-mean"
    assert POLICY_LOSSES.names_with(dual_clip=True) == ("clip", "dppo", "dppo_kl")
    assert CRITIC_HEADS.names_with(distributional=False) == ("scalar",)
    assert GENERATION_BACKENDS.names == ("auto", "slots", "generate")
