"""One rank's rollout: what the reward sources see, and that chunking changes nothing."""

import torch

from tests.tiny_runs import prompts, tiny_trainer


def rollouts_of(tmp_path, name, **overrides):
    trainer = tiny_trainer(tmp_path / name, **overrides)
    return trainer.rollout(trainer.prompt_batches(0))


def test_samples_of_a_prompt_are_neighbours_and_differ(tmp_path):
    rollouts = rollouts_of(tmp_path, "a", num_return_sequences=3)
    assert rollouts["sample_ids"].tolist() == [0, 1, 2] * 10
    assert rollouts["prompt_ids"].view(10, 3).unique(dim=1).size(1) == 1
    assert len({tuple(row.tolist()) for row in rollouts["responses"]}) > 20


def test_everything_is_zero_outside_the_response_mask(tmp_path):
    rollouts = rollouts_of(tmp_path, "a")
    outside = ~rollouts["response_mask"]
    assert outside.any()
    for key in ("logprobs", "ref_logprobs", "rollout_logprobs", "entropies", "ref_entropies", "values"):
        assert bool((rollouts[key][outside] == 0).all()), key
        assert rollouts[key].dtype == torch.float32


def test_reward_functions_get_text_without_special_tokens_and_every_column(tmp_path):
    seen = {}

    def spy(prompts, completions, completion_ids, topic, **columns):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, topic=topic)
        return [0.0] * len(prompts)

    dataset = prompts().add_column("topic", list(range(40)))
    trainer = tiny_trainer(tmp_path, trainer_arguments={"reward_funcs": spy, "train_dataset": dataset})
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert seen["topic"] == rollouts["prompt_ids"].tolist()
    assert [len(ids) for ids in seen["completion_ids"]] == rollouts["response_mask"].sum(1).tolist()
    assert seen["prompts"] == [dataset[i]["prompt"] for i in seen["topic"]]
    assert not any("<eos>" in text for text in seen["completions"])
