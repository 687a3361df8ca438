"""Registries of names that users may extend."""

import pytest

from alpaca_ppo.registry import Registry


@pytest.fixture
def colours():
    return Registry("colour", {"red": {"warm": True}, "blue": {}}, {"warm": False, "weight": None})


def test_a_built_in_name_has_traits_and_code(colours):
    @colours.implement("red")
    def red():
        return "#f00"

    assert colours.get("red") is red
    assert colours.names == colours.built_in == ("red", "blue")
    assert [colours.trait(name, "warm") for name in colours.names] == [True, False]
    assert colours.trait("red", "weight") is None


def test_a_registered_name_comes_last_and_has_its_traits(colours):
    @colours.register("orange", warm=True, weight=2)
    def orange():
        return "#fa0"

    assert colours.get("orange") is orange
    assert colours.names == ("red", "blue", "orange") and colours.built_in == ("red", "blue")
    assert colours.names_with(warm=True) == ("red", "orange")
    assert colours.names_with(warm=True, weight=2) == ("orange",)


def test_a_trait_that_the_registry_does_not_have_is_refused(colours):
    with pytest.raises(TypeError, match="colour 'orange' is given wram; it takes warm, weight"):
        colours.register("orange", wram=True)
    assert "orange" not in colours.names


@pytest.mark.parametrize("ask", [lambda r: r.get("pink"), lambda r: r.trait("pink", "warm"), lambda r: r.check("pink")])
def test_an_unknown_name_is_refused_with_the_choices(colours, ask):
    message = "^colour is 'pink'; choose one of red, blue, or register your own and add its file to import_modules$"
    with pytest.raises(ValueError, match=message):
        ask(colours)


@pytest.mark.parametrize("name", ["", "dark red", "red,blue", "a:b", " red"])
def test_a_name_that_yaml_or_a_command_line_would_split_is_refused(colours, name):
    with pytest.raises(ValueError, match=f"colour cannot be named '{name}'; use a word without spaces"):
        colours.register(name)


def test_a_later_definition_replaces_an_earlier_one_but_no_built_in(colours):
    for code in (1, 2):
        colours.register("pink", warm=code == 2)(lambda code=code: code)
        assert (colours.get("pink")(), colours.trait("pink", "warm")) == (code, code == 2)
    with pytest.raises(ValueError, match="colour 'blue' exists already; choose another name"):
        colours.register("blue")
