"""The memory table: estimates of its cells against live bytes, its text, its arguments."""

import json
import subprocess

import pytest
from accelerate.state import AcceleratorState, GradientState

from alpaca_ppo.config.parser import parse_args
from examples import memory_table
from examples.memory_cells import LAYOUTS, SHAPES, run_cell
from examples.memory_table import PAGE, REPORT, TableArguments, main, write_between_markers

SMALL = ["--hidden_size=192", "--intermediate_size=512", "--num_hidden_layers=3", "--query_len=24", "--response_len=40"]


pytestmark = pytest.mark.proof


@pytest.fixture(autouse=True)
def fresh_state():
    """Each cell has its own precision; Accelerate keeps one a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def small(shape):
    (arguments,) = parse_args([TableArguments], SMALL)
    return arguments.of(shape)


@pytest.mark.parametrize("layout", ["full", "shared", "reward"])
def test_half_precision_steps_take_what_is_estimated(layout):
    cell = run_cell(small("llama-112m-bf16"), layout)
    assert 0.95 < cell["estimated"] / cell["measured"] < 1.05, cell


def test_the_command_runs_every_cell_in_a_process_of_its_own(tmp_path, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(
            command, 0, stdout='a word of a library\n{"estimated": 2e9, "measured": 1e9}\n'
        )

    monkeypatch.setattr(subprocess, "run", run)
    main([*SMALL, "--shapes", "llama-112m", "llama-7b", f"--report={tmp_path / 'table.md'}"])
    ends = [command[-2:] for command in commands]
    expected = [[f"--shapes={s}", f"--only={layout}"] for s in ("llama-112m", "llama-7b") for layout in LAYOUTS]
    assert ends == expected and all(SMALL[0] in command for command in commands)
    text = (tmp_path / "table.md").read_text()
    assert "measured on a CPU (bytes of live tensors)" in text and text.count("0.93 (1.86)") == 2 * len(LAYOUTS)
    assert "- llama-7b: 14 million weights, bfloat16, with gradient checkpointing; 16 prompts of 24 tokens" in text


def test_one_cell_alone_is_printed_as_json(capsys):
    main([*SMALL, "--rows=2", "--response_len=4", "--dtype=bfloat16", "--shapes=llama-112m", "--only=adapter"])
    cell = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.8 < cell["estimated"] / cell["measured"] < 1.25


def test_the_page_shows_the_table_of_the_report(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    shown = text.split(memory_table.BEGIN)[1].split(memory_table.END)[0].strip()
    assert shown in REPORT.read_text(encoding="utf-8") and all(shape in shown for shape in SHAPES)
    copy = tmp_path / "memory.md"
    copy.write_text(text, encoding="utf-8")
    write_between_markers(copy, "new\n")
    after = copy.read_text(encoding="utf-8")
    assert after == text.replace(shown, "new")
