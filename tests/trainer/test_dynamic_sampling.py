"""`dynamic_sampling` in a whole run: prompts whose responses all score the same give their places to fresh ones."""

import itertools
import os
import signal

import pytest
import torch

from alpaca_ppo import PPOTrainer
from alpaca_ppo.distributed.preemption import Interrupted
from alpaca_ppo.functional.rng import seeded_permutation
from tests.tiny_runs import count_even, metric_lines, tiny_trainer, weights, with_advantages

PAIRS = {
    "dynamic_sampling": 2,
    "num_return_sequences": 2,
    "adv_estimator": "grpo",
    "rollout_batch_size": 6,
    "total_episodes": 18,
    # Responses of all lengths, so that penalties differ where scores do not.
    "overlong_buffer_len": 4,
    "truncate_tokens": list(range(10, 26)),
}


def first_is_even(completion_ids, **columns):
    """1 for an even first token: half of all pairs score the same."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


class Recording(PPOTrainer):
    """Keeps what each call of `_generate` was given and what it scored, and is overridden where a user's may be."""

    def __init__(self, *args, **settings):
        self.calls = []
        super().__init__(*args, **settings)

    def rollout(self, prompt_batches):
        rollouts = super().rollout(prompt_batches)
        rollouts["doubled"] = rollouts["scores"] * 2
        prompts = rollouts["prompt_ids"].tolist()[::2]
        differ = rollouts["scores"][::2] != rollouts["scores"][1::2]
        self.calls[-1] |= {"prompts": prompts, "differ": differ.tolist(), "tokens": rollouts["response_mask"].sum()}
        return rollouts

    def _generate(self, prompts, sampling_params):
        samples = super()._generate(prompts, sampling_params)
        self.calls.append({"step": sampling_params.step, "round": sampling_params.sampling_round})
        self.calls[-1]["responses"] = samples["responses"].clone()
        return samples

    def _estimate_advantage(self, rewards, values, response_mask, **extra):
        self.calls[-1]["batch"] = extra["prompt_ids"].tolist()[::2]
        return super()._estimate_advantage(rewards, values, response_mask, **extra)


