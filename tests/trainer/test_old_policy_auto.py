"""`old_policy: auto`: which steps spare the policy's pass, that it changes nothing but rounding, and the way back.

A run with a reference compares from step 2 on, once the policy has moved. Two comparisons agree, so step 4 is the first
that takes the sampler's log-probs.
"""

import itertools

import pytest
import torch
from peft import LoraConfig

from alpaca_ppo import PPOTrainer
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.models import build_actor_critic
from alpaca_ppo.ppo.critic_pretraining import CriticPretraining
from alpaca_ppo.ppo.mismatch import SamplerMismatch
from alpaca_ppo.ppo.old_policy import OldPolicySource
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, poisoned, tiny_config, tiny_trainer, weights

RUN = {"mismatch_check_steps": 5, "rollout_batch_size": 4, "total_episodes": 28, "step_batch_size": 2}
"""Seven steps of two optimizer steps."""
SPARED_FROM_4 = [1, 1, 1, 0, 1, 0, 0]
AGREED = {"agreed_at": [0, 1], "disagreed_at": None, "moved_at": 0, "said": []}
AGREED |= {"sampler_serves_at": None, "reference_serves_at": None}
NO_REFERENCE = {**RUN, "reference": "none", "use_kl_in_reward": False, "max_skipped_updates": 9}


def shifted(difference, passes):
    """A trainer class whose sampler overstates its log-probs by `difference` nats, after `passes` correct rollouts."""

    class Shifted(PPOTrainer):
        rollouts = itertools.count()

        def _generate(self, prompts, sampling_params):
            samples = super()._generate(prompts, sampling_params)
            if next(self.rollouts) >= passes:
                samples["rollout_logprobs"] += difference * samples["response_mask"]
            return samples

    return Shifted


def stale(base):
    """A `base` whose sampler keeps the weights of its first rollout."""

    class Stale(base):
        first = None

        def _generate(self, prompts, sampling_params):
            policy = self.actor_critic.policy
            now = {name: value.clone() for name, value in policy.state_dict().items()}
            self.first = self.first or now
            policy.load_state_dict(self.first)
            samples = super()._generate(prompts, sampling_params)
            policy.load_state_dict(now)
            return samples

    return Stale


def still_policy():
    """A model and an optimizer that trains the critic alone, whose group comes first."""
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
    groups = [{"params": model.critic_parameters()}, {"params": model.policy_parameters(), "lr": 0.0}]
    return {"model": model, "optimizers": (torch.optim.AdamW(groups, lr=1e-3), None)}


