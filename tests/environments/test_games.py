"""Episodes in a trainer: their rollouts, what depends on them and what does not."""

import json
import random
import threading
import warnings

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from alpaca_ppo.ppo.metrics import mismatch_of
from tests.environments.chat import chat_bytes
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_trainer

GAME = {"response_len": 20, "query_len": 6, "max_turn_tokens": 3}


class Recorder(PPOTrainer):
    """Keeps the rollouts of its last step."""

    def step_with_rollouts(self, rollouts):
        self.last = dict(rollouts)
        return super().step_with_rollouts(rollouts)


class Partner:
    """Says two words after each of two turns; a quarter for each turn, 10 in the end and what the policy's words are
    worth.
    """

    def reset(self, **row):
        self.said = []
        return " w7"

    def reply(self, completion):
        self.said.append(completion)
        if len(self.said) == 3:
            return None, 1.0
        return f"w{10 + len(self.said)} w{20 + len(completion) % 7}", 0.25

    def get_reward(self):
        return 10.0


class Silent:
    """Never answers, and rewards nothing."""

    def reset(self, **row):
        return None


def play(folder, environment=Partner, **overrides):
    arguments = {"environment_factory": environment, "reward_funcs": None, **overrides.pop("trainer_arguments", {})}
    return tiny_trainer(folder, trainer_class=Recorder, trainer_arguments=arguments, **{**GAME, **overrides})


def test_an_episode_alternates_turns_and_holes_and_its_rewards_stand_on_the_turns_last_tokens(tmp_path):
    trainer = play(tmp_path)
    trainer.train()
    rollouts = trainer.last
    assert rollouts["num_turns"].tolist() == [3] * 10
    assert rollouts["environment_tokens"].tolist() == [4] * 10
    assert bool(rollouts["stopped"].all())
    for row in range(10):
        mask = rollouts["response_mask"][row].tolist()
        ends = [t for t in range(20) if mask[t] and (t == 19 or not mask[t + 1])]
        assert len(ends) == 3
        rewards = torch.zeros(20)
        rewards[ends] = torch.tensor([0.25, 0.25, 11.0])
        assert_close(rollouts["rewards"][row], rewards)
        # w11, then w12: the environment's first words.
        assert rollouts["responses"][row, [ends[0] + 1, ends[1] + 1]].tolist() == [11, 12]
        prompt = rollouts["queries"][row][rollouts["query_attn_masks"][row].bool()]
        assert prompt[-1] == 7
    assert rollouts["scores"].tolist() == [11.5] * 10
    line = metric_lines(tmp_path)[-1]
    assert (line["objective/turns"], line["objective/environment_tokens"], line["objective/tool_calls"]) == (3, 4, 0)
    assert line["objective/scores/Partner"] == 11.5
    row = json.loads((tmp_path / "rollouts/step_000002.jsonl").read_text().splitlines()[0])
    assert [turn["role"] for turn in row["turns"]] == ["policy", "environment"] * 2 + ["policy"]


def test_an_episode_of_too_many_turns_is_truncated(tmp_path):
    trainer = play(tmp_path, max_turns=2)
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert rollouts["num_turns"].tolist() == [2] * 10 and not rollouts["stopped"].any()


def test_a_conversation_does_not_depend_on_slots_or_on_the_speed_of_environments(tmp_path):
    class Slow(Partner):
        def reply(self, completion):
            threading.Event().wait(0.001 * (len(completion) % 5))
            return super().reply(completion)

    class Asynchronous(Partner):
        async def reply(self, completion):
            return super().reply(completion)

    few = {"total_episodes": 10, "save_steps": 0}
    runs = []
    for number, (environment, changes) in enumerate(
        [
            (Partner, {}),
            (Slow, {"rollout_per_device_batch_size": 3}),
            (Asynchronous, {"rollout_per_device_batch_size": 1}),
        ]
    ):
        trainer = play(tmp_path / str(number), environment, **few, **changes)
        trainer.train()
        runs.append(trainer.last)
    for other in runs[1:]:
        for name in ("queries", "responses", "response_mask", "rewards", "num_turns"):
            assert torch.equal(runs[0][name], other[name]), name
        assert_close(runs[0]["logprobs"], other["logprobs"], rtol=0, atol=1e-5)


def test_an_environment_that_says_nothing_changes_no_bit(tmp_path):
    samples = 2
    # In the last of four steps the sampler's log-probs serve.
    settings = {"num_return_sequences": samples, "total_episodes": 40}
    plain = tiny_trainer(tmp_path / "plain", **settings)
    silent = tiny_trainer(tmp_path / "silent", trainer_arguments={"environment_factory": Silent}, **settings)
    plain.train()
    silent.train()
    counts = ("objective/turns", "objective/environment_tokens", "objective/tool_calls")
    lines = [{k: v for k, v in line.items() if k not in counts} for line in metric_lines(tmp_path / "silent")]
    assert lines == metric_lines(tmp_path / "plain")
    last = metric_lines(tmp_path / "silent")[-1]
    assert (last["objective/turns"], last["mismatch/recomputed"]) == (1, 0)


class Seeded(Silent):
    def reset(self, seed):
        self.seed = seed
        return f"w{10 + seed % 40}"

    def get_reward(self):
        return self.seed % 7


def test_an_environment_makes_the_prompts_from_a_seed_that_all_samples_of_a_prompt_share(tmp_path):
    settings = {"num_return_sequences": 2, "total_episodes": None, "max_steps": 2}
    arguments = {"train_dataset": None}
    first = play(tmp_path / "a", Seeded, trainer_arguments=arguments, **settings)
    first.train()
    again = play(tmp_path / "b", Seeded, trainer_arguments=arguments, **settings)
    again.train()
    tasks = first.last["queries"][:, -1]
    assert torch.equal(tasks[::2], tasks[1::2])
    assert len(set(tasks.tolist())) > 3
    assert torch.equal(first.last["responses"], again.last["responses"])
    assert len(metric_lines(tmp_path / "a")) == 2


