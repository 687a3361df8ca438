"""Pass rates and what they do to the order of prompts, by hand; and in a run that is resumed."""

import math

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.functional.rng import seeded_generator, seeded_permutation
from alpaca_ppo.ppo.curriculum import PassRates, learnable_weights
from alpaca_ppo.ppo.metrics import RolloutCounts
from tests.tiny_runs import metric_lines, prompts, tiny_config, tiny_trainer, weights

RUN = {"curriculum": True, "curriculum_threshold": 2.5, "rollout_batch_size": 4, "total_episodes": 12}
NAN = math.nan


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    return tiny_config(tmp_path_factory.mktemp("args"), **RUN)


def rollouts_of(*pairs):
    ids, scores = zip(*pairs, strict=True)
    return {"prompt_ids": torch.tensor(ids), "scores": torch.tensor(scores)}


def test_a_rate_is_the_mean_of_the_last_visit_and_the_rate_before(args):
    rates = PassRates(4, args)
    # Above 2.5 passes; 2.5 does not. Prompt 2 was sampled in two rounds and replaced in one of them.
    discarded = RolloutCounts(discarded_prompts=[2, 2, 3], discarded_scores=[0.0, 1.0, 9.0])
    rates.record(rollouts_of((0, 3.0), (0, 2.5), (2, 3.0), (2, 4.0)), discarded)
    assert_close(rates.rates, torch.tensor([0.5, NAN, 0.5, 1.0], dtype=torch.float64), equal_nan=True)
    rates.record(rollouts_of((0, 3.0), (0, 3.0), (1, 0.0), (3, 0.0)), RolloutCounts())
    assert rates.rates.tolist() == [0.75, 0.0, 0.5, 0.5]


def test_prompts_of_a_middle_rate_weigh_most_and_none_nothing(args):
    found = learnable_weights(torch.tensor([0.0, 0.25, 0.5, 1.0, NAN]))
    assert found.tolist() == [0.0, 0.75, 1.0, 0.0, 1.0]
    rates = PassRates(5, args)
    assert rates.chances(5 * found).tolist() == [0.01, 0.75, 1.0, 0.01, 1.0]
    # One response to each prompt has passed or has not.
    assert rates.chances(learnable_weights(torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]))).tolist() == [1.0] * 5


@pytest.mark.parametrize("bad", [torch.ones(4), [1, 1, 1, 1, NAN], [1, 1, 1, 1, -1]])
def test_weights_that_are_none_are_refused(args, bad):
    with pytest.raises(ValueError, match=r"_prompt_weights\(\) returned .* shape \(5,\), one finite weight"):
        PassRates(5, args).chances(bad)


def test_rates_are_restored_unless_they_are_of_other_prompts(args):
    rates, same, other = PassRates(2, args), PassRates(2, args), PassRates(3, args)
    rates.record(rollouts_of((1, 3.0)), RolloutCounts())
    same.load_state_dict(rates.state_dict())
    other.load_state_dict(rates.state_dict())
    assert same.rates[1] == 1.0 and bool(same.rates[0].isnan()) and bool(other.rates.isnan().all())


def test_each_place_of_the_sequence_is_taken_with_the_chance_of_its_prompt():
    schedule = PromptSchedule(6, 2, seed=3, total_epochs=2)
    chances = torch.tensor([1.0, 0.5, 0.01, 1.0, 0.2, 0.7], dtype=torch.float64)
    taken = []
    for epoch in range(9):
        levels = torch.rand(6, generator=seeded_generator(3, epoch, 0, 0, 0), dtype=torch.float64).tolist()
        order = seeded_permutation(6, 3, epoch).tolist()
        taken += [(6 * epoch + i, p) for i, p in enumerate(order) if levels[i] < chances[p]]
    # Two at a time, so that no prompt comes twice; the place after the last one begins the next.
    place = 4
    for _ in range(4):
        rest = [(at, prompt) for at, prompt in taken if at >= place]
        first = rest[0][1]
        second = next((at, prompt) for at, prompt in rest[1:] if prompt != first)
        assert schedule.draw(place, 2, chances=chances) == ([first, second[1]], second[0] + 1)
        place = second[0] + 1
    # A step draws its own prompts and further ones in this way.
    step = schedule.prompts_of(2, 0, chances)
    assert (step.indices, 4 + 2 + step.extra_prompts) == schedule.draw(4, 2, chances=chances)
    fresh = schedule.draw(6 + step.extra_prompts, 3, chances=chances, without=step.indices)
    assert (step.draw(3, without=step.indices), 6 + step.extra_prompts) == fresh
    # Rare ones come too, if nothing else is left.
    assert schedule.draw(0, 1, without={0, 1, 3, 4, 5}, chances=chances)[0] == [2]


class Preferring(PPOTrainer):
    """Once a prompt has been sampled, takes those below 6 alone, but for one in a hundred of the others."""

    def _prompt_weights(self, pass_rates):
        wanted = torch.arange(len(pass_rates)) < 6
        return torch.ones(len(pass_rates)) if bool(pass_rates.isnan().all()) else wanted.double()

    def _generate(self, prompts, sampling_params):
        self.sampled = {**vars(self).get("sampled", {}), sampling_params.step: prompts["prompt_ids"].tolist()}
        return super()._generate(prompts, sampling_params)


def test_an_overridden_curriculum_chooses_the_prompts_of_a_run_and_of_one_that_is_resumed(tmp_path):
    few = {"train_dataset": prompts(12)}
    whole, parts, resumed = (
        tiny_trainer(tmp_path / name, trainer_class=Preferring, trainer_arguments=few, **RUN, save_steps=1)
        for name in ("whole", "parts", "parts")
    )
    whole.train()
    # Three steps of 4 of the 12 prompts, the first as without a curriculum.
    assert whole.sampled[0] == whole.schedule.indices(0)
    later = whole.sampled[1] + whole.sampled[2]
    assert len(later) == 8 and sum(prompt < 6 for prompt in later) >= 7
    rates = whole.pass_rates.rates
    assert (~rates.isnan()).nonzero().flatten().tolist() == sorted({*whole.sampled[0], *later})
    lines = metric_lines(tmp_path / "whole")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert sum(line["objective/extra_prompts"] for line in lines) == whole.progress.extra_prompts(3) > 2
    parts._begin(None)
    for step in range(2):
        parts._end_step(parts.step(parts.prompt_batches(step)))
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts/checkpoint-2"))
    assert resumed.sampled[2] == whole.sampled[2] and metric_lines(tmp_path / "parts") == lines
    assert_close(resumed.pass_rates.rates, rates, rtol=0, atol=0, equal_nan=True)
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name
