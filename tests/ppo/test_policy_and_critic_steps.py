"""Policy and critic take separate steps: neither a scale of the value loss nor the critic's clip reaches the policy."""

import json

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo import PPOTrainer
from alpaca_ppo.distributed.optimizer import make_optimizer
from alpaca_ppo.models import build_actor_critic
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_config, tiny_trainer, weights

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def policy_after(folder, **settings):
    """By how much a step of two epochs, that is six optimizer steps, moves the policy's weights; and its metrics."""
    arguments = {"peft_config": LORA} if settings.get("critic_layout") == "adapter" else {}
    trainer = tiny_trainer(folder, trainer_arguments=arguments, **{"ppo_epochs": 2, **settings})
    weight = trainer.actor_critic.critic.head.weight
    weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    owned = {id(parameter) for parameter in trainer.actor_critic.policy_parameters()}
    names = [name for name, parameter in trainer.actor_critic.named_parameters() if id(parameter) in owned]
    before, stats, after = weights(trainer), trainer.step(trainer.prompt_batches(0)), weights(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in names)
    return {name: after[name] - before[name] for name in names}, stats


def same_bits(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


LAYOUTS = {
    "separate": {},
    "adapter": {"critic_layout": "adapter"},
    "recomputed adapter": {"critic_layout": "adapter", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("layout", ["separate", "adapter"])
def test_vf_coef_changes_no_bit_of_the_policys_update(layout, tmp_path):
    settings = {**LAYOUTS[layout], "max_grad_norm": 0.1}
    (update, stats), (heavy, heavy_stats) = (
        policy_after(tmp_path / str(vf_coef), vf_coef=vf_coef, **settings) for vf_coef in (0.1, 100.0)
    )
    assert same_bits(heavy, update)
    assert stats["ppo/policy/grad_norm"] == heavy_stats["ppo/policy/grad_norm"] > 0.1, "the policy's clip acts"
    assert heavy_stats["ppo/val/grad_norm"] > 100 * stats["ppo/val/grad_norm"]


GROUPS = {"num_return_sequences": 2, "rollout_batch_size": 5, "total_episodes": 10, "adv_estimator": "grpo"}


def norm_of(parameters):
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


@pytest.mark.parametrize("layout", ["separate", "shared"])
def test_each_gradient_is_clipped_to_its_own_norm(layout, tmp_path):
    """An optimizer of the user's own has both in one group."""
    model = build_actor_critic(tiny_causal_lm("llama", dtype=torch.float64), critic_layout=layout)
    # In the shared layout the backbone is the policy's, and the head alone the critic's.
    critic = list(model.critic.parameters())
    assert [p.shape for p in model.critic_parameters()] == [p.shape for p in critic]
    policy = list(model.policy.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clipped = []
    optimizer.register_step_pre_hook(lambda *_: clipped.append((norm_of(policy), norm_of(critic))))
    limits = {"max_grad_norm": 1e-3, "critic_max_grad_norm": 1e-2}
    settings = {**limits, "step_batch_size": 10, "critic_layout": layout}
    trainer = tiny_trainer(tmp_path, model=model, trainer_arguments={"optimizers": (optimizer, None)}, **settings)
    stats = trainer.step(trainer.prompt_batches(0))
    assert clipped == [(pytest.approx(1e-3, rel=1e-4), pytest.approx(1e-2, rel=1e-4))]
    # What is logged is the norm before clipping: that of a run that clips nothing, whose weights are the same.
    unclipped = []
    optimizer.register_step_pre_hook(lambda *_: unclipped.append((norm_of(policy), norm_of(critic))))
    trainer = tiny_trainer(
        tmp_path / "unclipped",
        model=model,
        trainer_arguments={"optimizers": (optimizer, None)},
        **{**settings, "max_grad_norm": 1e9, "critic_max_grad_norm": None},
    )
    trainer.step(trainer.prompt_batches(0))
    assert unclipped == [
        (pytest.approx(stats["ppo/policy/grad_norm"], rel=1e-9), pytest.approx(stats["ppo/val/grad_norm"], rel=1e-9))
    ]


def test_a_frozen_policy_has_no_gradient_and_no_critic_no_norm(tmp_path):
    trainer = tiny_trainer(tmp_path / "warmup", critic_pretraining_steps=1)
    first, second = (trainer.step(trainer.prompt_batches(step)) for step in range(2))
    assert "ppo/policy/grad_norm" not in first and second["ppo/policy/grad_norm"] > 0
    assert first["ppo/val/grad_norm"] > 0 and second["ppo/val/grad_norm"] > 0
    trainer = tiny_trainer(tmp_path / "grpo", **GROUPS)
    stats = trainer.step(trainer.prompt_batches(0))
    assert not {"ppo/val/grad_norm", "objective/critic_lr"} & set(stats)


@pytest.mark.parametrize("layout", ["separate", "recomputed adapter"])
def test_separate_steps_on_the_same_batches_are_joint_steps_to_the_last_bit(layout, tmp_path):
    # A critic with steps of its own would have three times the rate.
    settings = {
        **LAYOUTS[layout],
        "critic_learning_rate": 1e-3,
        "ppo_epochs": 2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
    }
    arguments = {"peft_config": LORA} if "adapter" in layout else {}
    runs = []
    for critic_epochs in (None, 2):
        folder = tmp_path / str(critic_epochs)
        trainer = tiny_trainer(folder, critic_epochs=critic_epochs, trainer_arguments=arguments, **settings)
        lines = [trainer.step(trainer.prompt_batches(step)) for step in range(2)]
        runs.append((weights(trainer), trainer, lines))
    (joint, _, lines), (separate, trainer, separate_lines) = runs
    assert same_bits(separate, joint)
    for line, separate_line in zip(lines, separate_lines, strict=True):
        assert line.keys() == separate_line.keys()
        for name in line.keys() - {"ppo/loss/total", "memory/peak_gib"}:
            if not name.startswith(("time/", "tokens/")):
                assert line[name] == separate_line[name], name
        # vf_coef is 0.1.
        total = separate_line["ppo/loss/policy"] + 0.1 * separate_line["ppo/loss/value"]
        assert separate_line["ppo/loss/total"] == pytest.approx(total)


class GradientForAll(PPOTrainer):
    """Gives every parameter a gradient, as DDP needs it, and a loss of the user's own may."""

    def compute_policy_loss(self, batch, outputs):
        return self.with_all(*super().compute_policy_loss(batch, outputs))

    def compute_value_loss(self, batch, outputs):
        return self.with_all(*super().compute_value_loss(batch, outputs))

    def with_all(self, loss, stats):
        return loss + 1e-3 * sum(parameter.sum() for parameter in self.actor_critic.parameters()), stats


def optimizer_state(trainer):
    """Copies of weight, moments and number of steps of each parameter, by its name."""
    state = trainer.updater.engine.optimizer.state
    named = trainer.actor_critic.named_parameters()
    return {name: [p.detach().clone(), *(t.clone() for t in state[p].values())] for name, p in named}


def test_neither_moves_while_the_other_steps_and_both_are_counted(tmp_path):
    settings = {"critic_step_batch_size": 5, "weight_decay": 0.1, "critic_lr_warmup_steps": 3}
    settings |= {"lr_scheduler_type": "linear"}
    trainer = tiny_trainer(tmp_path, trainer_class=GradientForAll, **settings)
    trainer.step(trainer.prompt_batches(0))
    parts, apply = [], trainer.updater.apply

    def watched(update, *arguments, **how):
        before = optimizer_state(trainer)
        result = apply(update, *arguments, **how)
        after = optimizer_state(trainer)
        changed = {n.split(".")[0] for n in after if not all(map(torch.equal, after[n], before[n]))}
        parts.append((update.part, changed))
        return result

    trainer.updater.apply = watched
    stats = trainer.step(trainer.prompt_batches(1))
    # Ten rows: two batches of 5 for the critic, then 4, 4 and 2 for the policy.
    assert parts == [("critic", {"critic"})] * 2 + [("policy", {"policy"})] * 3
    assert (stats["ppo/policy/optimizer_steps"], stats["ppo/val/optimizer_steps"]) == (3, 2)
    assert (trainer.updater.num_updates, trainer.updater.schedules.totals.policy) == (10, 6)
    # The last of the policy's 6 steps, on the way from 1e-3 to 0; the critic's 4th and last, after 3 of warm-up,
    # at three times the policy's rate.
    assert stats["objective/lr"] == pytest.approx(1e-3 / 6) and stats["objective/critic_lr"] == pytest.approx(3e-3)


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_an_infinite_gradient_of_either_stops_both_and_says_whose_it_was(part, tmp_path):
    class Steep(PPOTrainer):
        def compute_policy_loss(self, batch, outputs):
            loss, stats = super().compute_policy_loss(batch, outputs)
            return loss + (self.steep() if part == "policy" else 0), stats

        def compute_value_loss(self, batch, outputs):
            loss, stats = super().compute_value_loss(batch, outputs)
            return loss + (self.steep() if part == "critic" else 0), stats

        def steep(self):
            parameters = getattr(self.actor_critic, f"{part}_parameters")()
            zero = parameters[0].sum() - parameters[0].sum().detach()
            # sqrt(0) is 0, and its derivative infinite.
            return zero.abs().sqrt()

    trainer = tiny_trainer(tmp_path, trainer_class=Steep, max_skipped_updates=3)
    before = weights(trainer)
    stats = trainer.step(trainer.prompt_batches(0))
    assert stats["ppo/policy/skipped_updates"] == 3
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())
    cause = json.loads((tmp_path / "skipped_updates.jsonl").read_text().splitlines()[0])["cause"]
    assert cause == f"the {part}'s gradient norm is nan, though the losses of all ranks are finite"


def test_the_critic_has_the_policys_adamw_settings():
    policys = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7}
    model = build_actor_critic(tiny_causal_lm("gpt2"), critic_layout="separate")
    critic = {id(parameter) for parameter in model.critic.parameters()}
    optimizer = make_optimizer(model, tiny_config("unused", **policys), torch.device("cpu"))
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            decay = group["weight_decay"] if parameter.dim() > 1 else None
            found.setdefault(id(parameter) in critic, set()).add((decay, group["betas"], group["eps"]))
    assert found[True] == found[False] == {(0.1, (0.8, 0.95), 1e-7), (None, (0.8, 0.95), 1e-7)}


@pytest.mark.parametrize("name", ["critic_learning_rate"])
def test_settings_of_the_critic_are_refused_beside_an_optimizer_that_has_them(name, tmp_path):
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
    arguments = {"optimizers": (torch.optim.AdamW(model.parameters(), lr=1e-3), None)}
    with pytest.raises(ValueError, match=f"{name} is 0.5, but the optimizer in `optimizers` has rates of its own"):
        tiny_trainer(tmp_path, model=model, trainer_arguments=arguments, **{name: 0.5})
