"""KL controllers, by hand and against the golden cases; the bounds of their settings are those of PPOConfig."""

import pytest

from alpaca_ppo.ppo.kl_controllers import KLController
from tests.golden_cases import golden_cases


def test_a_fixed_controller_keeps_its_value():
    controller = KLController("fixed", kl_coef=0.05, target_kl=6.0)
    controller.update(1000.0, num_sequences=64)
    assert controller.value == 0.05


def test_the_proportional_controller_by_hand():
    # kl / target - 1 = 6.6 / 6 - 1 = 0.1: 0.2 * (1 + 0.1 * 0.1) = 0.202, whatever num_sequences
    controller = KLController("proportional", kl_coef=0.2, target_kl=6.0, k_beta=0.1)
    controller.update(6.6, num_sequences=12345)
    assert controller.value == pytest.approx(0.202, abs=1e-12)


def test_the_horizon_controller_by_hand():
    # 0.2 * (1 + 0.1 * 500 / 10000) = 0.201
    controller = KLController("horizon", kl_coef=0.2, target_kl=6.0, horizon=10_000)
    controller.update(6.6, num_sequences=500)
    assert controller.value == pytest.approx(0.201, abs=1e-12)


def test_the_scaled_controller_by_hand():
    # sqrt(9 / 1) = 3; sqrt((9 + 41) / 2) = 5; no finite spread: no change; sqrt((50 + 49) / 3) = 5.7445626
    controller, values = KLController("scaled", kl_coef=0.2, target_kl=6.0), []
    for std in (3.0, 41**0.5, float("nan"), float("inf"), 7.0):
        controller.update(1000.0, num_sequences=64, scores_std=std)
        values.append(controller.value)
    controller.update(1000.0, num_sequences=64)
    assert [*values, controller.value] == pytest.approx([0.6, 1.0, 1.0, 1.0, 1.14891253, 1.14891253], abs=1e-8)


def test_the_scaled_controller_counts_only_steps_whose_scores_differ():
    controller, values = KLController("scaled", kl_coef=0.2, target_kl=6.0), []
    for std in (0.0, 0.0, 3.0, 0.0):
        controller.update(1000.0, num_sequences=64, scores_std=std)
        values.append(controller.value)
    assert values == pytest.approx([0.2, 0.2, 0.6, 0.6], abs=1e-8)


@pytest.mark.parametrize("kind", ["proportional", "horizon"])
def test_the_value_rests_at_the_target_and_its_error_is_bounded_by_a_fifth(kind):
    values = []
    # errors 0; -1, cut to -0.2; 99, cut to 0.2
    for kl in (6.0, 0.0, 600.0):
        controller = KLController(kind, kl_coef=1.0, target_kl=6.0, k_beta=0.5, horizon=200)
        controller.update(kl, num_sequences=100)
        values.append(controller.value)
    assert values == pytest.approx([1.0, 0.9, 1.1])


@pytest.mark.parametrize("kind", ["fixed", "proportional", "horizon", "scaled"])
def test_a_restored_controller_goes_on_as_the_saved_one(kind):
    first, second = (KLController(kind, kl_coef=0.2, target_kl=6.0) for _ in range(2))
    first.update(9.0, num_sequences=100, scores_std=0.7)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(5.5, num_sequences=100, scores_std=0.3)
    assert first.value == second.value
    assert kind == "fixed" or first.value != 0.2


@pytest.mark.parametrize("kind", ["proportional", "horizon"])
def test_controllers_match_golden(kind):
    for inputs, expected in golden_cases(f"adaptive_kl_{kind}"):
        settings = {name: inputs[name] for name in ("target_kl", "k_beta", "horizon") if name in inputs}
        controller = KLController(kind, kl_coef=inputs["init_kl_coef"], **settings)
        for kl, value in zip(inputs["observed_kl"].tolist(), expected["values"].tolist(), strict=True):
            controller.update(kl, num_sequences=inputs.get("n_steps", 1))
            assert controller.value == pytest.approx(value, abs=1e-12)
