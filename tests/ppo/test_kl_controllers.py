"""KL controllers, by hand and against the golden cases; the bounds of their settings are those of PPOConfig."""

import math

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.ppo.kl_controllers import (
    FixedKLController,
    HorizonKLController,
    ProportionalKLController,
    make_kl_controller,
)
from tests.golden_cases import golden_cases


def test_a_fixed_controller_keeps_its_value():
    controller = make_kl_controller("fixed", kl_coef=0.05, target_kl=6.0)
    controller.update(1000.0, num_sequences=64)
    assert isinstance(controller, FixedKLController) and controller.value == 0.05


def test_the_proportional_controller_by_hand():
    # kl / target - 1 = 6.6 / 6 - 1 = 0.1: 0.2 * (1 + 0.1 * 0.1) = 0.202, whatever num_sequences
    controller = make_kl_controller("proportional", kl_coef=0.2, target_kl=6.0, k_beta=0.1)
    controller.update(6.6, num_sequences=12345)
    assert isinstance(controller, ProportionalKLController)
    assert controller.value == pytest.approx(0.202, abs=1e-12)


def test_the_horizon_controller_by_hand():
    # 0.2 * (1 + 0.1 * 500 / 10000) = 0.201
    controller = make_kl_controller("horizon", kl_coef=0.2, target_kl=6.0, horizon=10_000)
    controller.update(6.6, num_sequences=500)
    assert isinstance(controller, HorizonKLController)
    assert controller.value == pytest.approx(0.201, abs=1e-12)


@pytest.mark.parametrize("kind", ["proportional", "horizon"])
def test_the_value_rests_at_the_target_and_its_error_is_bounded_by_a_fifth(kind):
    values = []
    # errors 0; -1, cut to -0.2; 99, cut to 0.2
    for kl in (6.0, 0.0, 600.0):
        controller = make_kl_controller(kind, kl_coef=1.0, target_kl=6.0, k_beta=0.5, horizon=200)
        controller.update(kl, num_sequences=100)
        values.append(controller.value)
    assert values == pytest.approx([1.0, 0.9, 1.1])


@pytest.mark.parametrize("kind", ["fixed", "proportional", "horizon"])
def test_a_restored_controller_goes_on_as_the_saved_one(kind):
    first, second = (make_kl_controller(kind, kl_coef=0.2, target_kl=6.0) for _ in range(2))
    first.update(9.0, num_sequences=100)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(5.5, num_sequences=100)
    assert first.value == second.value
    assert kind == "fixed" or first.value != 0.2


@pytest.mark.parametrize("kl", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["fixed", "proportional", "horizon"])
def test_a_kl_that_is_not_finite_is_refused_and_the_value_kept(kind, kl):
    controller = make_kl_controller(kind, kl_coef=0.2, target_kl=6.0)
    with pytest.raises(ValueError, match=f"the observed KL is {kl}, so kl_coef stays 0.2"):
        controller.update(kl, num_sequences=100)
    assert controller.value == 0.2


@pytest.mark.parametrize("num_sequences", [500, -1])
def test_more_sequences_than_the_horizon_bears_are_refused(num_sequences):
    # 1 - 0.2 * 500 / 100 = 0: the coefficient would vanish for good
    controller = make_kl_controller("horizon", kl_coef=0.2, target_kl=6.0, horizon=100)
    with pytest.raises(
        ValueError, match=rf"num_sequences \({num_sequences}\) must be .* less than 5 \* horizon \(100\)"
    ):
        controller.update(0.0, num_sequences=num_sequences)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("horizon", {"target_kl": 0.0}, "target_kl is 0.0; it must be above 0"),
        ("proportional", {"target_kl": -6.0}, "target_kl is -6.0; it must be above 0"),
        ("proportional", {"target_kl": math.nan}, "target_kl is nan; it must be above 0"),
        ("horizon", {"horizon": 0}, "horizon is 0; it must be above 0"),
    ],
)
def test_a_target_or_horizon_that_is_not_positive_is_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        make_kl_controller(kind, **({"kl_coef": 0.2, "target_kl": 6.0} | changes))


def test_there_is_a_controller_for_every_kind_of_the_configuration():
    kinds = options_of(PPOConfig)["kl_controller"].choices
    made = [type(make_kl_controller(kind, kl_coef=0.2, target_kl=6.0)) for kind in kinds]
    assert made == [FixedKLController, ProportionalKLController, HorizonKLController]


@pytest.mark.parametrize("kind", ["proportional", "horizon"])
def test_controllers_match_golden(kind):
    for inputs, expected in golden_cases(f"adaptive_kl_{kind}"):
        settings = {name: inputs[name] for name in ("target_kl", "k_beta", "horizon") if name in inputs}
        controller = make_kl_controller(kind, kl_coef=inputs["init_kl_coef"], **settings)
        for kl, value in zip(inputs["observed_kl"].tolist(), expected["values"].tolist(), strict=True):
            controller.update(kl, num_sequences=inputs.get("n_steps", 1))
            assert controller.value == pytest.approx(value, abs=1e-12)
