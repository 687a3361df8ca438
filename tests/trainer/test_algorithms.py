"""Every option of the algorithm through the trainer: it learns from it, whatever the micro-batches, and says so."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from alpaca_ppo import PPOTrainer
from alpaca_ppo.config.checks import stop_condition
from alpaca_ppo.models import C51Head, build_actor_critic
from alpaca_ppo.ppo.update_plan import plan_updates
from alpaca_ppo.tracking.callbacks import StopAt
from alpaca_ppo.tracking.results import read_weights_step
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, one_update, prompts, tiny_config, tiny_trainer, weights, with_advantages


def test_without_a_critic_none_is_built_saved_or_logged(tmp_path):
    trainer = tiny_trainer(tmp_path, adv_estimator="rloo", num_return_sequences=2)
    assert trainer.actor_critic.critic is None
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["policy", "step.json"]
    names = metric_lines(tmp_path)[-1].keys()
    assert not [name for name in names if name.startswith(("ppo/val/", "ppo/loss/value"))]
    assert "ppo/loss/policy" in names
    row = next((tmp_path / "rollouts").iterdir()).read_text()
    assert '"advantages"' in row and '"values"' not in row


def test_no_group_of_one_and_no_critic_s_option_without_a_critic(tmp_path):
    with pytest.raises(ValueError, match="adv_estimator is 'grpo'.*num_return_sequences is 1; set it to 2 or more"):
        tiny_trainer(tmp_path, adv_estimator="grpo")
    with pytest.raises(ValueError, match="critic_pretraining_steps is 3, without effect"):
        tiny_trainer(tmp_path, adv_estimator="remax", critic_pretraining_steps=3)
    given = {"value_model": tiny_causal_lm("llama")}
    with pytest.raises(ValueError, match="adv_estimator 'remax' has no critic"):
        tiny_trainer(tmp_path, adv_estimator="remax", trainer_arguments=given)
    with pytest.raises(ValueError, match="critic_layout is None"):
        build_actor_critic(tiny_causal_lm("llama"), critic_layout=None, value_model=tiny_causal_lm("llama"))


def test_the_updates_of_a_step_end_when_the_policy_has_moved_too_far(tmp_path):
    free = tiny_trainer(tmp_path / "free", learning_rate=1e-2, ppo_epochs=4)
    stats = free.step(free.prompt_batches(0))
    assert stats["ppo/policy/optimizer_steps"] == 12 and stats["ppo/policy/kl_stopped"] == 0
    stopped = tiny_trainer(tmp_path / "stopped", learning_rate=1e-2, ppo_epochs=4, target_kl_stop=1e-4)
    stats = stopped.step(stopped.prompt_batches(0))
    # The first optimizer step measures no KL; the second finds the bound passed and is not taken.
    assert stats["ppo/policy/optimizer_steps"] == 1 and stats["ppo/policy/kl_stopped"] == 1
    once = tiny_trainer(tmp_path / "once", learning_rate=1e-2, ppo_epochs=4)
    one_update(
        once, with_advantages(once, once.prompt_batches(0)), plan_updates(10, once.args, 0, critic_only=False)[0].rows
    )
    for name, tensor in weights(once).items():
        assert torch.equal(tensor, weights(stopped)[name])


def test_a_run_ends_with_a_checkpoint_where_the_kl_passes_its_bound(tmp_path, capsys):
    held_out = {"trainer_arguments": {"eval_dataset": prompts(3)}}
    settings = {"learning_rate": 1e-2, "total_episodes": 40, "logging_steps": 10, **held_out}
    trainer = tiny_trainer(tmp_path, max_kl_to_ref=1e-3, **settings)
    trainer.train()
    # KL is 0 in the first rollout, and above the bound in the second.
    assert trainer.state.global_step == 2 and (tmp_path / "checkpoint-2").is_dir()
    assert "(max_kl_to_ref: 0.001): the run ends here, with a checkpoint. Raise" in capsys.readouterr().out
    # Its last step is evaluated and reported like that of a whole run, and a higher bound lets it go on.
    assert "eval/rewards" in metric_lines(tmp_path)[-1] and trainer.state.log_history[-1]["step"] == 2
    resumed = tiny_trainer(tmp_path, max_kl_to_ref=1e3, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


@pytest.mark.parametrize(
    ("condition", "steps"),
    [("eval/scores >= 2.5", 4), ("eval/scores>2", 4), ("objective/scores < 1e9", 1), ("eval/scores <= 0", 5)],
)
def test_a_run_ends_where_a_score_is_reached_and_says_why(condition, steps, tmp_path, capsys):
    """Evaluations of steps 0, 2 and 4 find the scores 9, 2 and 3."""
    found = iter([9.0, 2.0, 3.0, 2.0])

    class Scored(PPOTrainer):
        def evaluate(self):
            return super().evaluate() | {"eval/scores": next(found)}

    settings = {"stop_at": condition, "total_episodes": 50, "eval_steps": 2, "report": True}
    trainer = tiny_trainer(tmp_path, trainer_class=Scored, trainer_arguments={"eval_dataset": prompts(3)}, **settings)
    trainer.train()
    assert trainer.state.global_step == steps
    assert (tmp_path / "final/policy").is_dir() and (tmp_path / f"checkpoint-{steps}").is_dir() == (steps < 5)
    reason = read_weights_step(tmp_path / "final").ended_by
    if steps == 5:
        assert reason is None
    else:
        assert reason.endswith(f"(stop_at: {condition})")
        assert f"step {steps}: {reason}: the run ends here" in capsys.readouterr().out
        assert f"step {steps} of {steps}; the run ended because {reason[:20]}" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "option",
    [
        *("eval/scores", " >= 0.8", "0.8 <= eval/scores", "eval/scores >= high"),
        *("eval/scores >= nan", "eval/scores=>1", "eval/x>>1"),
    ],
)
def test_a_condition_that_is_none_is_refused(option, tmp_path):
    assert stop_condition("stop_at", " reward/pass@k=1>= 0.5") == ("reward/pass@k=1", ">=", 0.5)
    with pytest.raises(ValueError, match="stop_at is .*; write a metric, one of >= <= > < and a number"):
        tiny_config(tmp_path, stop_at=option, eval_steps=2)
    with pytest.raises(ValueError, match="stop_at is 'eval/scores > 1', but eval_steps is 0; set it to 10"):
        tiny_config(tmp_path, stop_at="eval/scores > 1")


def test_a_score_that_nobody_measures_ends_the_run_before_its_first_step(tmp_path):
    arguments = {"trainer_arguments": {"eval_dataset": prompts(3)}, "eval_steps": 2, "stop_at": "eval/skore > 1"}
    trainer = tiny_trainer(tmp_path, **arguments)
    with pytest.raises(ValueError, match="there is no metric eval/skore; there are .*eval/scores"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_misspelt_metric_of_steps_is_named_once_and_the_run_goes_on(tmp_path, capsys):
    settings = {"total_episodes": 30, "save_steps": 1}
    tiny_trainer(tmp_path, **settings).train()
    for total, name in ((50, "objective/score"), (60, "ppo/policy/approx_kl_k3")):
        resumed = tiny_trainer(tmp_path, **settings | {"total_episodes": total}, stop_at=f"{name} >= 1e9")
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == total / 10
        said = f"warning: stop_at: {name} >= 1e9, but there is no metric {name} yet; did you mean objective/scores"
        assert capsys.readouterr().out.count(said) == (name == "objective/score")


def test_a_metric_that_is_not_in_every_step_ends_a_run_when_it_comes(tmp_path):
    class Rarely(PPOTrainer):
        def record_step_stats(self, train_stats, rollouts, step):
            return super().record_step_stats(train_stats, rollouts, step) | ({"mine": 1.0} if step == 2 else {})

    trainer = tiny_trainer(tmp_path, trainer_class=Rarely, stop_at="mine >= 1", total_episodes=50)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_metric_that_comes_after_the_critic_s_pretraining_may_end_a_run(tmp_path):
    settings = {"critic_pretraining_steps": 1, "total_episodes": 40}
    trainer = tiny_trainer(tmp_path, stop_at="ppo/policy/optimizer_steps >= 1", **settings)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_run_that_another_process_ends_does_not_say_that_its_own_value_is_beyond_the_bound():
    rule = StopAt("stop_at: x > 0.5", ("x", ">", 0.5), on_any_rank=lambda met: True, say=lambda text: None)
    args, state, control = (
        SimpleNamespace(critic_pretraining_steps=0),
        SimpleNamespace(global_step=1),
        SimpleNamespace(),
    )
    rule.on_step_end(args, state, control, metrics={"x": 0.25})
    assert rule.reached == "x met the condition on another process (stop_at: x > 0.5)" and control.should_training_stop


def test_a_bound_of_the_kl_needs_the_metric(tmp_path):
    class Silent(PPOTrainer):
        def record_step_stats(self, train_stats, rollouts, step):
            return {"mine": 1.0}

    tiny_trainer(tmp_path / "free", trainer_class=Silent).train()
    with pytest.raises(
        ValueError, match="max_kl_to_ref: 1.0, but there is no metric objective/kl_sum_seq; there are mine"
    ):
        tiny_trainer(tmp_path, trainer_class=Silent, max_kl_to_ref=1.0).train()


def test_a_support_that_holds_every_return_is_not_warned_of(tmp_path):
    def zero_or_one(completions, **columns):
        return [float(len(text) % 2) for text in completions]

    arguments = {"reward_funcs": zero_or_one}
    settings = {"critic": "c51", "value_support": [0.0, 1.0], "kl_coef": 0.0}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = trainer.step(trainer.prompt_batches(0))
    assert stats["ppo/val/edge_mass"] > 0.9 and stats["ppo/val/outside_support"] == 0.0


def test_an_actor_critic_brings_the_support_and_takes_the_risk_level(tmp_path):
    head = partial(C51Head, v_min=-1.0, v_max=1.0)
    built = build_actor_critic(tiny_causal_lm("llama"), critic_layout="shared", head=head)
    settings = {"model": built, "critic_layout": "shared", "critic": "c51"}
    with pytest.raises(ValueError, match="has the head .*-1.0.*, critic .*-10.0"):
        tiny_trainer(tmp_path, **settings)
    tiny_trainer(tmp_path, value_support=[-1.0, 1.0], risk_level=0.5, **settings)
    assert built.critic.head.risk_level == "0.5"


@pytest.mark.parametrize("kind", ["c51", "hl_gauss"])
def test_returns_beyond_the_support_are_warned_of_once(tmp_path, kind):
    trainer = tiny_trainer(tmp_path, critic=kind, value_support=[-0.1, 0.1])
    with pytest.warns(UserWarning, match="outside value_support .*widen it"):
        stats = trainer.step(trainer.prompt_batches(0))
    assert stats["ppo/val/outside_support"] > 0.5 and "ppo/val/edge_mass" in stats
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(trainer.prompt_batches(1))


def test_the_warning_does_not_need_the_probability_at_the_edges(tmp_path):
    trainer = tiny_trainer(tmp_path, critic="c51")
    with pytest.warns(UserWarning, match="^25.0% of the returns are outside value_support"):
        trainer.updater.warn_outside_support({"val/outside_support": 0.25})
