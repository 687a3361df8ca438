"""The learning rates of policy and critic, each counted in optimizer steps of its own: hand-worked."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.distributed.optimizer import RATES as USUAL_RATES
from alpaca_ppo.distributed.optimizer import Schedules, StepCounts, make_optimizer, unusual_rate
from alpaca_ppo.models import build_actor_critic
from tests.docs.markdown import ROOT, table_rows
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_config, tiny_trainer

TOTALS = StepCounts(total=10, policy=4, critic=6)
RATES = {"learning_rate": 1.0, "critic_learning_rate": 0.5}


@pytest.fixture(scope="module")
def model():
    return build_actor_critic(tiny_causal_lm("gpt2"), critic_layout="separate")


def made(model, totals=TOTALS, **settings):
    args = tiny_config("unused", **RATES, **settings)
    optimizer = make_optimizer(model, args, torch.device("cpu"))
    return optimizer, Schedules(optimizer, model, args, totals)


def rates(optimizer):
    """Of the policy's groups (matrices, vectors) and of the critic's."""
    first, second, third, fourth = (group["lr"] for group in optimizer.param_groups)
    assert first == second and third == fourth
    return first, third


def test_each_schedule_counts_the_steps_of_its_own(model):
    settings = {"lr_scheduler_type": "linear", "critic_lr_warmup_steps": 2}
    optimizer, schedules = made(model, **settings)
    # Linear from 1 to 0 in 4 steps. Two steps of warm-up, then linear to 0 in 4, times 0.5.
    assert rates(optimizer) == (1.0, 0.0)
    schedules.step("critic")
    assert rates(optimizer) == (1.0, 0.25)
    schedules.step("policy")
    assert rates(optimizer) == (0.75, 0.25)
    schedules.step("both")
    assert rates(optimizer) == (0.5, 0.5)
    schedules.step("critic")
    assert rates(optimizer) == (0.5, 0.375)
    schedules.step("policy")
    schedules.step("policy")
    assert rates(optimizer)[0] == 0.0 and schedules.of_policy.get_last_lr() == [0.0, 0.0]


def test_what_the_critic_leaves_out_is_the_policys(model):
    optimizer, schedules = made(model, lr_scheduler_type="linear", warmup_steps=2)
    found = []
    for _ in range(6):
        schedules.step("both")
        found.append(rates(optimizer))
    # Warm-up to the whole rate in 2 steps, then down to 0 at step 4 of the policy, and at step 6 of the critic.
    policy, critic = [0.5, 1.0, 0.5, 0.0, 0.0, 0.0], [0.25, 0.5, 0.375, 0.25, 0.125, 0.0]
    assert found == list(zip(policy, critic, strict=True))


def test_a_polynomial_schedule_ends_at_its_own_rate_for_policy_and_critic(model):
    optimizer, schedules = made(model, lr_scheduler_type="polynomial", critic_lr_warmup_steps=2)
    found = []
    for _ in range(6):
        schedules.step("both")
        found.append(rates(optimizer))
    # Down to transformers' lr_end of 1e-7: at step 4 of the policy, and at step 6 of the critic, half of it at step 4.
    assert [policy for policy, _ in found[3:]] == pytest.approx([1e-7] * 3, rel=1e-6)
    assert [critic for _, critic in found] == pytest.approx([0.25, 0.5, 0.375, 0.25, 0.125, 1e-7], rel=1e-6)


def test_a_polynomial_schedule_of_warm_up_alone_reaches_its_rate(model):
    optimizer, schedules = made(model, lr_scheduler_type="polynomial", warmup_steps=4, critic_lr_warmup_steps=6)
    for _ in range(6):
        schedules.step("both")
    assert rates(optimizer)[1] == 0.5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup_steps": 3, "critic_lr_warmup_steps": 5}, []),
        ({"warmup_steps": 4, "critic_lr_warmup_steps": 5}, ["warmup_steps is 4, 4 policy"]),
        ({"warmup_steps": 0.9}, ["warmup_steps is 0.9, 4 policy", "warmup_steps is 0.9, 6 critic"]),
        ({"critic_lr_warmup_steps": 9}, ["critic_lr_warmup_steps is 9, 6 critic"]),
    ],
)
def test_a_warm_up_that_lasts_for_the_whole_run_is_said(model, settings, said, capsys):
    made(model, lr_scheduler_type="linear", **settings)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert [word for word in words.split() if word not in line] == []


def test_a_single_schedule_counts_all_steps_and_knows_no_critic(model):
    args, warm = (
        tiny_config("unused", lr_scheduler_type="linear", **own) for own in ({}, {"critic_lr_warmup_steps": 0})
    )
    mixed = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="critic_lr_warmup_steps is 0, but a group of the optimizer"):
        Schedules(mixed, model, warm, TOTALS)
    schedules = Schedules(mixed, model, args, TOTALS)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    of_user = torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.0, total_iters=10)
    with pytest.raises(ValueError, match="critic_lr_warmup_steps is 0, but `optimizers` has a schedule"):
        Schedules(own, model, warm, TOTALS, own=of_user)
    users = Schedules(own, model, args, TOTALS, own=of_user)
    assert users.of_policy is of_user
    for done, part in enumerate(("critic", "policy", "both"), 1):
        for optimizer, each in ((mixed, schedules), (own, users)):
            optimizer.step()
            each.step(part)
            # Linear over 10 steps.
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1 - done / 10)


@pytest.mark.parametrize(
    ("weights", "has_adapter", "low", "high"),
    [
        (4_000_000, False, 1e-4, 1e-2),
        (4_000_000, True, 5e-4, 2e-2),
        (135_000_000, False, 1e-6, 1e-5),
        (135_000_000, True, 5e-6, 2e-4),
        (7_000_000_000, False, 3e-7, 1e-5),
        (7_000_000_000, True, 5e-6, 5e-5),
    ],
)
def test_a_rate_outside_of_the_table_is_unusual(weights, has_adapter, low, high):
    weight = torch.nn.Parameter(torch.empty(weights, device="meta"))
    policy = SimpleNamespace(model=torch.nn.ParameterList([weight]), adapters=object() if has_adapter else None)
    model = SimpleNamespace(policy=policy)
    assert [unusual_rate(model, rate) for rate in (0.0, low, high)] == ["", "", ""]
    for rate in (0.9 * low, 1.1 * high):
        text = unusual_rate(model, rate)
        assert f"learning_rate is {rate:g}, " in text and f"usually take {low:g} to {high:g}: " in text
        assert ("LoRA" in text) == has_adapter and f"{weights / 1e6:,.0f} million" in text


def test_the_page_has_the_usual_rates_of_the_warning():
    rows = table_rows((ROOT / "docs/getting-started.md").read_text(), "weights of the model")
    found = [[re.findall(r"[\d.]+e-?\d+", row[column]) for column in ("all weights", "LoRA")] for row in rows]
    assert [[[float(rate) for rate in cell] for cell in row] for row in found] == [
        [list(cell) for cell in ranges] for ranges in USUAL_RATES.values()
    ]


@pytest.mark.parametrize(("own", "rate"), [(None, 0.05), (0.07, 0.07), (2e-3, None)])
def test_a_run_begins_with_a_warning_of_its_unusual_rate(tmp_path, capsys, own, rate):
    model = build_actor_critic(tiny_causal_lm("gpt2"), critic_layout="separate")
    given = {} if own is None else {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=own), None)}
    trainer = tiny_trainer(tmp_path, learning_rate=0.05, trainer_arguments=given)
    assert "warning" not in capsys.readouterr().out
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: learning_rate")]
    assert [f"learning_rate is {rate:g}, " in line for line in lines] == ([True] if rate else [])


@pytest.mark.parametrize(
    ("layout", "critic_rate"), [("adapter", 3e-5), ("shared", 1e-5), ("separate", 3e-6), ("cached", 3e-4)]
)
def test_adapters_take_ten_times_the_default_of_all_weights(capsys, layout, critic_rate):
    own_steps = {} if layout == "shared" else {"critic_epochs": 2}
    args = tiny_config("unused", critic_layout=layout, **own_steps, learning_rate=None)
    adapters = add_policy_adapter(tiny_causal_lm("gpt2"), LoraConfig(r=2, target_modules="all-linear"))
    model = build_actor_critic(adapters, critic_layout=layout)
    found = sorted({group["lr"] for group in make_optimizer(model, args, torch.device("cpu")).param_groups})
    assert found == pytest.approx(sorted({1e-5, critic_rate}))
    assert capsys.readouterr().out == "learning_rate: 1e-05, ten times the default, because an adapter is trained\n"
    given = make_optimizer(model, replace(args, learning_rate=2e-6), torch.device("cpu"))
    assert given.param_groups[0]["lr"] == 2e-6 and capsys.readouterr().out == ""


def test_all_weights_take_the_default_and_nothing_is_said(capsys, model):
    optimizer = make_optimizer(model, tiny_config("unused", learning_rate=None, critic_epochs=2), torch.device("cpu"))
    assert rates(optimizer) == pytest.approx((1e-6, 3e-6)) and capsys.readouterr().out == ""


def test_a_run_says_how_many_optimizer_steps_it_takes():
    assert str(StepCounts(6, 6, 6)) == str(StepCounts(6, 6, 0)) == "6 optimizer steps"
    assert str(StepCounts(9, 3, 6)) == "3 optimizer steps of the policy and 6 of the critic"


def test_a_warm_up_below_one_is_a_share_of_the_steps_of_each(model):
    settings = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5, "critic_lr_warmup_steps": 0.4}
    optimizer, schedules = made(model, **settings)
    found = []
    for _ in range(4):
        schedules.step("both")
        found.append(rates(optimizer))
    # Half of 4 steps of the policy are 2; 0.4 of 6 steps of the critic are 2.4, rounded up to 3, up to its rate 0.5.
    assert [policy for policy, _ in found] == [0.5, 1.0, 1.0, 1.0]
    assert [critic for _, critic in found] == pytest.approx([0.5 / 3, 1.0 / 3, 0.5, 0.5])