def test_reward_functions_get_the_environments_and_a_chat_as_messages(tmp_path):
    seen = {}

    def judge(completions, environments, **columns):
        seen["completions"], seen["environments"], seen["columns"] = completions, list(environments), list(columns)
        return [float(len(environment.said)) for environment in environments]

    class Chatty(Partner):
        def reset(self, **row):
            self.said = []

        def reply(self, completion):
            self.said.append(completion)
            return "go on" if len(self.said) < 3 else None

        get_reward = None

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}], "extra": i} for i in range(10)])
    trainer = tiny_trainer(
        tmp_path,
        model=tiny_causal_lm("llama", vocab_size=300),
        trainer_class=Recorder,
        trainer_arguments={
            "environment_factory": Chatty,
            "reward_funcs": judge,
            "train_dataset": data,
            "processing_class": chat_bytes(),
        },
        **{**GAME, "query_len": 60, "response_len": 200, "total_episodes": 10},
    )
    trainer.train()
    assert [m["role"] for m in seen["completions"][0]] == ["assistant", "user"] * 2 + ["assistant"]
    assert seen["completions"][0][1]["content"] == "go on"
    assert type(seen["environments"][0]) is Chatty
    assert seen["environments"][0].said == [m["content"] for m in seen["completions"][0][::2]]
    assert "extra" in seen["columns"]
    assert trainer.last["scores"].tolist() == [3.0] * 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation_backend": "generate"}, "over several turns: generation_backend 'generate'"),
        ({"model": tiny_causal_lm("bloom")}, "over several turns: "),
    ],
)
def test_a_sampler_of_one_turn_is_refused_at_the_start_where_environments_answer(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        play(tmp_path, **changes)


def test_an_environment_that_only_makes_prompts_needs_no_slots(tmp_path):
    class Prompts(Silent):
        def reset(self, seed, prompt):
            return f"w{10 + seed % 40}"

        def get_reward(self):
            return 1.0

    settings = {"num_return_sequences": 2, "total_episodes": 10, "max_turn_tokens": None}
    runs = []
    for backend in ("slots", "generate"):
        trainer = play(tmp_path / backend, Prompts, generation_backend=backend, **settings)
        trainer.train()
        runs.append(trainer.last["responses"])
    assert torch.equal(*runs)


def test_of_a_reply_longer_than_a_response_little_is_tokenized(tmp_path):
    tokenizer, sizes = tiny_tokenizer(), []

    class Counting(type(tokenizer)):
        def __call__(self, text, **keywords):
            sizes.append(len(text))
            return super().__call__(text, **keywords)

    class Talks(Silent):
        def reply(self, completion):
            return "w11 " * 100_000

    tokenizer.__class__ = Counting
    trainer = play(tmp_path, Talks, trainer_arguments={"processing_class": tokenizer, "reward_funcs": count_even})
    trainer.rollout(trainer.prompt_batches(0))
    assert 100 < max(sizes) < 10_000


def test_an_opponent_that_answers_once_is_refused(tmp_path):
    with pytest.raises(ValueError, match="eval_opponent is 'reference', but conversations have several turns"):
        play(tmp_path, eval_opponent="reference", trainer_arguments={"eval_dataset": prompts(2)})


def test_without_environments_their_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="max_turns is .*, without effect: needs environments or tools"):
        tiny_trainer(tmp_path, max_turns=3)


def test_every_evaluation_has_the_same_tasks(tmp_path):
    class Draws(Silent):
        tasks = []

        def reset(self, **row):
            self.tasks.append(random.random())

    trainer = play(
        tmp_path, Draws, trainer_arguments={"eval_dataset": prompts(4), "reward_funcs": count_even}, total_episodes=10
    )
    trainer.evaluate()
    random.random()
    state = random.getstate()
    trainer.evaluate()
    assert random.getstate() == state
    assert len(set(Draws.tasks)) == 4 and Draws.tasks[:4] == Draws.tasks[4:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": None}, "PPOTrainer takes a PPOConfig"),
        ({"train_dataset": None, "environment_factory": None}, "train_dataset is None; pass prompts, or an env"),
        ({"reward_funcs": None, "environment_factory": Silent}, "there is no reward: pass reward_funcs"),
        ({"environment_factory": {"a": Partner}}, "row 0: a row's column environment is None; write"),
    ],
)
def test_what_a_trainer_lacks_is_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, trainer_arguments=arguments, **GAME if arguments.get("reward_funcs", 1) else {})


def test_when_an_answer_came_decides_nothing(tmp_path):
    trainer = play(tmp_path)
    rollouts, found = trainer.rollout(trainer.prompt_batches(0)), []
    # Rounding of the sampler, on either side of the bound that ends a run, 0.1 nats.
    for error in (4e-6, -4e-6):
        rollouts["rollout_logprobs"] = rollouts["logprobs"] + 0.1 + error
        with warnings.catch_warnings():
            # It is warned of, once.
            warnings.simplefilter("ignore")
            trainer.sampler_check.check_rollouts(rollouts)
        found.append(
            (mismatch_of(rollouts), mismatch_of({k: v for k, v in rollouts.items() if k != "environment_tokens"}))
        )
    (answered, other), (again, different) = found
    assert answered == again == {"mismatch/logprob_abs_mean": 0.1, "mismatch/k3": 0.00517, "mismatch/ratio_max": 0.9}
    assert all(other[name] != different[name] for name in other)
