"""`_generate` and `_score`: what a subclass may bring, what it must return, and where its tokens and scores end up."""

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.hook_checks import check_scores, complete_samples
from tests.tiny_runs import tiny_trainer, weights


def holed(trainer_class=PPOTrainer, score=None):
    """A trainer class whose responses have a hole: the second token is another's."""

    class Holed(trainer_class):
        def _generate(self, prompts, sampling_params):
            samples = super()._generate(prompts, sampling_params)
            mask = samples["response_mask"]
            mask[:, 1] &= ~mask[:, 2]
            samples["rollout_logprobs"] = torch.where(mask, samples["rollout_logprobs"], 0)
            return samples

    return Holed


def positions(prompts, completions, completion_ids, **columns):
    """Scores each token by its place among the chosen ones, from 1."""
    return [[float(i + 1) for i in range(len(ids))] for ids in completion_ids]


def test_token_rewards_stand_in_the_columns_of_their_tokens_beyond_a_hole(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=holed(), trainer_arguments={"reward_funcs": positions})
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    mask = rollouts["response_mask"]
    with_hole = mask[:, 2]
    assert with_hole.sum() >= 3
    assert (rollouts["rewards"][with_hole][:, :3] == torch.tensor([1.0, 0.0, 2.0])).all()
    assert_close(rollouts["rewards"], torch.where(mask, mask.cumsum(dim=1), 0).float())
    trainer.train()


def test_a_sample_may_have_a_prompt_of_its_own_and_further_tensors_of_a_row(tmp_path):
    class Renamed(PPOTrainer):
        def _generate(self, prompts, sampling_params):
            samples = super()._generate(prompts, sampling_params)
            samples["queries"] = torch.where(samples["query_attn_masks"] > 0, 7, samples["queries"])
            return {**samples, "turns": torch.ones(len(samples["queries"]))}

        def _score(self, samples, rows):
            assert samples["turns"].shape == (len(rows),)
            return super()._score(samples, rows)

    trainer = tiny_trainer(tmp_path, trainer_class=Renamed, mismatch_action="ignore")
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert set(rollouts["queries"][rollouts["query_attn_masks"] > 0].tolist()) == {7}
    # The trainer's own pass reads the new prompts: the sampler's log-probs were of the old ones.
    assert not torch.allclose(rollouts["logprobs"], rollouts["rollout_logprobs"], atol=1e-3)
    assert "turns" in rollouts


def test_scores_come_in_one_call_that_keeps_a_prompt_s_samples_together(tmp_path):
    calls = []

    class Seen(PPOTrainer):
        def _score(self, samples, rows):
            calls.append(samples["prompt_ids"].tolist())
            assert [row["prompt"] for row in rows][::2] == [row["prompt"] for row in rows][1::2]
            return super()._score(samples, rows)

    trainer = tiny_trainer(tmp_path, trainer_class=Seen, num_return_sequences=2)
    trainer.rollout(trainer.prompt_batches(0))
    assert [len(ids) for ids in calls] == [20] and calls[0][::2] == calls[0][1::2]


