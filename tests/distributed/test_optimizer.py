"""Which AdamW a run trains with, that its implementations agree, what a resumed run keeps, and clipping."""

import copy

import pytest
import torch

from alpaca_ppo.distributed.optimizer import make_optimizer
from alpaca_ppo.models import build_actor_critic
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, tiny_config, tiny_trainer, weights

CPU = torch.device("cpu")
FUSED, LOOP = "adamw_torch_fused", "adamw_torch"
SETTINGS = {"weight_decay": 0.1, "learning_rate": 1e-3, "critic_learning_rate": 5e-4, "critic_adam_beta1": 0.5}


def trained(model, optim, *, steps=20):
    """Names and values of `model`'s parameters after `steps` updates with the same random gradients."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model, tiny_config("unused", optim=optim, **SETTINGS), CPU)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in model.parameters():
            # Drawn in float64, so that every dtype gets the same gradients, but for rounding them to bfloat16.
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = (drawn * 1e-2).bfloat16().to(parameter.dtype)
        optimizer.step()
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def test_fused_is_chosen_where_it_exists():
    model = build_actor_critic(tiny_causal_lm("gpt2"), critic_layout="separate")
    for optim, device, fused in (
        (FUSED, "cpu", True),
        (FUSED, "cuda", True),
        (FUSED, "mps", None),
        (LOOP, "cpu", None),
        (LOOP, "cuda", None),
    ):
        optimizer = make_optimizer(model, tiny_config("unused", optim=optim), torch.device(device))
        assert {group["fused"] for group in optimizer.param_groups} == {fused}, (optim, device)
    assert tiny_config("unused").optim == FUSED


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-8), (torch.float64, 1e-15)], ids=str)
def test_fused_equals_the_loop(dtype, tolerance):
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate").to(dtype)
    with torch.no_grad():
        # Norms start at 1, where the distance between two float32 numbers is 1e-7.
        for parameter in model.parameters():
            parameter.mul_(0.1)
    fused, loop = trained(model, FUSED), trained(model, LOOP)
    for name, expected in loop.items():
        assert torch.allclose(fused[name], expected, rtol=0, atol=tolerance), name
        assert not torch.equal(expected, dict(model.named_parameters())[name].double()), name


def test_in_bfloat16_a_fused_step_is_the_more_exact():
    # It rounds a weight once; the loop once after the decay and once after the step.
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="shared").to(torch.bfloat16)
    exact = trained(copy.deepcopy(model).double(), LOOP, steps=1)
    errors = {
        optim: sum(float((w - exact[name]).abs().sum()) for name, w in trained(model, optim, steps=1).items())
        for optim in (FUSED, LOOP)
    }
    assert errors[FUSED] < errors[LOOP]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs of two steps, by their `optim`."""
    found = {}
    for optim in (FUSED, LOOP):
        found[optim] = tiny_trainer(tmp_path_factory.mktemp(optim), optim=optim, save_steps=1)
        found[optim].train()
    return found


@pytest.mark.parametrize(("before", "after"), [(LOOP, FUSED), (FUSED, LOOP)])
def test_a_resumed_run_keeps_the_implementation_of_its_checkpoint(runs, before, after, tmp_path):
    whole = runs[before]
    assert any(not torch.equal(value, weights(whole)[name]) for name, value in weights(runs[after]).items())
    resumed = tiny_trainer(tmp_path, optim=after)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-1")
    assert {group["fused"] for group in resumed.updater.optimizer.param_groups} == {True if before == FUSED else None}
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())
    assert metric_lines(tmp_path)[-1] == metric_lines(whole.args.output_dir)[-1]


def state_of(trainer):
    """Copies of weights, moments and numbers of steps, by the parameter's name."""
    state = trainer.updater.optimizer.state
    named = dict(trainer.actor_critic.named_parameters())
    assert all(set(state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in named.values())
    return {name: [p.detach().clone(), *(t.clone() for t in state[p].values())] for name, p in named.items()}


def changed(trainer, before):
    """Names of the parameters of which any bit of weight, moments or number of steps has changed."""
    now = state_of(trainer)
    return {name for name in now if not all(map(torch.equal, now[name], before[name]))}


def give_gradients(trainer, value=1e-3):
    for parameter in trainer.actor_critic.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_a_skipped_update_and_frozen_parameters_keep_every_bit(runs):
    trainer = copy.copy(runs[FUSED])
    engine, before = trainer.updater.engine, state_of(trainer)
    give_gradients(trainer)
    next(iter(trainer.actor_critic.critic_parameters())).grad[0] = torch.inf
    assert engine.step().non_finite == "the critic's gradient norm is inf"
    assert changed(trainer, before) == set()
    give_gradients(trainer)
    engine.step(frozen=trainer.actor_critic.policy_parameters())
    names = {id(p): name for name, p in trainer.actor_critic.named_parameters()}
    assert changed(trainer, before) == {names[id(p)] for p in trainer.actor_critic.critic_parameters()}
    steps = {name: float(values[1]) for name, values in state_of(trainer).items()}
    # Two steps of three optimizer steps each, and for the critic this one.
    assert {steps[n] for n in steps if n.startswith("policy.")} == {6.0}
    assert {steps[n] for n in steps if n.startswith("critic.")} == {7.0}
    before = state_of(trainer)
    give_gradients(trainer)
    norms = engine.step(frozen=trainer.actor_critic.critic_parameters())
    assert norms.critic == 0 < norms.policy
    assert changed(trainer, before) == {names[id(p)] for p in trainer.actor_critic.policy_parameters()}


def test_only_a_gradient_beyond_its_limit_is_rewritten(runs):
    engine = runs[LOOP].updater.engine
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([2.0, 4.0, 4.0]), torch.tensor([8.0])
    versions = first.grad._version, second.grad._version
    # sqrt(4 + 16 + 16 + 64) = 10
    assert engine._clip([first, second], 10.5) == 10.0
    assert (first.grad._version, second.grad._version) == versions
    assert engine._clip([first, second], 5.0) == 10.0
    # 5 / (10 + 1e-6), which rounds to a float32 just below 0.5
    assert torch.allclose(first.grad, torch.tensor([1.0, 2.0, 2.0]), rtol=2e-7, atol=0)
    assert torch.allclose(second.grad, torch.tensor([4.0]), rtol=2e-7, atol=0)
    given = [torch.nn.Parameter(p.detach().clone()) for p in (first, second)]
    # The norm of 1, 2, 3 and 1 is sqrt(15); with a limit just that large torch's factor is still below 1.
    for limit in (0.3, 1.0, float(torch.tensor(15.0).sqrt()), 3.8729844, 7.0):
        for mine, torchs in zip((first, second), given, strict=True):
            mine.grad = torch.arange(1.0, mine.numel() + 1)
            torchs.grad = mine.grad.clone()
        engine._clip([first, second], limit)
        torch.nn.utils.clip_grad_norm_(given, limit)
        assert torch.equal(first.grad, given[0].grad) and torch.equal(second.grad, given[1].grad), limit
