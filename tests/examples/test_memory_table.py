"""The memory table: estimates of its cells against live bytes, its text, its arguments."""

import json
import subprocess

import pytest
from accelerate.state import AcceleratorState, GradientState

from alpaca_ppo.config.parser import parse_args
from examples import memory_table
from examples.memory_cells import LAYOUTS, SHAPES, count_weights, run_cell
from examples.memory_table import CARD_GIB, PAGE, REPORT, TableArguments, main, table, write_between_markers

GIB = 2**30
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


@pytest.mark.parametrize("shape", ["llama-7b", "qwen2.5-7b"])
def test_four_roles_of_a_7b_shape_are_estimated_to_fit_the_card(shape):
    column = TableArguments().of(shape)
    assert 6.7e9 < count_weights(column) < 7.7e9
    assert (column["dtype"], column["gradient_checkpointing"], column["rows"]) == ("bfloat16", True, 16)
    cells = {layout: run_cell(column, layout) for layout in ("adapter", "reward")}
    assert all(cell["measured"] is None for cell in cells.values())
    # Base, logits aside, of 2 bytes a weight: the four roles share one, a reward model is another.
    assert (
        2 * count_weights(column) < cells["reward"]["estimated"] < (CARD_GIB - 1) * GIB < cells["adapter"]["estimated"]
    )


def cells_of(reward):
    whole = {layout: {"estimated": 40.0 * GIB, "measured": None} for layout in LAYOUTS}
    return {**whole, "full": {"estimated": 4.2 * GIB, "measured": 4.0 * GIB}, "reward": reward}


def test_the_table_marks_estimates_and_gives_a_verdict():
    columns = {
        "llama-112m": cells_of({"estimated": 1.0 * GIB, "measured": 0.96 * GIB}),
        "llama-7b": cells_of({"estimated": 17.5 * GIB, "measured": None}),
        "qwen2.5-7b": cells_of({"estimated": 18.0 * GIB, "measured": 24.5 * GIB}),
    }
    lines = table(columns).splitlines()
    assert lines[0] == "| layout | llama-112m | llama-7b | qwen2.5-7b |"
    assert lines[2].endswith("| 4.00 (4.20) | 4.00 (4.20) | 4.00 (4.20) |")
    assert lines[6].endswith("| 0.96 (1.00) | estimated 17.50 | 24.50 (18.00) |")
    assert lines[-2:] == [
        "Four roles on one llama-7b base: 17.50 GiB (estimated, not measured), under 24 GiB.",
        "Four roles on one qwen2.5-7b base: 24.50 GiB (measured), NOT under 24 GiB.",
    ]


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
    assert "measured on a CPU (bytes of live tensors)" in text and text.count("0.93 (1.86)") == 10
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shapes": ["llama-8b"]}, "shapes holds 'llama-8b'; choose from llama-112m"),
        ({"dtype": "float16"}, "dtype is 'float16'; choose float32 or bfloat16"),
        ({"only": "all"}, "only is 'all'; choose one of full, separate"),
    ],
)
def test_what_there_is_not_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        TableArguments(**given)
