"""The trainer's arithmetic: what a step trains on, and that how it is cut does not matter."""

import json
import re

import pytest
import torch
from transformers import TrainerCallback

from alpaca_ppo import ActorCritic, PPOConfig, PPOTrainer
from alpaca_ppo.models import Critic, Policy, ScalarHead
from alpaca_ppo.tracking.callbacks import CONTROL_FLAGS
from tests.tiny_models import ARCHITECTURES, tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts, tiny_trainer, weights


def step_once(trainer: PPOTrainer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    stats = trainer.step(trainer.prompt_batches(0))
    return stats, weights(trainer)


@pytest.mark.parametrize(("arch", "layout"), [*((arch, "shared") for arch in ARCHITECTURES), ("llama", "separate")])
def test_one_step_moves_every_policy_and_critic_and_starts_at_ratio_one(arch, layout, tmp_path):
    trainer = tiny_trainer(tmp_path, model=tiny_causal_lm(arch), critic_layout=layout)
    before = weights(trainer)
    stats, after = step_once(trainer)
    assert stats["ppo/policy/first_ratio_error_max"] < 1e-5
    assert stats["mismatch/logprob_abs_mean"] < 1e-5
    assert stats["objective/kl_sum_seq"] == pytest.approx(0.0, abs=1e-5)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "critic.head.weight" in moved
    assert any(name.startswith("policy.") for name in moved)
    assert any(name.startswith("critic.backbone.") for name in moved) == (layout == "separate")


def test_the_class_describes_every_attribute_of_a_trainer(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.step(trainer.prompt_batches(0))
    section = str(PPOTrainer.__doc__).split("Attributes:\n")[1].split("Raises:")[0]
    described = re.findall(r"^ {8}(\w+): ", section, flags=re.MULTILINE)
    assert sorted(described) == sorted(vars(trainer))


def test_a_ragged_last_batch_is_trained_on_and_optimizer_steps_add_up(tmp_path):
    # 40 prompts, 16 a step: steps of 16, 16 and 8 rows; step batches of 6: 3 + 3 + 2 optimizer steps, two epochs each.
    trainer = tiny_trainer(
        tmp_path, rollout_batch_size=16, step_batch_size=6, ppo_epochs=2, total_epochs=1, total_episodes=None
    )
    assert trainer.schedule.num_steps == 3
    assert trainer.updater.schedules.totals.policy == 2 * (3 + 3 + 2)
    steps = []
    trainer.updater.engine.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trainer.train()
    assert len(steps) == trainer.updater.schedules.totals.policy
    seen = [index for step in range(3) for index in trainer.schedule.prompts_of(step).indices]
    assert sorted(seen) == list(range(40))


def test_a_bandit_is_learned(tmp_path):
    def count_sevens(prompts, completions, completion_ids, **columns):
        return [float(ids.count(7)) for ids in completion_ids]

    trainer = tiny_trainer(
        tmp_path,
        total_episodes=None,
        total_epochs=20,
        rollout_batch_size=40,
        num_return_sequences=2,
        step_batch_size=40,
        step_per_device_batch_size=40,
        rollout_per_device_batch_size=80,
        learning_rate=1e-2,
        kl_coef=0.0,
        num_logged_rollouts=0,
        trainer_arguments={"reward_funcs": count_sevens},
    )
    trainer.train()
    scores = [line["objective/scores"] for line in metric_lines(tmp_path)]
    # Chance is 5 tokens / 64; five of five would be perfect.
    assert scores[0] < 0.5
    assert scores[-1] > 3.0


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    lines = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny_trainer(tmp_path / folder, seed=seed).train()
        lines.append(metric_lines(tmp_path / folder))
    assert lines[0] == lines[1]
    assert lines[0] != lines[2]


def test_pad_equal_to_eos_changes_nothing(tmp_path):
    runs = []
    for pad in ("<pad>", "<eos>"):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = pad
        trainer = tiny_trainer(tmp_path / pad.strip("<>"), trainer_arguments={"processing_class": tokenizer})
        trainer.train()
        runs.append(metric_lines(trainer.args.output_dir))
    assert runs[0] == runs[1]


def test_responses_that_stop_at_once_and_never_stop_are_trained_on(tmp_path):
    def always_eos(prompts, completions, completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    for bias, length in ((50.0, 1.0), (-50.0, 5.0)):
        model = tiny_causal_lm("gpt2")
        head = torch.nn.Linear(32, 64)
        head.weight.data = model.lm_head.weight.data.clone()
        head.bias.data.zero_()[2] = bias
        model.lm_head = head
        model.config.tie_word_embeddings = False
        trainer = tiny_trainer(
            tmp_path / str(length),
            model=model,
            penalty_reward_value=-3.0,
            trainer_arguments={"reward_funcs": always_eos},
        )
        stats, _ = step_once(trainer)
        assert stats["objective/response_length"] == length
        assert stats["objective/truncated_fraction"] == float(length == 5.0)
        assert stats["objective/scores"] == length
        assert stats["objective/rewards"] == (length if length == 1.0 else -3.0)


def test_a_critic_started_from_the_reward_model_predicts_its_score(tmp_path):
    reward_model = tiny_sequence_classifier("llama", seed=3)
    trainer = tiny_trainer(
        tmp_path,
        init_value_with_reward=True,
        trainer_arguments={"reward_funcs": reward_model, "reward_processing_classes": tiny_tokenizer()},
    )
    head = trainer.actor_critic.critic.head.weight
    assert torch.equal(head, reward_model.score.weight)
    before = reward_model.score.weight.clone()
    _, after = step_once(trainer)
    assert not torch.equal(after["critic.head.weight"], before), "the critic learns"
    assert torch.equal(reward_model.score.weight, before), "the reward model does not"


def test_a_ratio_off_one_before_any_update_is_a_finding(tmp_path):
    class Drifting(PPOTrainer):
        def rollout(self, prompt_batches):
            rollouts = super().rollout(prompt_batches)
            rollouts["logprobs"] = rollouts["logprobs"] - 0.1 * rollouts["response_mask"]
            return rollouts

    tiny_trainer(tmp_path, trainer_class=Drifting, mismatch_action="ignore").train()
    # exp(0.1) - 1 = 0.10517
    assert metric_lines(tmp_path)[0]["ppo/policy/first_ratio_error_max"] == pytest.approx(0.10517, abs=1e-4)
    findings = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert ("logprobs_disagree", "error", 1) in [(each["rule"], each["severity"], each["step"]) for each in findings]


def test_callbacks_hear_of_everything_and_can_stop_save_and_evaluate(tmp_path):
    events = []

    class Listener(TrainerCallback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda args, state, control, **kwargs: self.hear(name, state, control, kwargs)
            return super().__getattribute__(name)

        def hear(self, name, state, control, kwargs):
            events.append(name)
            assert kwargs["model"] is not None and kwargs["optimizer"] is not None
            if name == "on_step_end" and state.global_step == 1:
                control.should_save = control.should_evaluate = True
            if name == "on_step_end" and state.global_step == 2:
                control.should_training_stop = True
            return control

    trainer = tiny_trainer(
        tmp_path, total_episodes=40, trainer_arguments={"callbacks": [Listener], "eval_dataset": prompts(3)}
    )
    trainer.train()
    step = ["on_step_begin", "on_step_end"]
    assert events == [
        "on_train_begin",
        "on_evaluate",
        *[*step, "on_evaluate", "on_log", "on_save"],
        *[*step, "on_evaluate", "on_log"],
        "on_train_end",
    ]
    assert (tmp_path / "checkpoint-1").is_dir()
    assert ["eval/scores" in line for line in metric_lines(tmp_path)] == [True, True, True]


def test_an_actor_critic_of_the_users_own_is_trained_as_it_is(tmp_path):
    policy = Policy(tiny_causal_lm("llama"))
    actor_critic = ActorCritic(policy, Critic(ScalarHead(32), None))
    trainer = tiny_trainer(tmp_path, model=actor_critic, critic_layout="shared")
    assert trainer.actor_critic is actor_critic
    with pytest.raises(ValueError, match="leave value_model out"):
        tiny_trainer(
            tmp_path / "b", model=actor_critic, trainer_arguments={"value_model": tiny_sequence_classifier("llama")}
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_layout": "separate"}, "critic_layout 'shared', the options need 'separate'"),
        ({"critic_layout": "shared", "critic": "c51"}, "head .'kind': 'scalar'.*, critic .'kind': 'c51'"),
        ({"adv_estimator": "remax"}, "critic_layout 'shared', the options need None"),
    ],
)
def test_an_actor_critic_must_be_what_the_configuration_says(settings, message, tmp_path):
    actor_critic = ActorCritic(Policy(tiny_causal_lm("llama")), Critic(ScalarHead(32), None))
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, model=actor_critic, **settings)


def test_dropout_of_an_actor_critic_of_the_users_own_is_switched_off(tmp_path):
    actor_critic = ActorCritic(Policy(tiny_causal_lm("gpt2", resid_pdrop=0.5)), Critic(ScalarHead(32), None))
    stats, _ = step_once(tiny_trainer(tmp_path, model=actor_critic, critic_layout="shared"))
    assert stats["ppo/policy/first_ratio_error_max"] < 1e-5


def test_a_loop_of_the_users_own_gets_new_rollouts_each_time(tmp_path):
    trainer = tiny_trainer(tmp_path, learning_rate=0.0)
    responses = []
    for _ in range(2):
        rollouts = trainer.rollout(trainer.prompt_batches(0))
        rollouts.update(trainer._shape_reward(*(rollouts[k] for k in SHAPED)))
        rollouts.update(
            trainer._estimate_advantage(rollouts["shaped_rewards"], rollouts["values"], rollouts["response_mask"])
        )
        trainer.step_with_rollouts(rollouts)
        responses.append(rollouts["responses"])
    assert trainer.state.global_step == 2
    assert not torch.equal(*responses)


SHAPED = ("rewards", "responses", "logprobs", "ref_logprobs", "response_mask")


def test_a_subclass_may_return_no_statistics(tmp_path):
    class Silent(PPOTrainer):
        def compute_policy_loss(self, batch, outputs):
            return super().compute_policy_loss(batch, outputs)[0], {}

        def compute_value_loss(self, batch, outputs):
            return super().compute_value_loss(batch, outputs)[0], {}

    stats, _ = step_once(tiny_trainer(tmp_path, trainer_class=Silent))
    assert "ppo/policy/grad_norm" in stats


def test_the_horizon_controller_counts_responses(tmp_path):
    settings = {"kl_controller": "horizon", "kl_horizon": 100, "kl_coef": 0.2, "target_kl": 1.0}
    trainer = tiny_trainer(tmp_path, num_return_sequences=2, **settings)
    step_once(trainer)
    # 10 prompts, 2 samples each; the first KL is 0, so the clipped error is -0.2: 0.2 * (1 - 0.2 * 20 / 100) = 0.192.
    assert trainer.kl_controller.value == pytest.approx(0.192)


def test_without_a_critic_the_default_controller_keeps_a_run_the_same_on_another_scale_of_the_reward(tmp_path):
    learned_from = []

    class Recorded(PPOTrainer):
        def record_step_stats(self, train_stats, rollouts, step):
            learned_from.append(rollouts)
            return super().record_step_stats(train_stats, rollouts, step)

    for scale in (1.0, 8.0):
        settings = {"adv_estimator": "reinforce_plus_plus", "reward_weights": [scale], "learning_rate": 1e-2}
        run = {**settings, "kl_controller": PPOConfig().kl_controller, "kl_coef": 0.5, "total_episodes": 30}
        tiny_trainer(tmp_path / str(scale), trainer_class=Recorded, **run).train()
    for step, (small, large) in enumerate(zip(learned_from[:3], learned_from[3:], strict=True)):
        assert torch.equal(small["responses"], large["responses"])
        torch.testing.assert_close(large["logprobs"], small["logprobs"], rtol=0, atol=1e-5)
        torch.testing.assert_close(large["shaped_rewards"], 8 * small["shaped_rewards"], rtol=1e-5, atol=1e-4)
        assert (small["kl"].abs().max() > 0.1) == (step > 0)


def test_what_a_callback_asks_for_on_one_rank_is_asked_for_on_all(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_arguments={"callbacks": [TrainerCallback]})
    # This rank asks for a checkpoint, the other for the end.
    trainer.callback_handler.control.should_save = True
    trainer.callback_handler.sync_control(
        lambda mine: [mine, [flag == "should_training_stop" for flag in CONTROL_FLAGS]]
    )
    control = trainer.callback_handler.control
    assert (control.should_save, control.should_training_stop) == (True, True)
    assert not control.should_evaluate and not control.should_log
