"""Which AdamW a run trains with, what its steps leave as it is, and clipping."""

import copy

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo.adapters.adapter_set import add_policy_adapter
from alpaca_ppo.distributed.optimizer import make_optimizer
from alpaca_ppo.models import build_actor_critic
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_config, tiny_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two steps of three optimizer steps each."""
    trainer = tiny_trainer(tmp_path_factory.mktemp("run"))
    trainer.train()
    return trainer


@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("cuda", True), ("mps", None)])
def test_the_fused_kernel_is_chosen_where_it_exists(device, fused):
    model = build_actor_critic(tiny_causal_lm("gpt2"), critic_layout="separate")
    groups = make_optimizer(model, tiny_config("unused"), torch.device(device)).param_groups
    assert {group["fused"] for group in groups} == {fused}


def state_of(trainer):
    """Copies of weights, moments and numbers of steps, by the parameter's name."""
    state = trainer.updater.engine.optimizer.state
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


def test_a_skipped_update_and_frozen_parameters_keep_every_bit(run):
    trainer = copy.copy(run)
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


def test_only_a_gradient_beyond_its_limit_is_rewritten(run):
    engine = run.updater.engine
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


def test_an_optimizer_of_all_parameters_keeps_those_that_train(tmp_path):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = build_actor_critic(add_policy_adapter(tiny_causal_lm("llama"), lora), critic_layout="adapter")
    frozen, *others = sorted(model.parameters(), key=lambda parameter: parameter.requires_grad)
    optimizer = torch.optim.AdamW([{"params": [frozen]}, {"params": others}])
    trainer = tiny_trainer(
        tmp_path, model=model, trainer_arguments={"optimizers": (optimizer, None)}, critic_layout="adapter"
    )
    (group,) = trainer.updater.engine.optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters() if p.requires_grad}