def one_token(difference, distance):
    """Rollouts of one token whose log-probs differ so much between sampler and trainer, and policy and reference."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    logprobs = {"logprobs": zero, "rollout_logprobs": zero + difference, "ref_logprobs": zero + distance}
    return {**logprobs, "recomputed": torch.ones(1).bool(), "response_mask": torch.ones(1, 1).bool()}


def make_source(guard, folder, said, *, has_reference=True, **settings):
    """A source of its own, whose messages are added to `said`."""
    args = tiny_config(folder, **{**RUN, **settings})
    pretraining = CriticPretraining(args, on_early_end=said.append, report=said.append)
    return OldPolicySource(guard, args, pretraining, has_reference=has_reference, report=said.append)


def recomputed(folder):
    """Of each step, whether the trainer computed the old log-probs."""
    return [line["mismatch/recomputed"] for line in metric_lines(folder)]


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """Of a run in float32 whose critic has a backbone of its own."""
    return tiny_trainer(tmp_path_factory.mktemp("guard"), mismatch_action="ignore").mismatch_guard


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Metrics and weights of a run that is never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = tiny_trainer(folder, **RUN)
    trainer.train()
    return metric_lines(folder), weights(trainer)


def test_the_policys_pass_is_spared_once_two_comparisons_have_agreed_and_each_nth_step_compares_again(whole):
    lines, _ = whole
    assert [line["mismatch/recomputed"] for line in lines] == SPARED_FROM_4
    # The mismatch is measured in every step, in those without the pass by the update, and is rounding.
    assert all(0 < line["mismatch/logprob_abs_mean"] < 1e-5 for line in lines)
    assert all(line["ppo/policy/first_ratio_error_max"] < 1e-4 for line in lines)


def test_the_weights_are_those_of_recomputed_log_probs_up_to_rounding(whole, tmp_path):
    # A larger epsilon: with AdamW's own, the sign of a gradient that is all rounding moves a weight by a whole step.
    runs = {}
    for mode in ("auto", "recompute"):
        trainer = tiny_trainer(tmp_path / mode, old_policy=mode, adam_epsilon=1e-3, **RUN)
        trainer.train()
        runs[mode] = weights(trainer)
    start = weights(tiny_trainer(tmp_path / "start", **RUN))
    moved = max(float((value - start[name]).abs().max()) for name, value in runs["recompute"].items())
    apart = max(float((value - runs["auto"][name]).abs().max()) for name, value in runs["recompute"].items())
    assert moved > 1e-3 and 0 < apart < 1e-3 * moved


def test_without_a_reference_the_first_two_steps_compare(tmp_path, capsys):
    tiny_trainer(tmp_path, reference="none", use_kl_in_reward=False, **{**RUN, "total_episodes": 16}).train()
    assert recomputed(tmp_path) == [1, 1, 0, 0]
    said = [line for line in capsys.readouterr().out.splitlines() if "old_policy: auto" in line]
    assert len(said) == 1 and said[0].startswith("step 2: sampler and trainer agree") and "every 5th step" in said[0]


@pytest.mark.parametrize(
    ("settings", "honest", "found_at"),
    [
        # The first steps leave the policy as it is: a stale sampler agrees in them and in the one after them. Without a
        # reference the second needs no log-probs.
        ({"critic_pretraining_steps": 2}, [1, 0, 1, 1, 1, 0, 0], 4),
        ({"trainer_class": poisoned((0, 0), (0, 1))}, [1, 1, 1, 0, 1, 0, 0], 3),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1, "step_batch_size": 4},
            [1, 1, 1, 0, 1, 0, 0],
            3,
        ),
        ({"trainer_arguments": still_policy}, [1] * 7, None),
    ],
    ids=["critic pretraining", "skipped updates", "a learning rate of 0", "only the critic learns"],
)
def test_agreement_counts_twice_only_if_the_policy_has_moved_in_between(settings, honest, found_at, tmp_path, capsys):
    if callable(make := settings.get("trainer_arguments")):
        settings = {**settings, "trainer_arguments": make()}
    settings = {**NO_REFERENCE, **settings}
    tiny_trainer(tmp_path / "honest", **settings).train()
    assert recomputed(tmp_path / "honest") == honest
    if found_at is None:
        return
    capsys.readouterr()
    settings["trainer_class"] = stale(settings.get("trainer_class", PPOTrainer))
    with pytest.warns(UserWarning, match="sampler and trainer disagree"):
        tiny_trainer(tmp_path / "stale", mismatch_action="warn", **settings).train()
    assert recomputed(tmp_path / "stale") == [*honest[: found_at - 2], *[1] * (9 - found_at)]
    differences = [line.get("mismatch/logprob_abs_mean", 0.0) for line in metric_lines(tmp_path / "stale")]
    assert max(differences[: found_at - 1]) < 1e-5 and differences[found_at - 1] > 1e-3
    said = [line for line in capsys.readouterr().out.splitlines() if "old_policy: auto" in line]
    assert len(said) == 1 and said[0].startswith(f"step {found_at}: sampler and trainer disagree")


def test_a_sampler_whose_rounding_is_no_longer_far_below_the_kl_is_not_used_until_it_is(tmp_path, capsys):
    """Off by 0.0005 nats in step 5: below the bounds, and above a hundredth of the distance to the reference."""

    class Once(PPOTrainer):
        rollouts = itertools.count(1)

        def _generate(self, prompts, sampling_params):
            samples = super()._generate(prompts, sampling_params)
            samples["rollout_logprobs"] += 5e-4 * (next(self.rollouts) == 5)
            return samples

    run = {**RUN, "total_episodes": 36, "learning_rate": 1e-4}
    tiny_trainer(tmp_path, trainer_class=Once, **run).train()
    assert recomputed(tmp_path) == [1, 1, 1, 0, 1, 1, 1, 0, 0]
    agreed, too_close = [line for line in capsys.readouterr().out.splitlines() if "old_policy: auto" in line]
    assert agreed.startswith("step 3: sampler and trainer agree")
    assert too_close.startswith("step 5: sampler and trainer differ by 0.0005 nats per token, which is 1% or more")


@pytest.mark.filterwarnings("ignore:sampler and trainer disagree")
def test_what_changes_is_said_once_by_a_resumed_run_too(tmp_path):
    guard, said = tiny_trainer(tmp_path, **RUN).mismatch_guard, []

    def source():
        return make_source(guard, tmp_path, said)

    first = source()
    # Agreement, agreement, too close; again; and beyond the bound of 0.001.
    compared = [(1e-6, 1.0), (1e-6, 1.0), (1e-5, 1e-3)] * 2 + [(2e-3, 1.0)] + [(1e-6, 1.0)] * 3
    begins = []
    for step, (difference, distance) in enumerate(compared):
        again = source()
        again.load_state_dict(first.state_dict())
        first, before = again, len(said)
        first.check_rollouts(one_token(difference, distance), step)
        # A resumed update compares once more.
        first.check_rollouts(one_token(difference, distance), step)
        begins += [message.split(",")[0].split(" (")[0] for message in said[before:]]
        first.record_optimizer_step(step, moved_policy=True)
        first.record_optimizer_step(step, moved_policy=False)
    assert begins == [
        "step 2: sampler and trainer agree",
        "step 3: sampler and trainer differ by 1e-05 nats per token",
        "step 7: sampler and trainer disagree",
    ]
    assert "distance to its reference (0.001)" in said[1]
    assert [first.recomputes(step) for step in range(7, 12)] == [True] * 5


@pytest.mark.filterwarnings("ignore:sampler and trainer disagree")
def test_after_a_disagreement_no_agreement_is_announced(tmp_path):
    guard, said = tiny_trainer(tmp_path, **RUN).mismatch_guard, []
    source = make_source(guard, tmp_path, said)
    for step, difference in enumerate([2e-3, 1e-6, 1e-6, 1e-6]):
        source.check_rollouts(one_token(difference, 1.0), step)
        source.record_optimizer_step(step, moved_policy=True)
    assert len(said) == 1 and said[0].startswith("step 1: sampler and trainer disagree")


def test_the_distance_to_the_reference_is_the_largest_of_any_rank(tmp_path, monkeypatch):
    guard, said = tiny_trainer(tmp_path, **RUN).mismatch_guard, []
    source = make_source(guard, tmp_path, said)
    # 1e-5 is more than 1% of this rank's 9e-4, but not of another one's 1.1e-3.
    other = {"distance": 1.1e-3}
    monkeypatch.setattr(
        "alpaca_ppo.ppo.mismatch.max_over_ranks",
        lambda own, _: {name: max(own[name], other.get(name, 0)) for name in own},
    )
    for step in range(2):
        source.check_rollouts(one_token(1e-5, 9e-4), step)
        source.record_optimizer_step(step, moved_policy=True)
    assert source.state_dict()["agreed_at"] == [0, 1]


def test_an_update_that_is_resumed_does_not_count_its_own_moves(tmp_path):
    source = tiny_trainer(tmp_path, **RUN).old_policy
    source.check_rollouts(one_token(1e-6, 1.0), 0)
    source.record_optimizer_step(0, moved_policy=False)
    source.check_rollouts(one_token(1e-6, 1.0), 1)
    source.record_optimizer_step(1, moved_policy=True)
    source.check_rollouts(one_token(1e-6, 1.0), 1)
    assert source.recomputes(2)
    source.check_rollouts(one_token(1e-6, 1.0), 2)
    assert not source.recomputes(3)


def test_a_spared_step_learns_from_the_samplers_log_probs(tmp_path):
    trainer = tiny_trainer(tmp_path, **RUN)
    trainer.old_policy.load_state_dict(AGREED)
    trainer.state.global_step = 2
    batch = trainer.rollout(trainer.prompt_batches(2))
    assert torch.equal(batch["logprobs"], batch["rollout_logprobs"])
    assert "recomputed" not in batch and "entropies" not in batch and "values" in batch
    trainer.state.global_step = 1
    again = trainer.rollout(trainer.prompt_batches(1))
    assert again["recomputed"].all() and not torch.equal(again["logprobs"], again["rollout_logprobs"])


def test_first_ratio_and_mismatch_of_a_spared_step_are_those_of_the_sampler(tmp_path):
    tiny_trainer(tmp_path, trainer_class=shifted(5e-4, passes=3), **RUN).train()
    lines = metric_lines(tmp_path)
    assert recomputed(tmp_path)[3] == 0
    # Every token of step 4 is off by 0.0005: 1 - exp(-0.0005) = 0.000499875.
    assert lines[3]["mismatch/logprob_abs_mean"] == pytest.approx(5e-4, abs=5e-6)
    assert lines[3]["ppo/policy/first_ratio_error_max"] == pytest.approx(4.99875e-4, abs=5e-6)
    assert lines[2]["mismatch/logprob_abs_mean"] < 1e-5


@pytest.mark.filterwarnings("ignore:sampler and trainer disagree", "ignore:before any update")
@pytest.mark.parametrize(("passes", "step"), [(3, 4), (4, 5)])
def test_after_a_disagreement_the_rest_of_the_run_recomputes(passes, step, tmp_path, capsys):
    """Found in the update of a spared step, or in a step that compares."""
    tiny_trainer(tmp_path, trainer_class=shifted(0.01, passes), **RUN).train()
    assert recomputed(tmp_path) == [1, 1, 1, 0, 1, 1, 1]
    said = [line for line in capsys.readouterr().out.splitlines() if ": sampler and trainer disagree, mismatch" in line]
    assert len(said) == 1 and said[0].startswith(
        f"step {step}: sampler and trainer disagree, mismatch/logprob_abs_mean"
    )
    assert "is 0.01 (bound 0.001)" in said[0]


def test_a_sampler_that_disagrees_at_once_is_never_trusted_whatever_the_action(tmp_path):
    tiny_trainer(tmp_path, trainer_class=shifted(0.2, 0), mismatch_action="ignore", **RUN).train()
    assert recomputed(tmp_path) == [1] * 7


def test_a_spared_step_is_refused_before_it_moves_a_weight(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=shifted(0.2, 3), **RUN)
    with pytest.raises(SamplerMismatch, match=r"logprob_abs_mean is 0.2 \(bound 0.1\)"):
        trainer.train()
    assert len(metric_lines(tmp_path)) == 3 and trainer.updater.num_updates == 6
    # The checkpoint is from before the rollouts: with a mended sampler the run is the one that was never stopped.
    mended = tiny_trainer(tmp_path, **RUN)
    mended.train(resume_from_checkpoint=True)
    assert recomputed(tmp_path) == SPARED_FROM_4


@pytest.mark.parametrize(("step", "number"), [(1, 0), (2, None), (2, 1), (3, 0), (3, 1)])
def test_a_run_interrupted_anywhere_is_the_run_that_was_not(step, number, whole, tmp_path):
    """Before optimizer step `number` of the update in `step`, both from 0; None: before its rollouts."""
    trainer, taken = tiny_trainer(tmp_path, **RUN), 0

    def sample(prompt_batches):
        if (trainer.state.global_step, number) == (step, None):
            raise Interrupted(15)
        return rollout(prompt_batches)

    rollout, trainer.rollout = trainer.rollout, sample

    def interrupt(*inputs, **how):
        nonlocal taken
        if (trainer.state.global_step, taken % 2) == (step, number):
            raise Interrupted(15)
        taken += 1
        return plain(*inputs, **how)

    plain, trainer.updater.step = trainer.updater.step, interrupt
    with pytest.raises(Interrupted):
        trainer.train()
    resumed = tiny_trainer(tmp_path, **RUN)
    resumed.train(resume_from_checkpoint=True)
    assert metric_lines(tmp_path) == whole[0]
    assert all(torch.equal(whole[1][name], value) for name, value in weights(resumed).items())


@pytest.mark.parametrize("estimator", ["grpo", "opo", "reinforce_plus_plus"])
def test_a_constant_reward_moves_no_weight(estimator, tmp_path):
    """The KL of a policy that is its reference is exactly 0 in a recomputed step, and rounding in a sampler's."""

    def constant(prompts, completions, **columns):
        return [0.0] * len(prompts)

    settings = {**RUN, "total_episodes": 8, "rollout_batch_size": 2, "num_return_sequences": 2}
    settings |= {"adv_estimator": estimator, "trainer_arguments": {"reward_funcs": constant}}
    moved = {}
    for mode in ("auto", "rollout"):
        trainer = tiny_trainer(tmp_path / mode, old_policy=mode, **settings)
        before = weights(trainer)
        trainer.train()
        moved[mode] = any(not torch.equal(before[name], value) for name, value in weights(trainer).items())
    assert recomputed(tmp_path / "auto") == [1] * 4
    assert moved == {"auto": False, "rollout": True}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [5, 6, 7, 8]),
        ({"critic_pretraining_steps": 6}, [6, 7, 8]),
        ({"critic_layout": "shared"}, []),
        ({"old_policy": "recompute"}, []),
        ({"old_policy": "correct"}, []),
        ({"old_policy": "rollout"}, list(range(9))),
    ],
)
def test_which_steps_spare_the_pass_after_two_comparisons_have_agreed(settings, steps, tmp_path):
    trainer = tiny_trainer(tmp_path, mismatch_check_steps=5, **settings)
    trainer.old_policy.load_state_dict({**AGREED, "agreed_at": [1, 4]})
    assert [step for step in range(9) if not trainer.old_policy.recomputes(step)] == steps


