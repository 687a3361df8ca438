"""The loop belongs to BaseTrainer: it counts steps whatever a subclass overrides, and saves what a subclass adds."""

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo import PPOTrainer
from tests.tiny_runs import metric_lines, tiny_trainer, weights


def test_an_update_of_ones_own_without_super_works_and_ends(tmp_path):
    class Own(PPOTrainer):
        def step_with_rollouts(self, rollouts):
            rows = torch.arange(rollouts["responses"].size(0))
            stats, _ = self.updater.step(rollouts, rows, self.compute_loss, policy_unchanged=True)
            return stats.compute(1)

    trainer = tiny_trainer(tmp_path, trainer_class=Own, step_batch_size=10, step_per_device_batch_size=10)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.state.epoch == 0.5
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2]
    assert (tmp_path / "final/policy").is_dir()


def test_a_step_of_ones_own_and_an_update_made_twice_count_once(tmp_path):
    class Twice(PPOTrainer):
        def step_with_rollouts(self, rollouts):
            super().step_with_rollouts(rollouts)
            return super().step_with_rollouts(rollouts)

    class Nothing(PPOTrainer):
        def step(self, prompt_batches):
            return {"objective/prompts": float(len(prompt_batches[0]["rows"]))}

    for trainer_class in (Twice, Nothing):
        trainer = tiny_trainer(tmp_path / trainer_class.__name__, trainer_class=trainer_class)
        trainer.train()
        assert trainer.state.global_step == 2
    assert metric_lines(tmp_path / "Nothing")[-1] == {"step": 2, "objective/prompts": 10.0}


class Recorder(PPOTrainer):
    """Records, in each micro-batch, the backward passes and the critic's part of the loss."""

    factor = 1.0

    def compute_loss(self, rollouts_batch):
        backward, passes = self.updater.engine.backward, []
        self.updater.engine.backward = lambda loss: passes.append(1) or backward(loss)
        try:
            loss, stats = super().compute_loss(rollouts_batch)
        finally:
            self.updater.engine.backward = backward
        self.early_passes = getattr(self, "early_passes", 0) + len(passes)
        return self.factor * loss, stats


# Rows have 5 to 9 tokens, so optimizer steps of 4, 4 and 2 rows are made in 2, 2 and 1 micro-batches.
TWO_ROWS = {"max_tokens_per_micro_batch": 18}
ADAPTER = {
    **TWO_ROWS,
    "critic_layout": "adapter",
    "gradient_checkpointing": True,
    "trainer_arguments": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True)},
}


def test_an_override_of_the_loss_costs_no_memory_and_works_with_an_adapter_critic(tmp_path):
    torch.manual_seed(0)
    plain = tiny_trainer(tmp_path / "plain", **ADAPTER)
    torch.manual_seed(0)
    own = tiny_trainer(tmp_path / "own", trainer_class=Recorder, **ADAPTER)
    for trainer in (plain, own):
        trainer.train()
    # Two steps of five micro-batches: the critic's graph is gone before the policy's is made.
    assert own.early_passes == 10
    for name, value in weights(plain).items():
        assert torch.equal(weights(own)[name], value), name


def test_a_loss_that_couples_policy_and_critic_keeps_both_graphs(tmp_path):
    class Doubled(Recorder):
        factor, separate_critic_backward = 2.0, False

    torch.manual_seed(0)
    doubled = tiny_trainer(tmp_path / "doubled", trainer_class=Doubled, max_grad_norm=1e6)
    torch.manual_seed(0)
    plain = tiny_trainer(tmp_path / "plain", max_grad_norm=1e6)
    norms = [trainer.step(trainer.prompt_batches(0))["ppo/policy/grad_norm"] for trainer in (doubled, plain)]
    assert doubled.early_passes == 0
    # The critic's gradient is doubled too: the norm of the first optimizer step is, and AdamW's steps stay alike.
    assert norms[0] == pytest.approx(2 * norms[1], rel=0.05)


def test_one_graph_for_both_works_with_an_adapter_critic_and_recomputed_activations(tmp_path):
    class OneGraph(Recorder):
        separate_critic_backward = False

    trainers = []
    for trainer_class in (PPOTrainer, OneGraph):
        torch.manual_seed(0)
        trainers.append(tiny_trainer(tmp_path / trainer_class.__name__, trainer_class=trainer_class, **ADAPTER))
        trainers[-1].train()
    plain, own = map(weights, trainers)
    assert trainers[1].early_passes == 0
    for name, value in plain.items():
        torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5)