def test_the_random_keys_are_those_that_the_package_s_sampler_draws_with(tmp_path):
    seen = {}

    class Watching(PPOTrainer):
        def _generate(self, prompts, sampling_params):
            seen["keys"] = sampling_params.random_keys(prompts["prompt_ids"])
            seen["samples"] = super()._generate(prompts, sampling_params)
            return seen["samples"]

    trainer = tiny_trainer(tmp_path, trainer_class=Watching, num_return_sequences=2, response_len=1)
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    levels = uniforms(seen["keys"], 0)
    assert levels.shape == (20,) and levels.unique().numel() == 20
    # The level of the uniform distribution falls into the chosen token's share of the cumulative distribution.
    model = trainer.actor_critic.policy.model
    with torch.no_grad():
        logits = model(rollouts["queries"], attention_mask=rollouts["query_attn_masks"]).logits[:, -1].double()
    cumulative = logits.softmax(dim=1).cumsum(dim=1)
    chosen = rollouts["responses"]
    upper = cumulative.gather(1, chosen).squeeze(1)
    lower = torch.where(chosen.squeeze(1) > 0, cumulative.gather(1, (chosen - 1).clamp_min(0)).squeeze(1), 0)
    assert bool(((levels > lower - 1e-6) & (levels < upper + 1e-6)).all())


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Prompts, sampling parameters and samples of one rollout of two prompts with two samples."""
    seen = {}

    class Watching(PPOTrainer):
        def _generate(self, prompts, sampling_params):
            seen.update(prompts=prompts, sampling_params=sampling_params)
            seen["samples"] = super()._generate(prompts, sampling_params)
            return seen["samples"]

    trainer = tiny_trainer(tmp_path_factory.mktemp("run"), trainer_class=Watching, num_return_sequences=2)
    trainer.rollout(trainer.collector.collate(trainer.train_prompts, [0, 1]))
    return seen


def drop(key):
    return lambda samples: {name: value for name, value in samples.items() if name != key}


def put(key, change):
    return lambda samples: {**samples, key: change(samples[key].clone())}


def emptied(mask):
    mask[2] = False
    return mask


def infinite(logprobs):
    logprobs[1, 0] = -torch.inf
    return logprobs


def right_padded(masks):
    masks[1] = torch.tensor([1, 0, 0, 0])
    return masks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda samples: [], r"_generate\(\) returned a list; it must return a dict with responses, "),
        (drop("stopped"), r"_generate\(\) returned a dict without stopped"),
        (put("responses", lambda t: t[:, :2]), r"responses of shape \(4, 2\).* \(4, 5\)"),
        (put("queries", lambda t: t[:3]), r"queries of shape \(3, 4\)"),
        (put("response_mask", lambda t: t.long()), "response_mask as torch.int64; it must be torch.bool"),
        (put("responses", lambda t: t.float()), "responses as torch.float32; it must be torch.int64"),
        (put("stopped", lambda t: t.long()), "stopped as torch.int64; it must be torch.bool"),
        (put("response_mask", emptied), "response_mask without a chosen token in row 2"),
        (put("query_attn_masks", right_padded), "query_attn_masks in row 1.*left-padded"),
        (put("rollout_logprobs", infinite), "non-finite rollout_logprobs"),
    ],
)
def test_what_generate_must_return(change, message, sampled):
    with pytest.raises((ValueError, FloatingPointError), match=message):
        complete_samples(change(sampled["samples"]), sampled["prompts"], sampled["sampling_params"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scores: None, r"_score\(\) returned a NoneType; it must return a dict with scores, "),
        (drop("rewards"), r"_score\(\) returned a dict without rewards"),
        (put("scores", lambda t: t[:1]), r"scores of shape \(1,\).* \(4,\)"),
        (put("rewards", lambda t: torch.zeros(4, 2)), r"rewards of shape \(4, 2\).* \(4, 5\)"),
        (put("scores_by_source", lambda t: t[:3]), r"scores_by_source of shape \(3, 1\)"),
        (put("scores_by_source", lambda t: t[:, 0]), r"scores_by_source of shape \(4,\).* \(4, 1\)"),
        (lambda scores: {**scores, "responses": torch.zeros(4, 5)}, r"_score\(\) returned responses, which _generate"),
    ],
)
def test_what_score_must_return(change, message, sampled):
    scores = {"scores": torch.zeros(4), "rewards": torch.zeros(4), "scores_by_source": torch.zeros(4, 1)}
    assert check_scores(scores, sampled["samples"], num_sources=1) == scores
    with pytest.raises(ValueError, match=message):
        check_scores(change(scores), sampled["samples"], num_sources=1)


def test_token_rewards_outside_the_mask_do_not_count(sampled):
    scores = {"scores": torch.zeros(4), "rewards": torch.ones(4, 5), "scores_by_source": torch.zeros(4, 1)}
    checked = check_scores(scores, sampled["samples"], num_sources=1)
    assert torch.equal(checked["rewards"], sampled["samples"]["response_mask"].float())


def test_a_reward_function_that_leaves_gradients_off_changes_no_update(tmp_path):
    def even(completion_ids, **columns):
        return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]

    def careless(completion_ids, **columns):
        torch.set_grad_enabled(False)
        return even(completion_ids)

    trained = []
    for reward in (even, careless):
        # Its end puts the mode back.
        with torch.enable_grad():
            trainer = tiny_trainer(tmp_path / reward.__name__, trainer_arguments={"reward_funcs": reward})
            trainer.train()
        trained.append(weights(trainer))
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
