"""Every command that a page shows would start: its program exists and takes its flags with their values. Nothing is
started.
"""

import configparser
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from transformers import TrainingArguments

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.cli.commands import COMMANDS
from alpaca_ppo.cli.evaluate import EvaluateArguments
from alpaca_ppo.cli.launch import split_flags
from alpaca_ppo.config.script_arguments import SupervisedLoraArguments
from alpaca_ppo.config.supervised_arguments import RewardModelArguments, SFTArguments
from alpaca_ppo.estimate_memory.estimator import EstimateArguments
from tests.docs.conftest import RUN
from tests.docs.markdown import ROOT, all_blocks

ARGUMENTS: dict[str, list[type]] = {
    "examples/train_ppo.py": [ScriptArguments, LoraArguments, PPOConfig],
    "examples/train_sft.py": [SFTArguments, TrainingArguments],
    "examples/train_reward_model.py": [RewardModelArguments, SupervisedLoraArguments, TrainingArguments],
    "alpaca_ppo.cli.evaluate": [EvaluateArguments, LoraArguments, PPOConfig],
    "alpaca_ppo.estimate_memory": [EstimateArguments, LoraArguments, PPOConfig],
}
"""What each program parses."""
OWN = {
    "train": "examples/train_ppo.py",
    "sft": "examples/train_sft.py",
    "reward": "examples/train_reward_model.py",
    "estimate-memory": "alpaca_ppo.estimate_memory",
    "evaluate": "alpaca_ppo.cli.evaluate",
}
"""Subcommands of alpaca-ppo that parse what a script parses."""
NODE_SCRIPTS = ("examples/multi_node/launch.sh", "examples/multi_node/slurm.sh")
"""Scripts that hand everything behind their name to train_ppo.py."""


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block, without comments."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def complaints(words: list[str]) -> list[str]:
    """What keeps the command `words` from starting, in the current folder."""
    shown = " ".join(words)
    found = [f"{shown}: {word} does not exist" for word in words if _is_missing(word)]
    variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
    program, *rest = words[len(variables) :]
    try:
        if program == "sbatch":
            program, *rest = rest
        if program in NODE_SCRIPTS:
            unknown = [v for v in variables if v.split("=")[0] not in _node_scripts()]
            assert not unknown, f"{program} reads no {unknown}"
            _parse("examples/train_ppo.py", rest)
        elif (program, rest[0]) == ("accelerate", "launch"):
            launch = launch_command_parser().parse_args(rest[1:])
            _parse(launch.training_script, launch.training_script_args)
        elif program == "torchrun":
            launch = get_args_parser().parse_args(rest)
            _parse(launch.training_script, launch.training_script_args)
        elif program.endswith("python") and rest[0] == "-m":
            _parse(rest[1], rest[2:])
        elif program.endswith("python"):
            _parse(rest[0], rest[1:])
        elif program == "alpaca-ppo":
            _check_own(rest[0], rest[1:])
        elif program == "make":
            _check_make(rest)
        elif program == "pip":
            _check_pip(rest)
        else:
            assert program in ("cd", "git", "source", "tensorboard"), "this test does not know the program"
    except (AssertionError, ValueError, SystemExit) as error:
        found.append(f"{shown}: {error}")
    return found


def _is_missing(word: str) -> bool:
    """Whether `word` (also behind a =) is a path below examples/ or tests/ that is not there."""
    path = word.rpartition("=")[2]
    return path.startswith(("examples/", "tests/")) and not (ROOT / path).exists()


def _parse(program: str, arguments: list[str]) -> None:
    if program == "alpaca_ppo.cli":
        _check_own(arguments[0], arguments[1:])
        return
    if program in ARGUMENTS:
        if "--help" not in arguments:
            parse_args(ARGUMENTS[program], arguments)
        return
    if program.endswith(".py"):
        raise ValueError(f"{program} is not among the scripts with known arguments")
    # The laboratory's commands: their options stand in their source.
    source = importlib.util.find_spec(program)
    assert source is not None and source.origin is not None, f"there is no module {program}"
    if program.startswith(("examples", "tests")):
        text = Path(source.origin).read_text("utf-8")
        flags = [word.removeprefix("--") for word in arguments if word.startswith("--") and word != "--help"]
        assert all(flag in text for flag in flags), f"{program} does not take all of {flags}"


def _check_own(command: str, arguments: list[str]) -> None:
    assert command in COMMANDS, f"there is no subcommand {command!r}"
    if command == "train":
        _, arguments = split_flags(arguments)
    if (script := OWN.get(command)) is not None:
        _parse(script, arguments)
        return
    module = COMMANDS[command][0].partition(":")[0]
    text = (ROOT / f"alpaca_ppo/cli/{module}.py").read_text("utf-8")
    unknown = [w for w in arguments if w.startswith("--") and w not in ("--help", "--traceback") and w not in text]
    assert not unknown, f"alpaca-ppo {command} does not take {unknown}"


def _node_scripts() -> str:
    return "".join((ROOT / script).read_text("utf-8") for script in NODE_SCRIPTS)


def _check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    known = {target for group in targets for target in group.split()}
    unknown = [word for word in words if "=" not in word and word not in known]
    assert words and not unknown, f"the Makefile has no target {unknown}"


def _check_pip(words: list[str]) -> None:
    assert words[0] == "install", "pip is shown for installing only"
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file(), "the constraints file does not exist"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert extra in setup["options.extras_require"], f"there is no extra {extra!r}"


def key_complaints(text: str) -> list[str]:
    """What is wrong with a YAML block as the configuration of a run, in the current folder."""
    Path("block.yaml").write_text(yaml.safe_dump(RUN | yaml.safe_load(text)))
    try:
        parse_args(ARGUMENTS["examples/train_ppo.py"], ["--config", "block.yaml"])
    except ValueError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("block", all_blocks("bash", "sh"), ids=lambda block: block.place)
def test_every_command_would_start(block, workplace):
    assert [complaint for words in commands(block.text) for complaint in complaints(words)] == []


def test_there_is_no_block_of_another_language():
    known = {"bash", "sh", "python", "yaml", "text"}
    assert {block.language for block in all_blocks(*known, "", "console", "shell", "py", "yml")} <= known


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=lambda block: block.place)
def test_every_yaml_block_configures_a_run(block, workplace):
    assert key_complaints(block.text) == []


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "accelerate launch examples/train_ppo.py --config run.yaml --no_such_flag 1",
        "accelerate launch --no_such_option 1 examples/train_ppo.py --config run.yaml",
        "torchrun --nproc_per_node 2 examples/train_ppo.py --config run.yaml --deepspeed examples/nothing.json",
        "python examples/train_sft.py --model_name_or_path m --dataset_name d --no_such_flag 1",
        "alpaca-ppo train --accelerate_config zero9 --config run.yaml",
        "alpaca-ppo sample outputs/ppo --no_such_flag",
        "python -m examples.gsm8k_tiny --no_such_flag 1",
        "NO_SUCH_VARIABLE=1 examples/multi_node/launch.sh --config run.yaml",
        "pip install -c constraints.txt -e '.[nothing]'",
    ],
)
def test_a_command_that_would_not_start_is_found(command, workplace, capsys):
    assert len(complaints(*commands(command))) >= 1


@pytest.mark.parametrize("text", ["no_such_key: 1", "cliprange: 2.0", "critic: nothing"])
def test_a_yaml_block_that_configures_nothing_is_found(text, workplace):
    assert len(key_complaints(text)) == 1
