"""Tables of rollouts and evaluations tell the results of tools from what a conversation partner says."""

import json

import pytest
from datasets import Dataset

from tests.environments.chat import chat_bytes
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_trainer


class Clerk:
    """Answers turns, and has a tool."""

    def reset(self, **row):
        return None

    def reply(self, completion):
        return "so"

    def look_up(self) -> str:
        """Looks something up."""
        return "found"

    def get_reward(self):
        return 1.0


def call_of_every_other(text):
    return [{"name": "look_up", "arguments": {}}] if sum(map(ord, text)) % 2 else []


def questions(count):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": str(i)}]} for i in range(count)])


def run(folder, **overrides):
    return tiny_trainer(
        folder,
        model=tiny_causal_lm("llama", vocab_size=300, max_position_embeddings=1024),
        trainer_arguments={
            "environment_factory": Clerk,
            "reward_funcs": None,
            "processing_class": chat_bytes(),
            "tool_call_parser": call_of_every_other,
            "train_dataset": questions(10),
            "eval_dataset": questions(3),
        },
        **{
            "query_len": 400,
            "response_len": 150,
            "max_turn_tokens": 3,
            "max_turns": 4,
            "total_episodes": 10,
            "ppo_epochs": 2,
            **overrides,
        },
    )


def tables(folder):
    return {
        name: [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("rollouts/step_000001.jsonl", "eval/step_000001.jsonl")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder, eval_steps=1).train()
    return tables(folder)


def test_turns_of_tools_and_of_a_partner_have_roles_of_their_own(whole):
    for name, rows in whole.items():
        found = set()
        for row in rows:
            roles = [turn["role"] for turn in row["turns"]]
            assert roles[::2] == ["policy"] * len(roles[::2])
            assert "".join(turn["text"] for turn in row["turns"]) == row["response"]
            for said, answer in zip(row["turns"][::2], row["turns"][1::2], strict=False):
                # What the template writes around a message names who has written it.
                calls = "<|im_start|>tool\nfound<|im_end|>" in answer["text"]
                assert calls != ("<|im_start|>user\nso<|im_end|>" in answer["text"])
                assert answer["role"] == ("tool" if calls else "environment"), said
                found.add(answer["role"])
        assert found == {"tool", "environment"}, name