def trainer_of(folder, trainer_class=PPOTrainer, **overrides):
    settings = {"trainer_arguments": {"reward_funcs": first_is_even}, **PAIRS, **overrides}
    return tiny_trainer(folder, trainer_class=trainer_class, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps of six prompts that nothing interrupts, and its folder."""
    folder = tmp_path_factory.mktemp("dynamic") / "whole"
    trainer = trainer_of(folder, Recording)
    trainer.train()
    return trainer, folder


def test_prompts_whose_raw_scores_are_equal_give_their_places_to_the_next_ones(whole):
    trainer, folder = whole
    # All permutations of the forty prompts one after the other. No prompt comes twice in these 3 * 6 + 2 * 18 at most.
    sequence = itertools.chain(*(seeded_permutation(40, trainer.args.seed, epoch).tolist() for epoch in range(3)))
    seen = 0
    for step, line in enumerate(metric_lines(folder)):
        calls = [call for call in trainer.calls if call["step"] == step]
        assert [call["round"] for call in calls] == list(range(len(calls)))
        batch = {place: next(sequence) for place in range(6)}
        assert calls[0]["prompts"] == list(batch.values())
        informative = dict(enumerate(calls[0]["differ"]))
        for call in calls[1:]:
            places = [place for place in range(6) if not informative[place]]
            batch |= {place: next(sequence) for place in places}
            assert call["prompts"] == [batch[place] for place in places]
            informative |= dict(zip(places, call["differ"], strict=True))
        assert len(calls) == 3 or all(informative.values())
        assert calls[-1]["batch"] == list(batch.values())
        drawn = sum(len(call["prompts"]) for call in calls)
        seen += drawn
        assert line["objective/sampling_rounds"] == len(calls) - 1
        assert line["objective/redrawn_prompts"] == drawn - 6
        assert line["objective/extra_prompts"] == drawn - 6
        assert line["objective/uninformative_prompts"] == 6 - sum(informative.values())
        assert line["tokens/sampled"] + line["tokens/discarded"] == sum(int(call["tokens"]) for call in calls)
        # Two responses to each of six prompts, in step batches of 4.
        assert line["ppo/policy/optimizer_steps"] == 3
    assert seen > 24 and trainer.progress.extra_prompts(3) == seen - 18
    assert trainer.state.epoch == 18 / 40


def test_what_a_subclass_adds_to_the_rollouts_follows_its_rows(whole, tmp_path):
    trainer = trainer_of(tmp_path, Recording)
    rollouts = with_advantages(trainer, trainer.prompt_batches(0))
    assert torch.equal(rollouts["doubled"], rollouts["scores"] * 2)
    assert rollouts["sample_ids"].tolist() == [0, 1] * 6
    rows = [call["responses"] for call in trainer.calls]
    for prompt, responses in zip(rollouts["prompt_ids"][::2].tolist(), rollouts["responses"].split(2), strict=True):
        last = max(i for i, call in enumerate(trainer.calls) if prompt in call["prompts"])
        place = trainer.calls[last]["prompts"].index(prompt)
        assert torch.equal(responses, rows[last][2 * place : 2 * place + 2])
    # A prompt that is drawn in another round gets other responses, and in the same one the same.
    fresh = [trainer.collector.collate(trainer.train_prompts, [7], sampling_round=number) for number in (1, 1, 2)]
    again = [trainer.rollout(batches)["responses"] for batches in fresh]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])
    # The trainer's own parameters are those of the first round.
    assert trainer.sampling_params.sampling_round == 0 and whole[0].sampling_params.sampling_round == 0


def test_a_run_that_is_interrupted_while_it_draws_is_the_run_that_never_was(whole, tmp_path):
    trainer = trainer_of(tmp_path, Recording)
    generate = trainer._generate

    def stopping_generate(prompts, sampling_params):
        if sampling_params.step == 1 and sampling_params.sampling_round == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(prompts, sampling_params)

    trainer._generate = stopping_generate
    with pytest.raises(Interrupted):
        trainer.train()
    assert len(metric_lines(tmp_path)) == 1
    resumed = trainer_of(tmp_path, Recording)
    resumed.train(resume_from_checkpoint=True)
    # A redraw is begun anew with the step.
    assert [call["step"] for call in resumed.calls][0] == 1
    assert metric_lines(tmp_path) == metric_lines(whole[1])
    for name, value in weights(whole[0]).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_training_loop_of_ones_own_goes_on_where_the_last_step_stopped(whole, tmp_path):
    trainer = trainer_of(tmp_path, Recording)
    for step in range(2):
        trainer.step(trainer.prompt_batches(step))
    expected = [call["prompts"] for call in whole[0].calls if call["step"] < 2]
    assert [call["prompts"] for call in trainer.calls] == expected
    assert trainer.progress.state_dict()["extra_prompts"] == sum(map(len, expected)) - 12


def test_fresh_prompts_whose_rewards_all_fail_replace_nothing(tmp_path):
    """All responses score 0; in the rounds after the first, every second one fails, which leaves the others alone."""

    class Failing(PPOTrainer):
        def _generate(self, prompts, sampling_params):
            self.redraws = sampling_params.sampling_round > 0
            return super()._generate(prompts, sampling_params)

    def judge(completions, **columns):
        if trainer.redraws and len(completions) > 1:
            raise TimeoutError
        return [0.0] * len(completions) if not trainer.redraws else [next(answers)]

    answers = itertools.cycle([0.0, None])
    trainer = trainer_of(tmp_path, Failing, failed_rewards="mask", trainer_arguments={"reward_funcs": judge})
    rollouts = with_advantages(trainer, trainer.prompt_batches(0))
    assert rollouts["prompt_ids"].tolist()[::2] == trainer.schedule.prompts_of(0).indices
    assert rollouts["scores"].tolist() == [0.0] * 12
    counts = trainer.step_record.redraw_stats
    assert counts["objective/sampling_rounds"] == 2 and counts["objective/redrawn_prompts"] == 12
    assert counts["objective/uninformative_prompts"] == 6 and counts["tokens/discarded"] == 0
    assert counts["objective/extra_prompts"] == 12 and rollouts["trained_rows"].all()


def test_without_it_nothing_is_counted(tmp_path):
    trainer = tiny_trainer(tmp_path, total_episodes=10, trainer_arguments={"reward_funcs": count_even})
    trainer.train()
    assert not {"objective/sampling_rounds", "tokens/discarded"} & metric_lines(tmp_path)[0].keys()
    assert trainer.progress.extra_prompts(1) == 0
