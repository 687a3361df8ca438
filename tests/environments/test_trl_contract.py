"""Classes written for TRL train here as they are (`trl_classes`). The policy is random; what it writes is read as calls
by a rule, so that the tools are really called, and the rewards are computed again from the tokens.
"""

import json
from itertools import groupby

import torch
from torch.testing import assert_close

from tests.environments import trl_classes as trl
from tests.environments.chat import chat_bytes
from tests.environments.test_games import Recorder
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_trainer

CHAT = chat_bytes()


def number(text):
    """What a turn says, from 0 to 4; None ends the episode."""
    code = sum(map(ord, text))
    return None if code % 4 == 0 else code % 5


def train(folder, environment_factory, call, **arguments):
    settings = arguments.pop("settings", {})
    given = {
        "environment_factory": environment_factory,
        "reward_funcs": None,
        "processing_class": chat_bytes(),
        "tool_call_parser": lambda text: [call(number(text))] if number(text) is not None else [],
        **arguments,
    }
    trainer = tiny_trainer(
        folder,
        model=tiny_causal_lm("llama", vocab_size=300, max_position_embeddings=2048),
        trainer_class=Recorder,
        trainer_arguments=given,
        query_len=1200,
        response_len=400,
        max_turn_tokens=4,
        max_turns=3,
        **{"total_episodes": 10, **settings},
    )
    trainer.train()
    return trainer


def conversations(trainer):
    """Of each row: the prompt's text, what each turn says, and what the tools answer."""
    rows, stop = trainer.last, set(trainer.sampling_params.stop_token_ids)
    for query, keep, response, mask in zip(
        *(rows[name].tolist() for name in ("queries", "query_attn_masks", "responses", "response_mask")), strict=True
    ):
        prompt = CHAT.decode([token for token, real in zip(query, keep, strict=True) if real])
        length = len(mask) - mask[::-1].index(True)
        said, answers = [], []
        for chosen, part in groupby(zip(response[:length], mask[:length], strict=True), key=lambda pair: pair[1]):
            ids = [token for token, _ in part]
            text = CHAT.decode(ids[:-1] if chosen and ids[-1] in stop else ids)
            if chosen:
                said.append(number(text))
            else:
                answers.append(text.split("tool\n")[1].split("<|im_end|>")[0])
        yield prompt, said, answers


def test_async_tools_exceptions_and_a_reward_function_of_the_environments(tmp_path):
    trainer = train(
        tmp_path,
        trl.Vault,
        lambda digit: {"name": "turn", "arguments": {"digit": digit}},
        train_dataset=trl.VAULTS,
        reward_funcs=trl.vault_reward,
        tools=[trl.multiply],
    )
    failures, scores = 0, []
    codes = [trl.VAULTS[i]["code"] for i in trainer.last["prompt_ids"].tolist()]
    for code, (prompt, said, answers) in zip(codes, conversations(trainer), strict=True):
        assert "Open the vault. It has 1 digit(s).<|im_end|>" in prompt
        assert all(f'"name": "{tool}"' in prompt for tool in ("multiply", "turn")) and "_secret" not in prompt
        digits = [digit for digit in said if digit is not None]
        over = digits.index(code) + 1 if code in digits else len(digits)
        failures += len(digits) - over
        expected = ["Click."] * (over - (code in digits)) + ["It opens."] * (code in digits)
        expected += ['{"error": "ValueError: Game over."}'] * (len(digits) - over)
        assert answers == expected[: len(answers)] and len(answers) == len(said) - 1
        scores.append(1.0 if code in digits else 0.1 if digits else 0.0)
    assert_close(trainer.last["scores"], torch.tensor(scores))
    assert int(trainer.last["tool_failures"].sum()) == failures > 0
    rows = map(json.loads, (tmp_path / "rollouts/step_000001.jsonl").read_text().splitlines())
    assert {turn["role"] for row in rows for turn in row.get("turns", [])} == {"policy", "tool"}