def test_a_loss_that_averages_two_passes_is_refused_though_its_weights_add_up_to_one(tmp_path):
    class TwoPasses(PPOTrainer):
        def compute_loss(self, rollouts_batch):
            (first, stats), (second, _) = (super(TwoPasses, self).compute_loss(rollouts_batch) for _ in range(2))
            return 0.5 * (first + second), stats

    trainer = tiny_trainer(tmp_path, trainer_class=TwoPasses)
    with pytest.raises(ValueError, match="critic's part has the weight 0.5"):
        trainer.step(trainer.prompt_batches(0))


@pytest.mark.parametrize(("factor", "weight"), [(0.5, "0.5"), (0.0, "0")])
def test_a_loss_that_scales_the_critic_without_saying_so_is_refused(tmp_path, factor, weight):
    class Scaled(PPOTrainer):
        def compute_loss(self, rollouts_batch):
            loss, stats = super().compute_loss(rollouts_batch)
            return factor * loss, stats

    trainer = tiny_trainer(tmp_path, trainer_class=Scaled)
    before = weights(trainer)
    with pytest.raises(
        ValueError, match=rf"critic's part has the weight {weight}, .* separate_critic_backward = False"
    ):
        trainer.step(trainer.prompt_batches(0))
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_loss_made_of_the_policy_s_part_alone_is_refused(tmp_path):
    class Dropped(PPOTrainer):
        def compute_loss(self, rollouts_batch):
            _, stats = super().compute_loss(rollouts_batch)
            outputs = self._forward(rollouts_batch, with_policy=True, with_critic=False)
            return outputs.logprobs.sum(), stats

    trainer = tiny_trainer(tmp_path, trainer_class=Dropped)
    with pytest.raises(ValueError, match="critic's part has the weight 0"):
        trainer.step(trainer.prompt_batches(0))


def test_a_term_added_to_the_loss_needs_nothing(tmp_path):
    class Added(Recorder):
        def compute_loss(self, rollouts_batch):
            loss, stats = super().compute_loss(rollouts_batch)
            return loss + 0.0 * self.actor_critic.policy.model.lm_head.weight.sum(), stats

    torch.manual_seed(0)
    plain = tiny_trainer(tmp_path / "plain", **TWO_ROWS)
    torch.manual_seed(0)
    added = tiny_trainer(tmp_path / "added", trainer_class=Added, **TWO_ROWS)
    for trainer in (plain, added):
        trainer.train()
    assert added.early_passes == 10
    assert all(torch.equal(weights(added)[name], value) for name, value in weights(plain).items())


class Counting(PPOTrainer):
    """Has a state of its own."""

    class Counter:
        def __init__(self):
            self.steps = 0

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    def checkpoint_components(self):
        if not hasattr(self, "counter"):
            self.counter = self.Counter()
        return {"counter": self.counter}

    def record_step_stats(self, train_stats, rollouts, step):
        self.counter.steps += 1
        return super().record_step_stats(train_stats, rollouts, step) | {"own/steps": float(self.counter.steps)}


def test_a_state_of_ones_own_is_saved_and_resumed_and_missed_by_another_trainer(tmp_path):
    run = {"save_steps": 1, "num_logged_rollouts": 0}
    first = tiny_trainer(tmp_path, trainer_class=Counting, total_episodes=20, **run)
    first.checkpoint_components()
    first.train()
    resumed = tiny_trainer(tmp_path, trainer_class=Counting, total_episodes=30, **run)
    resumed.train(resume_from_checkpoint=True)
    assert [line["own/steps"] for line in metric_lines(tmp_path)] == [1.0, 2.0, 3.0]
    theirs = "critic_pretraining, kl_controller, old_policy, progress"
    message = f"components callbacks, counter, {theirs}, but this trainer has callbacks, {theirs};"
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, total_episodes=40, **run).train(resume_from_checkpoint=True)


def test_a_state_of_ones_own_cannot_replace_the_trainers(tmp_path):
    class Replacing(PPOTrainer):
        def checkpoint_components(self):
            return {"progress": self.kl_controller}

    with pytest.raises(ValueError, match=r"checkpoint_components\(\) returned progress, .*saves itself"):
        tiny_trainer(tmp_path, trainer_class=Replacing).save_checkpoint()


def test_an_early_stop_needs_the_kl_of_the_policy_loss(tmp_path):
    class Silent(PPOTrainer):
        def compute_loss(self, rollouts_batch):
            loss, stats = super().compute_loss(rollouts_batch)
            return loss, {name: value for name, value in stats.items() if "approx_kl" not in name}

    trainer = tiny_trainer(tmp_path, trainer_class=Silent, target_kl_stop=0.1)
    with pytest.raises(ValueError, match="target_kl_stop is 0.1, but the policy loss measured no approx_kl_k3"):
        trainer.step(trainer.prompt_batches(0))
