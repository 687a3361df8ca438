"""The programs of docs/environments.md run as they stand, from top to bottom; the first one learns its game."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset

import alpaca_ppo
from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.cli.train import run_training
from alpaca_ppo.environments.kinds import make_kinds
from tests.docs.markdown import all_blocks
from tests.docs.test_python_blocks import programs, run_blocks
from tests.environments.chat import chat_bytes
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines

STEPS = {"outputs/echo": 12, "outputs/dice": 2}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the programs define, after a few steps on the CPU."""

    def config(**given):
        given["max_steps"] = STEPS[given["output_dir"]]
        return PPOConfig(**given, use_cpu=True, bf16=False, report_to=["none"], report=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("environments"))
        patch.setattr(alpaca_ppo, "PPOConfig", config)
        torch.manual_seed(0)
        yield run_blocks(programs("docs/environments.md"))


def test_the_partner_is_learned(names):
    lines = metric_lines("outputs/echo")
    scores = [line["objective/scores/Echo"] for line in lines]
    assert scores[0] < 1.6 and scores[-1] > 2.2
    assert (lines[-1]["objective/turns"], lines[-1]["objective/environment_tokens"]) == (5.0, 4.0)


def test_the_tool_is_called(names):
    lines = metric_lines("outputs/dice")
    assert lines[0]["objective/tool_calls"] > 0 and lines[0]["objective/tool_failure_rate"] == 0.0
    # With the prompt, the policy reads which tool there is.
    trainer = names["trainer"]
    assert trainer.processing_class.decode(trainer.environments.settings.conversation.prompt_ids(
        [{"role": "user", "content": ""}], [tool.schema for tool in trainer.environments.kinds[None].tools]
    )).split() == "system roll <end> user <end> assistant".split()  # fmt: skip


def test_the_other_programs_fit_the_contract(names):
    kinds = make_kinds([names["multiply"]], names["factories"])
    assert [tool.name for tool in kinds["dice"].tools] == ["multiply", "roll"]
    assert kinds["echo"].has_reply and set(names["rows"]["environment"]) == set(kinds)
    assert make_kinds(None, names["Remote"])[None].resets_together
    dice = names["Dice"]()
    dice.total = 8
    assert names["high_total"]([dice, names["Echo"]()]) == [1.0, None]
    assert names["thrift"]([], [[1, 2]]) == [-0.02]
    assert callable(names["make_game"]) and callable(names["make_session"])
    assert isinstance(names["trainer"], PPOTrainer) and Path("outputs/dice/final/policy").is_dir()


def test_the_program_of_the_command_line_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = [block for block in programs("docs/environments.md") if block.file_name]
    (options,) = [block for block in all_blocks("yaml") if block.page == "docs/environments.md"]
    Path("my_shop.py").write_text(program.text)
    Dataset.from_list([{"item": item, "price": len(item)} for item in ("tea", "milk")]).to_json("prices.jsonl")
    tiny_causal_lm("llama", vocab_size=300, max_position_embeddings=2048).save_pretrained("model")
    chat_bytes().save_pretrained("model")
    changes = {"model_name_or_path": "model", "output_dir": "out", "query_len": 1000, "response_len": 8}
    changes |= {"rollout_batch_size": 4, "step_batch_size": 4, "max_steps": 1, "use_cpu": True, "report_to": "none"}
    changes |= {"num_inspected_prompts": 0, "report": False, "save_steps": 0, "total_episodes": None}
    Path("run.yaml").write_text(yaml.safe_dump(yaml.safe_load(options.text) | changes))
    run_training(["--config", "run.yaml"])
    assert "objective/scores" in metric_lines("out")[0] and metric_lines("out")[0]["objective/turns"] >= 1
    row = (Path("out/rollouts/step_000001.jsonl")).read_text()
    assert "What does tea cost?" in row and "look_up" in row
    names = run_blocks([replace(program, text="\n" + program.text)])
    shop = names["Shop"]()
    assert shop.reset(item="tea", price=3) == "What does tea cost?"
    assert shop.look_up("tea") == "3 euros"
    with pytest.raises(ValueError, match="there is no 'milk'"):
        shop.look_up("milk")
    said = [[{"role": "assistant", "content": "3 euros"}], [{"role": "assistant", "content": "4"}]]
    assert names["right_price"](said, [3, 3], [shop, shop]) == [0.8, -0.2]