@pytest.mark.parametrize(
    ("settings", "compared", "passes"),
    [
        # Steps 0 to 3 pretrain, step 2 compares. R = a pass of the policy, r = of the reference, s = the sampler's.
        ({}, (1e-6, 0.0), "RrRrRR"),
        ({"old_policy": "recompute"}, (1e-6, 0.0), "RrRrRR"),
        ({"old_policy": "correct"}, (0.05, 0.0), "RrRrRR"),
        ({}, (1e-6, 1.0), "RsRsRR"),
        # Above a hundredth of the distance; beyond the bound of 0.001; as the options ask.
        ({}, (1e-6, 5e-5), "RRRRRR"),
        ({}, (2e-3, 1.0), "RRRRRR"),
        ({"old_policy": "recompute"}, (1e-6, 1.0), "RRRRRR"),
        ({"old_policy": "rollout"}, (1e-6, 1.0), "ssssss"),
        ({"has_reference": False}, (1e-6, 0.0), "RsRsRR"),
        ({"has_reference": False, "old_policy": "recompute"}, (0.05, 0.0), "RsRsRR"),
    ],
)
@pytest.mark.filterwarnings("ignore:sampler and trainer disagree")
def test_critic_pretraining_makes_a_pass_of_the_policy_only_where_nothing_else_serves(
    settings, compared, passes, tmp_path, guard
):
    source = make_source(guard, tmp_path, [], critic_pretraining_steps=4, **{**settings, "mismatch_check_steps": 3})
    made = ""
    for step in range(6):
        rollouts = one_token(*compared)
        made += "r" if source.reads_reference(step) else "R" if source.recomputes(step) else "s"
        assert source.recomputes(step) or made[-1] == "s"
        if made[-1] == "s":
            del rollouts["recomputed"]
        source.check_rollouts(rollouts, step)
        # A step that is repeated after an interruption, by another process, makes the same passes.
        state, source = (
            source.state_dict(),
            make_source(guard, tmp_path, [], critic_pretraining_steps=4, **{**settings, "mismatch_check_steps": 3}),
        )
        source.load_state_dict(state)
        assert made[-1] == ("r" if source.reads_reference(step) else "R" if source.recomputes(step) else "s")
        if step < 4:
            assert source.check_first(rollouts, step) is None
    assert made == passes


def test_a_reference_that_no_longer_equals_the_policy_is_read_no_longer(tmp_path, guard):
    source = make_source(guard, tmp_path, [], critic_pretraining_steps=9, mismatch_check_steps=3)
    for step, distance in enumerate([0.0, 0.0, 1e-5]):
        source.check_rollouts(one_token(1e-6, distance), step)
    assert [source.reads_reference(step) for step in range(1, 6)] == [False] * 5
    assert source.recomputes(3)


def test_a_policy_with_weights_in_half_precision_recomputes(tmp_path):
    arguments = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    for dtype in (torch.float32, torch.bfloat16):
        trainer = tiny_trainer(tmp_path, dtype=dtype, trainer_arguments=arguments)
        trainer.old_policy.load_state_dict(AGREED)
        assert trainer.old_policy.recomputes(2) == (dtype == torch.bfloat16)


def test_what_a_step_itself_has_recorded_does_not_change_how_it_is_repeated(tmp_path):
    source = tiny_trainer(tmp_path, mismatch_check_steps=5).old_policy
    source.load_state_dict({**AGREED, "agreed_at": [1, 2], "disagreed_at": 3})
    assert [source.recomputes(step) for step in (1, 2, 3, 4, 5)] == [True, True, False, True, True]
